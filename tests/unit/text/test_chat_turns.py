"""Later turns keep sampled ids, end messages once, and a template that rewrites its history is found out."""

import logging
import re

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rollout_engine.base.errors import RequestError
from rollout_engine.testing import byte_tokenizer
from rollout_engine.text.chat_turns import ChatTurns, RewrittenTurns
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
THINKING_MODEL = (  # as Qwen3: thinking stays until a user speaks; an answer without any has an empty one if it is last
    "{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set parts = m.content.split('</think>') %}{% set words = parts[-1].lstrip('\n') %}"
    "{% set thought = parts[0].split('<think>')[-1].strip('\n') if parts | length > 1 else '' %}"
    "<|assistant|>\n{% if loop.index0 > ns.asked and (thought or loop.last) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ words }}<eos>\n"
    "{% elif m.role == 'tool' %}{% if messages[loop.index0 - 1].role != 'tool' %}<|user|>{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<eos>\n{% endif %}"
    "{% else %}<|{{ m.role }}|>\n{{ m.content }}<eos>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
    "{% if opens %}<think>\n{% endif %}{% endif %}"
)
FOR_TRAINING = THINKING_MODEL.replace("loop.index0 > ns.asked and (thought or loop.last)", "true")
TRIMS = PLAIN.replace("m.content", "m.content | trim")
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


def glue_of(chat, history, answer, sampled, new):
    """Token ids between an answer to `history` and the next one, after the messages `new`."""
    now = chat.text([*history, chat.message(answer), *new])
    return chat.between(chat.text(history), now, answer, sampled)


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
        (THINKING_GOES, ["user"], {}, "once user messages follow an answer, .*<think>.* becomes "),
        (THINKING_MODEL, ["tool"], {}, None),
        (THINKING_MODEL, ["tool", "tool"], {}, None),
        (THINKING_MODEL, ["user"], {}, "<think>.* becomes "),
        (THINKING_MODEL, ["tool", "user"], {}, "once tool and user messages follow an answer"),
        (THINKING_MODEL, ["tool"], {"chat_template_kwargs": {"enable_thinking": False}}, "<think>.* becomes "),
        (THINKING_MODEL, ["tool"], {"chat_template_kwargs": {"opens": True}}, None),
        (FOR_TRAINING, ["user"], {}, None),
        (FOR_TRAINING, ["user"], {"chat_template_kwargs": {"opens": True}}, None),
        (FOR_TRAINING, ["user"], {"chat_template_kwargs": {"enable_thinking": False}}, None),
        (OPENED_THINKING, ["user"], {}, None),
        (OPENED_THINKING, ["user"], {"chat_template_kwargs": {"think": True}}, None),
        (NUMBERED, ["user"], {}, "1 of 1.* becomes .*1 of 3"),
        (TOOLS_LAST, ["user"], {}, None),
        (TOOLS_LAST, ["user"], {"tools": [{"name": "f"}]}, "TOOLS"),
    ],
)  # fmt: skip
def test_a_template_that_rewrites_history_is_found_out(template, roles, options, rewrites):
    found = turns(template, **options).rewriting(roles)
    assert found is None if rewrites is None else re.search(rewrites, found, re.DOTALL), found


@pytest.mark.parametrize(
    "template, message",
    [
        (UPPER_CASE, "does not write an answer as it is"),
        ("{{ messages[0].content }}", "'assistant'.*leaves the message"),
    ],
)
def test_a_template_that_changes_answers_is_refused(template, message):
    with pytest.raises(RequestError, match=message):
        turns(template)


THOUGHT = "<think>\nHm.\n</think>\n\nfive"


@pytest.mark.parametrize(
    "template, answer, roles, is_kept",
    [
        (THINKING_MODEL, THOUGHT, ["tool", "tool"], True),
        (THINKING_MODEL, "five", ["tool"], True),
        (THINKING_MODEL, "five", ["user"], True),
        (THINKING_MODEL, THOUGHT, ["user"], False),
        (THINKING_MODEL, THOUGHT, ["tool", "user"], False),
        (FOR_TRAINING, THOUGHT, ["user"], True),
        (FOR_TRAINING, "five", ["user"], False),
        (TRIMS, THOUGHT, ["user"], True),
    ],
)
def test_turns_are_kept_if_the_template_writes_what_was_sampled(template, answer, roles, is_kept):
    chat, history, new = turns(template), [said("user", "2 + 3?")], [said(role, "ok") for role in roles]
    sampled = [*ids(answer), EOS]
    if not is_kept:
        with pytest.raises(RewrittenTurns, match="rewrites what was sampled: .* becomes "):
            glue_of(chat, history, answer, sampled, new)
        return
    row = chat.prompt(history) + sampled + glue_of(chat, history, answer, sampled, new)
    assert row == chat.prompt([*history, chat.message(answer), *new])


def test_thinking_of_an_earlier_turn_that_a_later_message_removes_is_found_out():
    history = [said("user", "2 + 3?"), said("assistant", THOUGHT), said("tool", "5")]
    with pytest.raises(RewrittenTurns, match="<think>.* becomes "):
        glue_of(turns(THINKING_MODEL), history, "five", [*ids("five"), EOS], [said("user", "sure?")])


def test_an_answer_includes_thinking_that_its_header_opened_if_the_template_does_not_add_it():
    chat = turns(OPENED_THINKING, chat_template_kwargs={"think": True})
    asked, new, answer = [said("user", "a")], [said("user", "b")], "Hm.\n</think>\n\nfive"
    assert chat.message(answer)["content"] == f"<think>\n{answer}"
    sampled = [*ids(answer), EOS]
    row = chat.prompt(asked) + sampled + glue_of(chat, asked, answer, sampled, new)
    assert row == chat.prompt([*asked, chat.message(answer), *new])
    assert turns(THINKING_MODEL, chat_template_kwargs={"opens": True}).message("x") == said("assistant", "x")


def test_an_answer_cut_within_its_thinking_is_rewritten_by_a_template_that_closes_it():
    chat = turns(THINKING_MODEL, chat_template_kwargs={"opens": True})
    with pytest.raises(RewrittenTurns):
        glue_of(chat, [said("user", "a")], "Hm, I", ids("Hm, I"), [said("user", "b")])


def test_spaces_that_a_template_trims_stay_as_sampled_and_a_warning_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="rollout_engine"):
        glue = glue_of(turns(TRIMS), [said("user", "a")], " five \n", [*ids(" five \n"), EOS], [said("user", "b")])
    assert glue == ids("\n<|user|>b<eos>\n<|assistant|>")
    assert "other spaces than were sampled" in caplog.text


@pytest.mark.parametrize("num_sampled", [0, 1, 2])
def test_an_end_of_two_tokens_is_not_repeated(num_sampled):
    hf = byte_tokenizer()
    hf.add_special_tokens({"additional_special_tokens": ["<end>", "<turn>"]})
    hf.chat_template = PLAIN.replace("<eos>\n", "<end><turn>")
    chat = ChatTurns(TextCodec(hf))
    sampled = [*ids("five"), *hf.convert_tokens_to_ids(["<end>", "<turn>"])[:num_sampled]]
    asked, new = [said("user", "a")], [said("user", "b")]
    row = chat.prompt(asked) + sampled + glue_of(chat, asked, "five", sampled, new)
    assert row == chat.prompt([*asked, said("assistant", "five"), *new])
    assert chat.glue(new, sampled) == glue_of(chat, asked, "five", sampled, new)


def test_special_tokens_that_an_answer_begins_with_and_its_text_lacks_are_the_templates_own():
    hf = byte_tokenizer()
    hf.add_special_tokens({"additional_special_tokens": ["<response>"]})
    hf.chat_template = PLAIN.replace(
        "{{ m.content }}", "{% if m.role == 'assistant' %}<response>{% endif %}{{ m.content }}"
    )
    chat, asked, new = ChatTurns(TextCodec(hf)), [said("user", "a")], [said("user", "b")]
    sampled = hf.encode("<response>five<eos>", add_special_tokens=False)
    assert glue_of(chat, asked, "five", sampled, new) == ids("\n<|user|>b<eos>\n<|assistant|>")
    with pytest.raises(RewrittenTurns, match="<response>"):
        glue_of(chat, asked, "five", sampled[1:], new)


def test_an_end_of_plain_text_that_was_sampled_is_not_repeated_and_words_are_not_taken_for_it():
    chat = turns("{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}assistant: ")
    asked, new = [said("user", "a")], [said("user", "b")]
    assert glue_of(chat, asked, "five\n", ids("five\n"), new) == ids("\n\nuser: b\n\nassistant: ")
    assert glue_of(chat, asked, "five\n", ids("five\n\n\nuser:"), new) == ids(" b\n\nassistant: ")


def test_an_end_that_the_template_does_not_write_is_kept_and_a_warning_says_so(caplog):
    chat, asked, new, sampled = turns(PLAIN), [said("user", "a")], [said("user", "b")], [*ids("five"), 1]
    with caplog.at_level(logging.WARNING, logger="rollout_engine"):
        glue = glue_of(chat, asked, "five", sampled, new)
    assert glue == ids("<eos>\n<|user|>b<eos>\n<|assistant|>")
    assert "Answers end with '<bos>', and the chat template closes them by '<eos>" in caplog.text
    caplog.clear()
    chat, shown = turns(PLAIN), turns(PLAIN).text(asked)
    now = chat.text([*asked, chat.message("five"), *new])
    assert chat.between(shown, now, "five", sampled, has_ended=False) == glue and not caplog.text


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


def test_an_answer_that_only_ends_with_a_token_if_it_is_last_is_followed_by_plain_text():
    vocab = {each: i for i, each in enumerate("?abcdefghijklmnopqrstuvwxyz0123456789AS:.\n\u2581")}
    inner = Tokenizer(models.BPE(vocab, [], unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)  # as Llama 2's
    inner.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}"
        "{% if loop.last and m.role == 'assistant' %}<eos>{% else %}{{ '\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>", chat_template=template))
    chat, history = ChatTurns(codec), [said("user", "a")]
    prompt = chat.prompt(history)
    sampled = codec.encode(chat.text(history) + "so", add_special_tokens=False)[len(prompt) :]
    new = [said("user", "b")]
    glue = glue_of(chat, history, "so", sampled, new)
    assert [*prompt, *sampled, *glue] == chat.prompt([*history, chat.message("so"), *new])


def test_nothing_is_put_behind_the_end_of_an_answer_but_what_the_template_writes_there():
    chat, history, new = turns(FOR_TRAINING), [said("user", "a")], [said("tool", "b")]
    with pytest.raises(RewrittenTurns, match=r"<think>\\n\\n</think>"):
        glue_of(chat, history, "", [EOS], new)  # the template puts empty thinking in front of it
    thought = "<think>\nb</think>"  # the template writes other spaces around its end
    glue = glue_of(chat, history, thought, [*ids(thought), EOS], new)
    assert glue == ids("\n<|user|><tool_response>\nb\n</tool_response><eos>\n<|assistant|>\n")
