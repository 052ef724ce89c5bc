"""Answers of each family, tokenizers of bytes and a family's tags, and answers in pieces at random."""

import random
from typing import Any

from tokenizers import AddedToken

from rollout_engine.base.tool_call import ToolCall
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.formats.answer import AnswerFormat, AnswerParts
from rollout_engine.text.formats.choose import answer_format
from rollout_engine.text.formats.families import FAMILIES
from rollout_engine.text.formats.harmony import TAGS
from rollout_engine.text.formats.make import THINKING
from rollout_engine.text.tokenizer import TextCodec

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Add.", "parameters": PARAMETERS}}]
ADD = ToolCall("add", {"a": 1, "b": "x, y"})
NOW = ToolCall("now", {})

HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x, y"}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx, y\n</parameter>\n"
    "</function>\n</tool_call>"
)
GLM = (
    "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>b</arg_key>\n<arg_value>x, y</arg_value>\n</tool_call>"
)
ARGUMENTS = '{"a": 1, "b": "x, y"}'


def deepseek(*calls: str) -> str:
    """A section of calls of DeepSeek V3 or V3.1."""
    inner = "\n".join(f"<｜tool▁call▁begin｜>{each}<｜tool▁call▁end｜>" for each in calls)
    return f"<｜tool▁calls▁begin｜>{inner}<｜tool▁calls▁end｜>"


def kimi(*calls: tuple[str, str]) -> str:
    """A section of calls of Kimi K2."""
    inner = "".join(
        f"<|tool_call_begin|>{name}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"
        for name, arguments in calls
    )
    return f"<|tool_calls_section_begin|>{inner}<|tool_calls_section_end|>"


DSML = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="b" string="true">x, y</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>'
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n'
    '<parameter name="b">x, y</parameter>\n</invoke>\n</minimax:tool_call>'
)
ANALYSIS = "<|channel|>analysis<|message|>hm<|end|>"
TO_ADD = f"<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"

WHOLE: list[tuple[str, str, str, AnswerParts]] = [
    # name of the format, end of the prompt, the answer, its parts
    ("hermes", "", f"<think>\nhm\n</think>\n\nI add. {HERMES}\n{HERMES}", AnswerParts("hm", "I add.", [ADD, ADD])),
    ("hermes", "<think>\n", f"hm\n</think>\n\n{HERMES}", AnswerParts("hm", "", [ADD])),
    ("hermes", "<think>\n\n</think>\n\n", f"So. {HERMES}", AnswerParts(None, "So.", [ADD])),
    ("llama3", "", '{"name": "add", "parameters": {"a": 1, "b": "x, y"}}', AnswerParts(None, "", [ADD])),
    ("xml", "<think>\n", f"hm</think>{XML}", AnswerParts("hm", "", [ADD])),
    ("glm", "", f"\n<think>hm</think>\nWait.\n{GLM}", AnswerParts("hm", "Wait.", [ADD])),
    (
        "seed",
        "",
        f"<seed:think>hm</seed:think>{XML.replace('tool_call', 'seed:tool_call')}",
        AnswerParts("hm", "", [ADD]),
    ),
    (
        "deepseek",
        "<think>\n",
        "hm\n</think>\n\nI add." + deepseek(f"function<｜tool▁sep｜>add\n```json\n{ARGUMENTS}\n```"),
        AnswerParts("hm", "I add.", [ADD]),
    ),
    (
        "deepseek",
        "</think>",
        "I add." + deepseek(f"add<｜tool▁sep｜>{ARGUMENTS}", "now<｜tool▁sep｜>{}"),
        AnswerParts(None, "I add.", [ADD, NOW]),
    ),
    ("dsml", "<think>", f"hm</think>I add.\n\n{DSML}", AnswerParts("hm", "I add.", [ADD])),
    (
        "kimi",
        "",
        "<think>hm</think>I add." + kimi(("functions.add:0", ARGUMENTS), ("functions.now:1", "{}")),
        AnswerParts("hm", "I add.", [ADD, NOW]),
    ),
    ("mistral", "", f'[TOOL_CALLS] [{{"name": "add", "arguments": {ARGUMENTS}}}]', AnswerParts(None, "", [ADD])),
    (
        "mistral",
        "",
        f"[THINK]hm[/THINK]I add.[TOOL_CALLS]add[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]0123abcde[ARGS]{{}}",
        AnswerParts("hm", "I add.", [ADD, NOW]),
    ),
    (
        "gemma",
        "",
        "I add.<start_function_call>call:add{a:1,b:<escape>x, y<escape>}<end_function_call>",
        AnswerParts(None, "I add.", [ADD]),
    ),
    (
        "gemma",
        "",
        '<|channel>thought\nhm<channel|>I add.<|tool_call>call:add{a:1,b:<|"|>x, y<|"|>}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        AnswerParts("hm", "I add.", [ADD, NOW]),
    ),
    ("minimax", "<think>\n", f"hm\n</think>\n\nI add.\n{MINIMAX}", AnswerParts("hm", "I add.", [ADD])),
    (
        "nemotron",
        "",
        f'<think>hm</think>I add. <TOOLCALL>[{{"name": "add", "arguments": {ARGUMENTS}}}]</TOOLCALL>',
        AnswerParts("hm", "I add.", [ADD]),
    ),
    ("pythonic", "", '[add(a=1, b="x, y"), now()]', AnswerParts(None, "", [ADD, NOW])),
    ("pythonic", "", '```tool_code\nprint(add(1, b="x, y"))\n```', AnswerParts(None, "", [ADD])),
    ("harmony", "<|start|>assistant", ANALYSIS + TO_ADD, AnswerParts("hm", "", [ADD])),
    ("harmony", "<|start|>assistant", ANALYSIS + FINAL, AnswerParts("hm", "Done.")),
    ("think", "<think>\n", "hm\n</think>\n\nSo.", AnswerParts("hm", "So.")),
]


def tags_of(name: str) -> list[str]:
    """The tags of a family that are tokens."""
    thinking = "seed" if name == "seed" else name if name in ("mistral", "gemma") else "think"
    calls = TAGS if name == "harmony" else FAMILIES[name].tags if name in FAMILIES else ("<tool_call>", "</tool_call>")
    return list(dict.fromkeys([*THINKING[thinking].tokens, *calls]))


def codec_with(tags: list[str], *, special: bool = False) -> TextCodec:
    """A tokenizer of bytes, in which these texts are tokens."""
    hf: Any = byte_tokenizer()
    hf.add_tokens([AddedToken(tag, special=special, normalized=False) for tag in tags], special_tokens=special)
    return TextCodec(hf)


def format_of(name: str, codec: TextCodec) -> AnswerFormat:
    """The format of this name."""
    closings = {"mistral": "[/THINK]", "gemma": "<channel|>", "seed": "</seed:think>"}
    codec.hf.chat_template = closings.get(name, "</think>")
    found = answer_format(codec, None, name)
    assert found is not None
    return found


def spell(codec: TextCodec, text: str) -> list[int]:
    """The ids of a text, tags in bytes as prose spells them."""
    return [token_id for character in text for token_id in codec.encode(character, add_special_tokens=False)]


def shown(codec: TextCodec, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """The text of an answer as an engine decodes it."""
    stream = codec.new_stream(skip_special_tokens=skip_special_tokens)
    return stream.push(token_ids) + stream.flush()


def read_in_pieces(
    form: AnswerFormat, token_ids: list[int], text: str, rng: random.Random, **arguments: Any
) -> AnswerParts:
    """The parts of an answer whose ids and text arrive in pieces at random, the text behind the ids."""
    stream, pieces, at, said = form.stream(**arguments), [], 0, 0
    while at < len(token_ids) or said < len(text):
        to = min(len(token_ids), at + rng.choice((0, 1, 1, 2, 5, 40)))
        ready = len(text) if to == len(token_ids) else min(len(text), said + rng.choice((0, 1, 3, 30)))
        pieces += stream.feed(token_ids[at:to], text[said:ready])
        at, said = to, ready
    pieces += stream.end()
    thinking = [piece.text for piece in pieces if piece.kind == "thinking"]
    joined = AnswerParts(
        "".join(thinking) if thinking else None,
        "".join(piece.text for piece in pieces if piece.kind == "text"),
        [piece.call for piece in pieces if piece.call is not None],
    )
    parts = stream.parts
    assert (joined.thinking, joined.text, joined.calls) == (parts.thinking, parts.text, parts.calls)
    return parts
