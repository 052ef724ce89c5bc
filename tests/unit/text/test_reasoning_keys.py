"""Thinking of messages reaches the prompt under the key that a template reads."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.conversations import as_messages
from rollout_engine.text.tokenizer import TextCodec

HI = {"role": "user", "content": "hi"}
SAID = {"role": "assistant", "content": "b"}
PARTS = (
    "{% for m in messages %}{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}{% for b in m.content %}"
    "{% if b.type == 'thinking' %}<T>{{ b.thinking }}</T>{% else %}{{ b.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}"
)
CALLS_ALONE = (  # as gpt-oss: thinking stays next to calls
    "{% for m in messages %}{{ m.role }}:{% if m.tool_calls %}[{{ m.thinking }}]{{ m.tool_calls[0].function.name }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)


def rendered(template, *messages):
    hf = byte_tokenizer()
    hf.chat_template = template
    return TextCodec(hf).render_chat(as_messages(messages), add_generation_prompt=False)


@pytest.mark.parametrize("given", ["reasoning_content", "reasoning", "thinking"])
@pytest.mark.parametrize("read", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_is_given_under_the_key_that_is_read(given, read):
    template = (
        f"{{% for m in messages %}}{{{{ m.role }}}}:{{{{ m['{read}'] or '' }}}} {{{{ m.content }}}}{{% endfor %}}"
    )
    assert rendered(template, HI, SAID | {given: "why"}) == "user: hiassistant:why b"


def test_thinking_is_given_as_a_part_of_content():
    assert rendered(PARTS, HI, SAID | {"reasoning_content": "why"}) == "user:hiassistant:<T>why</T>b"
    assert rendered(PARTS, HI, SAID) == "user:hiassistant:b"


def test_a_template_that_reads_it_next_to_calls_alone_gets_it_there():
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    called = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why"}
    assert rendered(CALLS_ALONE, HI, called, {"role": "tool", "content": "3"}) == "user:hiassistant:[why]addtool:3"


def test_a_name_that_is_a_variable_of_the_template_is_no_key():
    template = "{% if thinking %}T{% endif %}{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    assert rendered(template, HI, SAID | {"reasoning_content": "why"}) == "user:hiassistant:b"


def test_an_answer_may_be_thinking_alone():
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}{{ m.content }}{% endfor %}"
    assert rendered(template, HI, {"role": "assistant", "content": None, "reasoning": "why"}) == "user:hiassistant:why"
    with pytest.raises(RequestError, match="content"):
        as_messages([HI, {"role": "assistant", "content": None, "reasoning": 3}])
