"""Tools that neither the chat template nor the conversation shows are refused."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.input_processor import InputProcessor
from rollout_engine.text.tokenizer import TextCodec


@pytest.fixture
def inputs():
    return InputProcessor(TextCodec(byte_tokenizer()), max_model_len=512, vocab_size=259)


def find(word: str, limit: int = 3) -> str:
    """Find a word.

    Args:
        word: the word.
        limit: how many.
    """
    return word * limit


FIND = {"type": "function", "function": {"name": "find", "parameters": {"properties": {"word": {}, "limit": {}}}}}
IGNORES = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("tool", [find, FIND, FIND["function"]])
@pytest.mark.parametrize(
    "template, text, is_shown",
    [
        (IGNORES, "hi", False),
        (IGNORES, "I may find nothing.", False),
        (IGNORES, "Findings: find_it(words, limits)", False),
        (IGNORES, "Call find(word, limit=3).", True),
        ("{{ 'Tools follow.' if tools }}" + IGNORES, "hi", True),
        ("{% if tools and messages | length > 1 %}{{ tools }}{% endif %}" + IGNORES, "hi", False),
        ("{{ raise_exception('no tools') if not tools }}" + IGNORES, "hi", True),
        ("{% for m in messages %}{{ m.tools }}{{ m.content }}{% endfor %}", "hi", False),
    ],
)
def test_tools_that_a_prompt_does_not_show_are_refused(inputs, tool, template, text, is_shown):
    prompt = {"messages": [{"role": "user", "content": text}], "tools": [tool], "chat_template": template}
    if is_shown:
        inputs.check(prompt, None)
    else:
        with pytest.raises(RequestError, match=r"tools=\['find'\].*this chat template ignores tools.*'\w+' is in none"):
            inputs.check(prompt, None)
