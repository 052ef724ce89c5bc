"""Later turns keep sampled ids, end messages once, and a template that rewrites its history is found out."""

import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_engine.errors import RequestError
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.chat_turns import ChatTurns
from rollout_engine.text.tokenizer import TextCodec

EOS = 2
PLAIN = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING_GOES = (  # once a user speaks again, earlier thinking is left out; tools leave it
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}{% else %}{{ m.content }}{% endif %}<eos>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPENED_THINKING = PLAIN.replace("<|assistant|>", "<|assistant|>{% if think %}<think>\n{% endif %}")
TOOLS_LAST = (  # tools stand before the last message of a user
    "{% for m in messages %}{% if tools and m.role == 'user' and loop.index0 == messages|length - 1 %}TOOLS{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}<eos>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
JOINED_TOOLS = (  # consecutive answers of tools share one frame
    "{% for m in messages %}{% if m.role != 'tool' %}<|{{ m.role }}|>{{ m.content }}<eos>\n{% else %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|user|>{% endif %}<t>{{ m.content }}</t>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<eos>\n{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
NUMBERED = PLAIN.replace("<|{{ m.role }}|>", "<|{{ m.role }} {{ loop.index }} of {{ messages|length }}|>")
UPPER_CASE = PLAIN.replace("m.content", "m.content | upper")
NO_TOOLS = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% endfor %}"


def turns(template=PLAIN, **options):
    hf = byte_tokenizer()
    hf.chat_template = template
    return ChatTurns(TextCodec(hf), **options)


def ids(text):
    return byte_tokenizer().encode(text, add_special_tokens=False)


def said(role, content):
    return {"role": role, "content": content}


def test_a_later_prompt_is_what_came_before_and_glue():
    chat = turns()
    first = chat.prompt([said("system", "Be."), said("user", "one")])
    sampled = [*ids("two"), EOS]
    second = first + sampled + chat.glue([said("user", "three")], sampled)
    whole = [said("system", "Be."), said("user", "one"), said("assistant", "two"), said("user", "three")]
    assert second == chat.prompt(whole)


@pytest.mark.parametrize("sampled", [ids("cut"), [], [*ids("x"), 1]], ids=["cut", "empty", "another end"])
def test_what_did_not_end_as_the_template_ends_it_is_ended_by_the_glue(sampled):
    assert turns().glue([said("user", "b")], sampled) == ids("<eos>\n<|user|>b<eos>\n<|assistant|>")


def test_an_end_that_was_sampled_is_not_repeated():
    assert turns().glue([said("user", "b")], [*ids("x"), EOS]) == ids("\n<|user|>b<eos>\n<|assistant|>")


def test_several_messages_are_glued_as_the_template_joins_them():
    glue = turns(JOINED_TOOLS).glue([said("tool", "1"), said("tool", "2"), said("user", "go")], [EOS])
    assert glue == ids("\n<|user|><t>1</t><t>2</t><eos>\n<|user|>go<eos>\n<|assistant|>")


@pytest.mark.parametrize(
    "template, roles, options, rewrites",
    [
        (PLAIN, ["user"], {}, None),
        (PLAIN, ["tool", "tool"], {}, None),
        (JOINED_TOOLS, ["tool", "tool"], {}, None),
        (JOINED_TOOLS, ["tool", "user"], {}, None),
        (THINKING_GOES, ["tool"], {}, None),
        (THINKING_GOES, ["user"], {}, "once user messages follow answers that think, .*<think>.* becomes "),
        (OPENED_THINKING, ["user"], {}, None),
        (OPENED_THINKING, ["user"], {"chat_template_kwargs": {"think": True}}, "follow answers, .*<think>"),
        (TOOLS_LAST, ["user"], {}, None),
        (TOOLS_LAST, ["user"], {"tools": [{"name": "f"}]}, "TOOLS"),
    ],
)  # fmt: skip
def test_a_template_that_rewrites_history_is_found_out(template, roles, options, rewrites):
    found = turns(template, **options).rewriting(roles)
    assert found is None if rewrites is None else re.search(rewrites, found, re.DOTALL), found


@pytest.mark.parametrize(
    "template, message",
    [(UPPER_CASE, "does not write an answer as it is"), ("{{ messages[0].content }}", "does not write an answer")],
)
def test_a_template_that_changes_answers_is_refused(template, message):
    with pytest.raises(RequestError, match=message):
        turns(template)


def test_a_template_that_counts_its_messages_cannot_be_continued():
    with pytest.raises(RequestError, match="writes an answer, or what comes before it, differently"):
        turns(NUMBERED).rewriting(["user"])


def test_a_template_that_refuses_a_role_says_so():
    with pytest.raises(RequestError, match="no tools"):
        turns(NO_TOOLS + PLAIN).rewriting(["tool"])


def test_a_tokenizer_that_joins_an_answer_with_its_end_is_refused():
    inner = Tokenizer(models.WordLevel({"?": 0, "0f1e2d3c.": 1}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    template = "{% for m in messages %}{{ m.content }};{% endfor %}"
    chat = ChatTurns(TextCodec(PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template)))
    assert chat.rewriting(["user"]) is None
    with pytest.raises(RequestError, match="joins the end of an answer"):
        chat.glue([said("user", "b")], [])
