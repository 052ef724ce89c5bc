"""Conversations are prompts; their form is checked, their template's options reach it, nothing is printed into them."""

import logging

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from rollout_engine import LLM
from rollout_engine.errors import RequestError
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


def test_text_parts_are_joined_by_newlines(thinking):
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]
    assert texts(thinking, [{"role": "user", "content": parts}]) == ["<user>a\nb;<assistant>"]
    assert parts == [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}]


def test_an_assistant_that_calls_tools_needs_no_content(thinking):
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    assert texts(thinking, [*HI, call]) == ["<user>hi;<assistant>CALL;<assistant>"]
    del call["content"]
    assert texts(thinking, [*HI, call]) == ["<user>hi;<assistant>CALL;<assistant>"]


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
        ([{"role": "assistant", "content": None, "tool_calls": np.empty(2)}], "messages[0]['content']", "a str"),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0]['content'][1]['type']",
            "'image_url' is not allowed: must be a text part.*Images, audio and files are not served",
        ),
        ([{"role": "user", "content": [{"text": "a"}]}], "messages[0]['content'][0]", "a text part"),
        ([{"role": "user", "content": ["a"]}], "messages[0]['content'][0]", "a text part"),
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
        ({"prompt": "x", "multi_modal_data": {}}, "multi_modal_data", "vLLM's"),
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
    prompt = {"messages": HI, "chat_template_kwargs": {"enable_thinkin": False}, "tools": [{"name": "f"}]}
    with caplog.at_level(logging.WARNING, logger="rollout_engine"):
        inputs.check_batch([prompt, prompt], None)
    assert [record.getMessage() for record in caplog.records] == [
        "The chat template never reads 'enable_thinkin': giving it changes no prompt.",
        "The chat template never reads 'tools': giving it changes no prompt.",
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
