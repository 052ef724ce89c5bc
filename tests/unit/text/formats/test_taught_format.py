"""The form of calls that a chat template teaches is the one in which it writes them."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.formats.taught_format import taught_format
from rollout_engine.text.tokenizer import TextCodec

LESSON = "{% if tools %}{{ tools | tojson }} Write LESSON.{% endif %}"
MESSAGES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{% set f = c.function %}CALL{% endfor %}<eos>{% endfor %}"
)
JSON = '<tool_call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</tool_call>'
ITEMS = "{% for k, v in f.arguments.items() %}ITEM{% endfor %}"
XML = "<tool_call><function={{ f.name }}>" + ITEMS.replace("ITEM", "<parameter={{ k }}>{{ v }}</parameter>")
XML += "</function></tool_call>"
GLM_ITEM = "<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>"
FENCED = "<tool_call>{{ f.name }}\n```json\n{{ f.arguments | tojson }}\n```</tool_call>"


def codec(lesson, call):
    hf = byte_tokenizer()
    hf.chat_template = LESSON.replace("LESSON", lesson) + MESSAGES.replace("CALL", call)
    return TextCodec(hf)


@pytest.mark.parametrize(
    "lesson, call, form",
    [
        ("<tool_call>", JSON, "hermes"),
        ("<tool_call>", "", "hermes"),
        ("<tool_call>", "{{ raise_exception('no calls') }}", "hermes"),
        ("<tool_call>", JSON.replace(" | tojson", ""), "hermes"),
        ("<tool_call>", FENCED, None),
        ("<tool_call>", "<tool_call>{{ f.name }}" + ITEMS.replace("ITEM", "{{ k }}={{ v }}") + "</tool_call>", None),
        ("<tool_call>", XML, "xml"),
        ("<tool_call>", "<tool_call>{{ f.name }}" + ITEMS.replace("ITEM", GLM_ITEM) + "</tool_call>", "glm"),
        ("<seed:tool_call>", XML.replace("tool_call", "seed:tool_call"), "seed"),
        ("<|python_tag|>", '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}', "llama3"),
        ("[TOOL_CALLS]", "[TOOL_CALLS]{{ f | tojson }}", "mistral"),
        ("<function_calls>", "<function_calls>{{ f | tojson }}", None),
    ],
)
def test_the_form_is_the_one_that_the_template_writes(lesson, call, form):
    assert taught_format(codec(lesson, call), None) == form


def test_tools_that_stand_behind_the_conversation_are_no_call():
    hf = byte_tokenizer()
    hf.chat_template = MESSAGES.replace("CALL", "") + "{{ tools | tojson }}<tool_call>"
    assert taught_format(TextCodec(hf), None) == "hermes"
    hf.chat_template = MESSAGES.replace("CALL", FENCED) + "{{ tools | tojson }}<tool_call>"
    assert taught_format(TextCodec(hf), None) is None


def test_a_template_that_is_given_counts_in_place_of_the_tokenizers():
    tokenizer = codec("<tool_call>", JSON)
    assert taught_format(tokenizer, codec("<tool_call>", XML).hf.chat_template) == "xml"
    tokenizer.hf.chat_template = {"default": "{{ messages }}", "tool_use": tokenizer.hf.chat_template}
    assert taught_format(TextCodec(tokenizer.hf), None) == "hermes"
    tokenizer.hf.chat_template = None
    with pytest.raises(RequestError, match="has no chat template"):
        taught_format(TextCodec(tokenizer.hf), None)
