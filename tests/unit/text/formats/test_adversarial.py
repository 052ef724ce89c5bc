"""Nothing that a policy writes raises, takes long, or makes a call of prose."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_engine.base.tool_call import BrokenCall, ToolCall
from rollout_engine.text.formats.answer import AnswerParts
from rollout_engine.text.formats.make import THINKING
from rollout_engine.text.formats.tool_calls import FRAMED_TAGS, opens_thinking, parse_typed_calls
from rollout_engine.text.tokenizer import TextCodec

from .answers import (
    ARGUMENTS,
    DSML,
    HERMES,
    MINIMAX,
    TOOLS,
    WHOLE,
    codec_with,
    deepseek,
    format_of,
    kimi,
    read_in_pieces,
    shown,
    spell,
    tags_of,
)

NAMES = sorted({name for name, *_ in WHOLE})
SAMPLES = {
    "deepseek": deepseek(f"add<｜tool▁sep｜>{ARGUMENTS}"),
    "dsml": DSML,
    "kimi": kimi(("functions.add:0", ARGUMENTS)),
    "mistral": f"[TOOL_CALLS]add[ARGS]{ARGUMENTS}",
    "gemma": '<|tool_call>call:add{a:1,b:<|"|>x, y<|"|>}<tool_call|>',
    "minimax": MINIMAX,
    "nemotron": f'<TOOLCALL>[{{"name": "add", "arguments": {ARGUMENTS}}}]</TOOLCALL>',
}


def both_ways(form, codec, token_ids, **arguments):
    """The parts of an answer, read whole and in pieces."""
    text = shown(codec, token_ids)
    whole = form.read(token_ids, text, tools=TOOLS, **arguments)
    assert read_in_pieces(form, token_ids, text, random.Random(len(text)), tools=TOOLS, **arguments) == whole
    return whole


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NAMES)
def test_random_tags_and_words_are_read_alike_whole_and_in_pieces(name):
    rng = random.Random(name)
    tags = [*tags_of(name), "<think>", "</think>", "<tool_call>", "</tool_call>"]
    words = [
        *tags,
        *(answer for each, _, answer, _ in WHOLE if each == name),
        ARGUMENTS,
        " ",
        "\n\n",
        "word",
        "{",
        "[",
        "é",
    ]
    for kind in ("tokens", "text", "special"):
        codec = codec_with([] if kind == "text" else tags_of(name), special=kind == "special")
        form = format_of(name, codec)
        opening = next(iter(THINKING.values())).opening
        for _ in range(60):
            answer = "".join(rng.choice(words) for _ in range(rng.randrange(1, 8)))
            cut = rng.randrange(len(answer) + 1)
            token_ids = codec.encode(answer[:cut], add_special_tokens=False)
            token_ids += (
                spell(codec, answer[cut:])
                if rng.random() < 0.3
                else codec.encode(answer[cut:], add_special_tokens=False)
            )
            both_ways(form, codec, token_ids, prompt_end=rng.choice(("", "<think>\n", f"hi {opening}", "</think>")))


@pytest.mark.parametrize("name", SAMPLES)
def test_tags_in_arguments_are_part_of_them(name):
    codec = codec_with([], special=False)  # all tags are text
    form = format_of(name, codec)
    value = "a <think> </think> [TOOL_CALLS] <tool_call> </invoke b"
    answer = SAMPLES[name].replace("x, y", value)
    assert both_ways(form, codec, codec.encode(answer, add_special_tokens=False)).found == [
        ToolCall("add", {"a": 1, "b": value})
    ]


@pytest.mark.parametrize("name", [name for name in SAMPLES if name not in ("dsml", "minimax")])
def test_a_tag_that_was_sampled_as_a_token_within_a_text_is_its_text(name):
    codec = codec_with(tags_of(name))
    tag = "<think>" if name not in ("gemma", "mistral") else THINKING[name].opening.removesuffix("thought")
    answer = SAMPLES[name].replace("x, y", f"a {tag} b")
    [call] = both_ways(format_of(name, codec), codec, codec.encode(answer, add_special_tokens=False)).found
    assert call == ToolCall("add", {"a": 1, "b": f"a {tag} b"})


@pytest.mark.parametrize("name", SAMPLES)
def test_a_call_that_thinking_drafts_is_none(name):
    codec = codec_with(tags_of(name))
    thinking = THINKING[name if name in ("gemma", "mistral") else "think"]
    answer = f"{thinking.opening}\nI could {SAMPLES[name]}\n{thinking.closing}\n\nNo."
    found = both_ways(format_of(name, codec), codec, codec.encode(answer, add_special_tokens=False))
    assert found.text == "No." and not found.found and found.thinking.startswith("I could")
    unclosed = codec.encode(answer.partition(thinking.closing)[0], add_special_tokens=False)
    found = both_ways(format_of(name, codec), codec, unclosed)
    assert found.is_thinking and not found.found and not found.text


@pytest.mark.parametrize("name", SAMPLES)
@pytest.mark.parametrize("bad", ["{", "[[", '{"a": }', "call:{", "]", "", "\n"])
def test_a_broken_call_stays_text_and_says_why(name, bad):
    codec = codec_with(tags_of(name))
    opening, closing = {
        "deepseek": ("<｜tool▁call▁begin｜>add<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "dsml": ("<｜DSML｜invoke", "</｜DSML｜invoke>"),
        "kimi": ("<|tool_call_begin|>add<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        "mistral": ("[TOOL_CALLS]add[ARGS]", ""),
        "gemma": ("<|tool_call>", "<tool_call|>"),
        "minimax": ("<minimax:tool_call>", "</minimax:tool_call>"),
        "nemotron": ("<TOOLCALL>", "</TOOLCALL>"),
    }[name]
    answer = f"I add. {opening}{bad}{closing}"
    found = both_ways(format_of(name, codec), codec, codec.encode(answer, add_special_tokens=False))
    [broken] = found.found
    assert isinstance(broken, BrokenCall) and broken.problem and found.text.startswith("I add.")
    assert bad.strip() in found.text


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["tokens", "text"])
def test_ten_thousand_tags_end_soon(name, kind):
    codec = codec_with(tags_of(name) if kind == "tokens" else [])
    form = format_of(name, codec)
    tags = dict.fromkeys([*tags_of(name), "<tool_call>", "{", "[", "call:a{b:[", "\n"])
    for tag in tags:
        token_ids = codec.encode(tag, add_special_tokens=False) * 10_000
        found = form.read(token_ids, shown(codec, token_ids), prompt_end="", tools=TOOLS)
        assert not found.calls and len(found.broken) <= 65


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", NAMES)
def test_a_stream_of_single_tokens_is_linear_enough(name):
    codec = codec_with(tags_of(name))
    form, words = format_of(name, codec), codec.encode("word ", add_special_tokens=False) * 2_000
    stream, decoder = form.stream(tools=TOOLS), codec.new_stream(skip_special_tokens=True)
    said = "".join(piece.text for token_id in words for piece in stream.feed([token_id], decoder.push([token_id])))
    rest = "".join(piece.text for piece in stream.end())
    assert (said + rest).strip() == ("word " * 2_000).strip()
    assert said or name == "harmony"


def test_what_a_stop_string_has_cut_is_no_word_but_its_call_counts():
    codec = codec_with(["<tool_call>", "</tool_call>"])
    form = format_of("hermes", codec)
    token_ids = codec.encode(f"I add. {HERMES} Done.", add_special_tokens=False)
    cut = f"I add. {HERMES}"[:40]
    found = form.read(token_ids, cut, tools=TOOLS)
    assert found.text == "I add." and len(found.calls) == 1
    assert read_in_pieces(form, token_ids, cut, random.Random(3), tools=TOOLS) == found


def test_characters_that_span_tokens_are_whole():
    codec = codec_with(tags_of("kimi"))
    form = format_of("kimi", codec)
    answer = "<think>é…😀</think>Voilà: 😀" + kimi(("functions.add:0", '{"a": 1, "b": "naïve 😀"}'))
    found = both_ways(form, codec, codec.encode(answer, add_special_tokens=False))
    assert found == AnswerParts("é…😀", "Voilà: 😀", [ToolCall("add", {"a": 1, "b": "naïve 😀"})])
    broken = codec.encode("é", add_special_tokens=False)[:1]
    assert both_ways(form, codec, broken).text == "\N{REPLACEMENT CHARACTER}"


def test_lone_surrogates_and_other_types_in_arguments_do_no_harm():
    codec = codec_with(tags_of("nemotron"))
    form = format_of("nemotron", codec)
    for value, expected in ((r'"\ud800"', "\ufffd"), ("[1, null]", [1, None]), ("1e3", 1000.0)):
        answer = f'<TOOLCALL>{{"name": "add", "arguments": {{"b": {value}}}}}</TOOLCALL>'
        assert both_ways(form, codec, codec.encode(answer, add_special_tokens=False)).found == [
            ToolCall("add", {"b": expected})
        ]
    for call in ("3", '"add"', '{"name": 3}', '[{"name": "add", "arguments": 3}]', "[]", "null"):
        answer = f"<TOOLCALL>{call}</TOOLCALL>"
        [broken] = both_ways(form, codec, codec.encode(answer, add_special_tokens=False)).found
        assert isinstance(broken, BrokenCall)


@pytest.mark.parametrize(
    "answer, found",
    [
        ("[add(a=1, b='x')]", [ToolCall("add", {"a": 1, "b": "x"})]),
        ("[add(1, 'x')]", [ToolCall("add", {"a": 1, "b": "x"})]),
        ("[os.path(a=[1, {'b': None}])]", [ToolCall("os.path", {"a": [1, {"b": None}]})]),
        ("```tool_code\nx = add(a=1)\n```", [ToolCall("add", {"a": 1})]),
        ("[1, 2] are numbers.", []),
        ("See [add(a=1)].", []),
    ],
)
def test_python_is_read_where_an_answer_begins_with_it(answer, found):
    codec = codec_with([])
    assert both_ways(format_of("pythonic", codec), codec, codec.encode(answer, add_special_tokens=False)).found == found


@pytest.mark.parametrize(
    "code",
    [
        "[add(a=b)]",
        "[add(**{})]",
        "[add(1, 2, 3)]",
        "[add(a=1",
        "[add(a=(1,))]",
        "[add(a=1e999)]",
        "[add(a=1), 2]",
        "[now(" + "-" * 9_000 + "1)]",
        "[now(a=" + "(" * 5_000,
        "[add(a=__import__('os'))]",
        "```tool_code\nimport os\n```",
        "```tool_code\n```",
    ],
)
def test_other_python_is_a_broken_call(code):
    codec = codec_with([])
    [broken] = both_ways(format_of("pythonic", codec), codec, codec.encode(code, add_special_tokens=False)).found
    assert isinstance(broken, BrokenCall)


TEXT_FORMS = {"hermes": "think", "llama3": "think", "xml": "think", "glm": "think", "seed": "seed"}


@pytest.mark.parametrize("name", TEXT_FORMS)
def test_forms_that_are_read_in_text_have_the_same_calls_as_ever(name):
    rng, codec = random.Random(name), codec_with([])
    form, tags = format_of(name, codec), THINKING[TEXT_FORMS[name]]
    words = [answer for each, _, answer, _ in WHOLE if each == name]
    words += [tags.opening, tags.closing, *FRAMED_TAGS.get(name, ("{", "}")), ARGUMENTS, " ", "\n", "word"]
    for _ in range(300):
        answer = "".join(rng.choice(words) for _ in range(rng.randrange(1, 8)))
        prompt = rng.choice(("", f"{tags.opening}\n"))
        known = parse_typed_calls(answer, name, TOOLS, is_thinking=opens_thinking(prompt))
        found = form.read(codec.encode(answer, add_special_tokens=False), answer, prompt_end=prompt, tools=TOOLS)
        assert found.calls == known.calls
        assert [each.text for each in found.broken] == [each.text for each in known.broken]


def metaspace_codec(tags):
    """A tokenizer of characters that spells spaces as SentencePiece does, in which these texts are special tokens."""
    characters = [chr(each) for each in range(33, 127)] + ["\u2581", "\n"]
    vocabulary = {token: index for index, token in enumerate(["<unk>", "</s>", *characters])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    inner.decoder = decoders.Metaspace(prepend_scheme="never", split=False)
    hf = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>", clean_up_tokenization_spaces=False)
    hf.add_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags], special_tokens=True)
    return TextCodec(hf)


@pytest.mark.parametrize("name", ["mistral", "gemma", "kimi", "harmony"])
def test_tokenizers_that_decode_by_a_window_are_read_alike(name):
    codec = metaspace_codec(tags_of(name))
    form = format_of(name, codec)
    for each, prompt, answer, parts in WHOLE:
        if each == name:
            token_ids = codec.encode(answer + "</s>", add_special_tokens=False)
            assert both_ways(form, codec, token_ids, prompt_end=prompt) == parts
