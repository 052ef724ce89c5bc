"""The cost of a conversation grows with its length, whatever its sender chooses; and no message of it is lost."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.shown_tools import first_unshown
from rollout_engine.text.tokenizer import TextCodec

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }};{% endfor %}"
ESCAPED = "{% for m in messages %}{{ m.content | tojson }};{% endfor %}"
WITHOUT_17 = "{% for m in messages %}{% if loop.index0 != 17 %}{{ m.content | upper }};{% endif %}{% endfor %}"
ONLY_LAST = "{% for m in messages %}{% if loop.last %}{{ m.content }};{% endif %}{% endfor %}"
ONLY_FIRST = ONLY_LAST.replace("loop.last", "loop.first")
MANY = 20_000


@pytest.fixture(scope="module")
def codec():
    return TextCodec(byte_tokenizer())


def test_a_conversation_has_few_roles_since_each_is_tried(codec):
    messages = [{"role": f"role {i}", "content": "hi"} for i in range(33)]
    assert "<role 31>hi" in codec.render_chat(messages[:32], chat_template=PLAIN)
    with pytest.raises(RequestError, match=r"messages='33 roles'.*at most 32 roles"):
        codec.render_chat(messages, chat_template=PLAIN)


@pytest.mark.quick(1)
@pytest.mark.parametrize("template", [PLAIN, ESCAPED])
def test_many_messages_are_looked_for_once(codec, template):
    messages = [{"role": "user", "content": f'"{i}'} for i in range(MANY)]
    assert codec.render_chat(messages, chat_template=template).count(";") == MANY


def test_one_of_many_messages_that_is_left_out_is_named(codec):
    messages = [{"role": "user", "content": f"word {i}"} for i in range(40)]
    with pytest.raises(RequestError, match=r"messages\[17\]"):
        codec.render_chat(messages, chat_template=WITHOUT_17)


@pytest.mark.parametrize(
    "template, contents, index",
    [
        (ONLY_LAST, ["hi", "hi"], 0),
        (ONLY_LAST, ["hi", "I say hi"], 0),
        (ONLY_FIRST, ["Be brief.", "brief"], 1),
        (ONLY_FIRST, ["Be brief.", "Be brief."], 1),
    ],
)
def test_a_message_that_is_left_out_is_found_if_another_has_its_words(codec, template, contents, index):
    messages = [{"role": "user", "content": each} for each in contents]
    with pytest.raises(RequestError, match=rf"messages\[{index}\]"):
        codec.render_chat(messages, chat_template=template)


def test_messages_may_be_written_in_another_order(codec):
    messages = [{"role": "user", "content": each} for each in ("Be brief.", "brief", "brief")]
    template = "{% for m in messages | reverse %}{{ m.content }};{% endfor %}"
    assert codec.render_chat(messages, chat_template=template) == "brief;brief;Be brief.;"


def test_many_names_are_looked_for_in_one_reading():
    names = [f"name_{i}" for i in range(MANY)]
    tools = [{"name": "find", "parameters": {"properties": dict.fromkeys(names, {})}}]
    text = " ".join(["find", *names])
    assert first_unshown(text, tools, str) is None
    assert first_unshown(text[:-1], tools, lambda: text[:-1]) == names[-1]


@pytest.mark.parametrize(
    "text, is_shown",
    [
        ("Call get-weather(a.b).", True),
        ("get weather(a.b)", False),
        ("get-weathers(a.b)", False),
        ("get-weather", False),
    ],
)
def test_a_name_of_several_words_stands_there_as_it_is(text, is_shown):
    tools = [{"name": "get-weather", "parameters": {"properties": {"a.b": {}}}}]
    assert (first_unshown(text, tools, lambda: text) is None) == is_shown


def test_many_variables_of_a_template_are_looked_for_in_one_reading(codec, caplog):
    variables = {f"name_{i}": 1 for i in range(MANY)}
    codec.render_chat([{"role": "user", "content": "hi"}], chat_template=PLAIN, chat_template_kwargs=variables)
    assert "never reads 'name_0'" in caplog.text
