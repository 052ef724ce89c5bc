"""Conversations are prompts; their form is checked, their template's options reach it, nothing is printed into them."""

import logging

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from rollout_engine import LLM
from rollout_engine.base.errors import RequestError
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.input_processor import InputProcessor
from rollout_engine.text.prompts import as_batch, check_chat_arguments, with_chat_options
from rollout_engine.text.tokenizer import TextCodec

HI = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% if tools %}[{{ tools | tojson }}]{% endif %}"
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% if m['tool_calls'] %}CALL{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if enable_thinking is false %}<no>{% endif %}{% endif %}"
)

CALLS = (  # tool calls as Qwen 2.5's template writes them
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %};{% endfor %}'
)
ITEMS = CALLS.replace(
    "{{ call.function.arguments | tojson }}",
    "{% for k, v in call.function.arguments | items %}{{ k }}={{ v }}{% endfor %}",
)
TEXT_ARGUMENTS = CALLS.replace("{{ call.function.arguments | tojson }}", "{{ '' + call.function.arguments }}")
IF_THERE = (  # as Llama 3.1's asks for calls
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{{ m.tool_calls[0].function.arguments | tojson }}"
    "{% else %}<{{ m.role }}>{{ m.content }}{% endif %};{% endfor %}"
)
PARTS = (  # as Gemma 3, Llama 4 and Mistral 3 read content
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %};{% endfor %}"
)
NO_PARTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is string else '' }};{% endfor %}"  # as Qwen3
)
KNOWN_ROLES = (
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>{{ m.content }};{% endif %}"
    "{% endfor %}"
)
FIRST_SYSTEM = (  # as gpt-oss writes a system's or developer's message, in capitals
    "{% for m in messages %}{% if m.role != 'system' %}<{{ m.role }}>{{ m.content }};{% elif loop.first %}"
    "{{ m.content | upper }};{% endif %}{% endfor %}"
)
LATE = {"role": "system", "content": "Be brief."}
ARGUMENTS = "messages[0]['tool_calls'][0]['function']['arguments']"


def calling(arguments, **more):
    """An answer that calls `add`."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call], **more}


CALLING = calling({})


@pytest.fixture
def inputs(codec):
    return InputProcessor(codec, max_model_len=512, vocab_size=259)


@pytest.fixture
def thinking():
    """An input processor whose template reads tools and `enable_thinking`."""
    hf = byte_tokenizer()
    hf.chat_template = TEMPLATE
    return InputProcessor(TextCodec(hf), max_model_len=1024, vocab_size=259)


def texts(inputs, prompts):
    return [checked.text for checked in inputs.check_batch(prompts, None)]


@pytest.mark.parametrize(
    "prompts, rendered",
    [
        (HI, ["<user>hi;<assistant>"]),
        (tuple(HI), ["<user>hi;<assistant>"]),
        ([HI, HI], ["<user>hi;<assistant>"] * 2),
        ([HI, "a", [5], {"prompt": HI}], ["<user>hi;<assistant>", "a", None, "<user>hi;<assistant>"]),
        ({"prompt": HI}, ["<user>hi;<assistant>"]),
        ({"prompt": "a", "add_special_tokens": False}, ["a"]),
        ((each for each in [HI, HI]), ["<user>hi;<assistant>"] * 2),
        (np.array(["a", "b"]), ["a", "b"]),
        ({"messages": HI, "chat_template_kwargs": {"enable_thinking": False}}, ["<user>hi;<assistant><no>"]),
        ({"messages": HI, "add_generation_prompt": False}, ["<user>hi;"]),
        ({"messages": HI, "continue_final_message": True}, ["<user>hi"]),
        ({"messages": HI, "chat_template": "{{ messages[0].content }}!"}, ["hi!"]),
        ({"messages": HI, "tools": [{"name": "f"}]}, ['[[{"name": "f"}]]<user>hi;<assistant>']),
    ],
)  # fmt: skip
def test_a_conversation_is_one_prompt_wherever_it_stands(thinking, prompts, rendered):
    assert texts(thinking, prompts) == rendered


@pytest.mark.parametrize(
    "ids",
    [
        torch.tensor([74, 75]),
        torch.tensor([74, 75], dtype=torch.int32),
        np.array([74, 75], np.uint8),
        [torch.tensor(74), torch.tensor(75)],
        [np.int16(74), 75],
    ],
)
def test_arrays_of_ids_are_one_prompt_and_lists_of_them_many(inputs, ids):
    assert [checked.token_ids for checked in inputs.check_batch(ids, None)] == [[74, 75]]
    assert [checked.token_ids for checked in inputs.check_batch([ids, ids], None)] == [[74, 75]] * 2


def test_a_set_of_prompts_has_no_order_and_is_refused(inputs):
    with pytest.raises(RequestError, match="a str, a list of token ids, a conversation"):
        inputs.check_batch({"a", "b"}, None)


def test_a_padded_batch_of_ids_is_refused_with_the_reason():
    with pytest.raises(RequestError, match=r"an array of shape \(2, 3\).*must be of one dimension.*padding"):
        as_batch(torch.zeros(2, 3, dtype=torch.int64))


def rendered(inputs, template, *messages):
    return texts(inputs, {"messages": list(messages), "chat_template": template, "add_generation_prompt": False})[0]


TWO_PARTS = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]


@pytest.mark.parametrize("template, text", [(TEMPLATE, "a\nb"), (NO_PARTS, "a\nb"), (PARTS, "ab")])
def test_text_parts_reach_a_template_that_reads_them_and_are_joined_by_newlines_for_others(inputs, template, text):
    parts = [dict(part) for part in TWO_PARTS]
    assert rendered(inputs, template, {"role": "user", "content": parts}) == f"<user>{text};"
    mixed = [{"role": "system", "content": "s"}, {"role": "user", "content": parts}, {"role": "user", "content": []}]
    assert rendered(inputs, template, *mixed) == f"<system>s;<user>{text};<user>;"
    assert parts == TWO_PARTS


def test_parts_are_read_as_transformers_renders_them(inputs):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = [{"role": "user", "content": parts}]
    assert rendered(inputs, PARTS, *asked) == inputs.codec.hf.apply_chat_template(
        asked, chat_template=PARTS, tokenize=False
    )


PARTS_ALONE = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content if part.type == 'text' %}{{ part.text }}"
    "{% endfor %};{% endfor %}"
)


def test_texts_are_parts_for_a_template_that_reads_nothing_else(inputs):
    asked = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    for _ in range(2):
        assert rendered(inputs, PARTS_ALONE, *asked) == "<user>a;<assistant>b;<user>c;"
    listed = [{"role": "user", "content": [dict(part) for part in TWO_PARTS]}, *asked[1:]]
    assert rendered(inputs, PARTS_ALONE, *listed) == "<user>ab;<assistant>b;<user>c;"


@pytest.mark.parametrize(
    "template, arguments, written",
    [
        (CALLS, '{"a": 1, "b": "ä"}', '{"name": "add", "arguments": {"a": 1, "b": "ä"}}'),
        (CALLS, {"a": 1}, '{"name": "add", "arguments": {"a": 1}}'),
        (CALLS, "", '{"name": "add", "arguments": {}}'),
        (CALLS, None, '{"name": "add", "arguments": {}}'),
        (ITEMS, '{"a": 1}', '{"name": "add", "arguments": a=1}'),
        (TEXT_ARGUMENTS, '{"a":1}', '{"name": "add", "arguments": {"a": 1}}'),
        (TEXT_ARGUMENTS, {"a": 1}, '{"name": "add", "arguments": {"a": 1}}'),
    ],
)
def test_arguments_of_a_call_are_written_once_whether_they_come_as_an_object_or_as_json_text(
    inputs, template, arguments, written
):
    asked = calling(arguments)
    assert rendered(inputs, template, *HI, asked) == f"<user>hi;<assistant>{written};"
    assert asked == calling(arguments)


@pytest.mark.parametrize("calls", [{}, {"tool_calls": []}, {"tool_calls": None}, {"function_call": None, "name": None}])
def test_an_answer_without_calls_has_no_key_for_them(inputs, calls):
    answer = {"role": "assistant", "content": "b", **calls}
    assert rendered(inputs, IF_THERE, *HI, answer) == "<user>hi;<assistant>b;"


def test_an_assistant_that_calls_tools_needs_no_content(inputs):
    trimming = CALLS.replace("m.content", "m.content | trim")
    for template in (CALLS, trimming, CALLS.replace("m.content", "(m.content + '')")):
        shown = '<assistant>{"name": "add", "arguments": {}};'
        assert rendered(inputs, template, calling({})) == shown
        assert rendered(inputs, template, {key: each for key, each in CALLING.items() if key != "content"}) == shown


@pytest.mark.parametrize(
    "template, messages, field, words",
    [
        (KNOWN_ROLES, [{"role": "developer", "content": "x"}, *HI], "messages[0]['role']", "'developer'.*as 'system'"),
        (KNOWN_ROLES, [*HI, {"role": "tool", "content": "x"}], "messages[1]['role']", "'tool'.*as 'user'"),
        (
            KNOWN_ROLES,
            [*HI, {"role": "tool", "content": TWO_PARTS}],
            "messages[1]['role']",
            "leaves the message out",
        ),
        (
            FIRST_SYSTEM,
            [LATE, LATE | {"content": "Or not."}, *HI],
            "messages[1]['role']",
            "'system'.*leaves the message out",
        ),
        (
            FIRST_SYSTEM,
            [LATE, *HI, LATE | {"content": [{"type": "text", "text": "Or not."}]}],
            "messages[2]['role']",
            "leaves the message out",
        ),
        (KNOWN_ROLES, [*HI, CALLING], "messages[1]['tool_calls']", "leaves tool calls out"),
    ],
)
def test_messages_that_a_template_leaves_out_are_refused(inputs, template, messages, field, words):
    for _ in range(2):
        with pytest.raises(RequestError, match=words) as caught:
            rendered(inputs, template, *messages)
        assert caught.value.field == field
    assert rendered(inputs, template, *HI) == "<user>hi;"


def test_messages_that_a_template_writes_in_other_words_are_taken(inputs):
    assert rendered(inputs, FIRST_SYSTEM, LATE, *HI) == "BE BRIEF.;<user>hi;"


@pytest.mark.parametrize(
    "messages, field, words",
    [
        ([*HI, {"content": "x"}], "messages[1]", "a message with 'role'"),
        ([{"role": "user", "contnet": "x"}], "messages[0]", "contnet.*a message with 'content'"),
        ([{"role": None, "content": "x"}], "messages[0]['role']", "None is not allowed: must be a str: 'system'"),
        ([{"role": 5, "content": "x"}], "messages[0]['role']", "a str"),
        ([*HI, {"role": "assistant"}], "messages[1]", "a message with 'content'"),
        ([{"role": "user", "content": None}], "messages[0]['content']", "a str"),
        ([{"role": "tool", "content": {"a": 1}}], "messages[0]['content']", r"json\.dumps"),
        ([*HI, "x"], "messages[1]", "a message: a dict"),
        ([{"role": np.empty(2), "content": "x"}], "messages[0]['role']", "a str"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "messages[0]['content']", "a str"),
        ([{"role": "assistant", "content": None, "tool_calls": np.zeros(2)}], "messages[0]['tool_calls']", "a list"),
        ([CALLING | {"tool_calls": [{"name": 5}]}], "messages[0]['tool_calls'][0]", "a tool call, "),
        ([CALLING | {"tool_calls": ["f"]}], "messages[0]['tool_calls'][0]", "a tool call, "),
        ([calling("{'a': 1}")], ARGUMENTS, "JSON text .Expecting property name"),
        ([calling("[1]")], ARGUMENTS, "an object, or one as JSON text"),
        ([calling([1])], ARGUMENTS, "an object"),
        (
            [{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": "{}"}}],
            "messages[0]['function_call']",
            "must be given as tool_calls",
        ),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio", "input_audio": {}}]}],
            "messages[0]['content'][1]['type']",
            "'input_audio' is not allowed: must be a part of text.*or of a picture.*Audio is not served",
        ),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0]['content'][0]", "a part of text"),
        ([{"role": "user", "content": ["a"]}], "messages[0]['content'][0]", "a part of text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0]['content'][0]['text']", "a str"),
    ],
)
def test_a_bad_message_is_named_by_its_index_and_field(inputs, messages, field, words):
    with pytest.raises(RequestError, match=words) as caught:
        inputs.check_batch(messages, None)
    assert caught.value.field == field
    with pytest.raises(RequestError, match=r"^prompts\[1\]: messages\["):
        inputs.check_batch([HI, messages], None)


@pytest.mark.parametrize(
    "prompt, field, words",
    [
        ({"messages": []}, "messages", "a list of at least one message"),
        ({"messages": [HI]}, "messages[0]", "a list of conversations is a list of prompts"),
        ({"messages": HI, "tools": [5]}, "tools[0]", "a JSON schema"),
        ({"messages": HI, "tools": {}}, "tools", "a list"),
        ({"messages": HI, "chat_template": 5}, "chat_template", "a str"),
        ({"messages": HI, "chat_template": "mine.jinja"}, "chat_template", "a Jinja template.*A path is not read"),
        ({"messages": HI, "chat_template_kwargs": [1]}, "chat_template_kwargs", "a dict"),
        ({"messages": HI, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "own variables"),
        ({"messages": HI, "add_generation_prompt": "yes"}, "add_generation_prompt", "a bool"),
        (
            {"messages": HI, "add_generation_prompt": True, "continue_final_message": True},
            "add_generation_prompt",
            "absent with continue_final_message=True",
        ),
        ({"prompt": "x", "chat_template_kwargs": {}}, "chat_template_kwargs", "given with a conversation"),
        (HI[0], "prompt", "a prompt, not a message. Put the message into a list"),
        ({"prompt": "x", "answer": 5}, "answer", r"Other columns of a dataset go to rollout\(\.\.\., columns="),
        ({"prompt": "x", "multi_modal_uuids": {}}, "multi_modal_uuids", "vLLM's"),
        ({"input_ids": [5]}, "input_ids", "give prompt_token_ids"),
        (BatchEncoding({"input_ids": [5]}), "input_ids", "give prompt_token_ids"),
        ({"messages": HI, "add_special_tokens": True}, "add_special_tokens", "given with a text"),
        ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens", "a bool"),
        (["a", "b"], "prompt", "one prompt, not a list of them"),
        ([HI, HI], "prompt", "one prompt, not a list of them"),
        (np.ndarray, "prompt", "a str, a list of token ids"),
        ({"a", "b"}, "prompt", "a str, a list of token ids, a conversation"),
    ],
)
def test_a_bad_option_of_a_conversation_is_refused_by_its_name(inputs, prompt, field, words):
    with pytest.raises(RequestError, match=f"(?i){words}") as caught:
        inputs.check(prompt, None)
    assert caught.value.field == field


def test_a_named_template_is_the_tokenizers_and_a_misspelt_one_is_no_prompt():
    hf = byte_tokenizer()
    hf.chat_template = {"default": "D", "short": "{{ messages[0].content }}"}
    named = InputProcessor(TextCodec(hf), max_model_len=512, vocab_size=259)
    assert texts(named, {"messages": HI, "chat_template": "short"}) == ["hi"]
    with pytest.raises(RequestError, match="chat_template='shrt' is not allowed.*default, short"):
        named.check({"messages": HI, "chat_template": "shrt"}, None)


def test_what_a_template_never_reads_is_said_once(inputs, caplog):
    prompt = {"messages": HI, "chat_template_kwargs": {"enable_thinkin": False}}
    with caplog.at_level(logging.WARNING, logger="rollout_engine"):
        inputs.check_batch([prompt, prompt], None)
    assert [record.getMessage() for record in caplog.records] == [
        "The chat template never reads 'enable_thinkin': giving it changes no prompt.",
    ]


def test_thinking_that_a_template_never_reads_is_said_once(inputs, caplog):
    said = {"role": "assistant", "content": "b", "reasoning_content": "Hm."}
    reading = "{% for m in messages %}{{ m.role }}{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}"
    with caplog.at_level(logging.WARNING, logger="rollout_engine"):
        assert rendered(inputs, reading, *HI, said) == "userhiassistantHm.b"
        assert not caplog.records
        inputs.check_batch([[*HI, said], [*HI, said]], None)
    assert [record.getMessage() for record in caplog.records] == [
        "The chat template never reads 'reasoning_content': giving it changes no prompt."
    ]


def test_options_of_a_call_are_for_all_its_conversations_and_their_own_win():
    own = {"messages": HI, "add_generation_prompt": True}
    options = {"add_generation_prompt": False, "tools": []}
    assert with_chat_options([HI, own], options) == [
        {"messages": HI, "add_generation_prompt": False, "tools": []},
        {"messages": HI, "add_generation_prompt": True, "tools": []},
    ]
    assert with_chat_options(HI, {"tools": []}) == {"messages": HI, "tools": []}
    assert with_chat_options(HI, {}) is HI


def test_options_of_a_call_are_refused_for_prompts_that_are_no_conversations(inputs):
    with pytest.raises(RequestError, match=r"^prompts\[1\]: add_generation_prompt=False.*given with a conversation"):
        inputs.check_batch(with_chat_options([HI, "text"], {"add_generation_prompt": False}), None)
    with pytest.raises(RequestError, match=r"^prompts\[1\]: prompt=5 is not allowed"):
        inputs.check_batch(with_chat_options([HI, 5], {"add_generation_prompt": False}), None)


@pytest.mark.parametrize(
    "name, words",
    [
        ("max_tokens", r"not an argument of generate: give sampling_params=SamplingParams\(max_tokens=\.\.\.\)"),
        ("max_new_tokens", "Hugging Face's .* give max_tokens"),
        ("max_model_len", "not an argument of generate: it is an option of the engine"),
        ("enable_thinking", r"give chat_template_kwargs=\{'enable_thinking': \.\.\.\}"),
        ("num_generations", "TRL's .* give num_samples"),
        ("use_tqmd", "Unknown argument of generate 'use_tqmd'. Did you mean 'use_tqdm'"),
        ("chat_template_kwarg", "Did you mean 'chat_template_kwargs'"),
    ],
)
def test_an_unknown_argument_is_told_where_it_belongs(name, words):
    def generate(prompts, *, use_tqdm=True, **chat): ...

    with pytest.raises(RequestError, match=words):
        check_chat_arguments({name: 1}, generate)


@pytest.mark.parametrize(
    ("verb", "name", "words"),
    [
        ("encode", "truncate_prompt_tokens", r"give pooling_params=PoolingParams\(truncate_prompt_tokens=\.\.\.\)"),
        ("encode", "truncation_side", r"give pooling_params=PoolingParams\(truncation_side"),
        ("encode", "dimensions", "vLLM's .* cut the rows"),
        ("encode", "temperature", "Unknown argument of encode 'temperature'"),
        ("reward", "normalize", r"reward: call encode, and give pooling_params=PoolingParams\(normalize"),
    ],
)
def test_settings_of_pooling_are_told_from_those_of_sampling(verb, name, words):
    with pytest.raises(RequestError, match=words):
        check_chat_arguments({name: 1}, getattr(LLM, verb))
