"""The bridge from one turn to the next is proven for templates in the shapes of published ones, or refused with why."""

import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.text.formats.bridge import prove_bridge, try_bridges
from rollout_engine.text.formats.choose import answer_format
from rollout_engine.text.formats.taught_format import taught_format

from .answers import ADD, TOOLS, codec_with, tags_of
from .templates import DEEPSEEK_THINKING, ENDS, HERMES_THINKING, MISTRAL, TEMPLATES

ALL = {"words", "thinking", "one call", "thinking before a call", "two calls"}
REFUSED = {"mistral": {"thinking before a call"}, "harmony": ALL - {"words"}}
"""Kinds of answers that a template writes otherwise than they are sampled."""


def codec_of(name, template, *, special=False):
    codec = codec_with([*tags_of(name), *ENDS[name]], special=special)
    codec.hf.chat_template = template
    return codec


@pytest.mark.quick(11)
@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_turns_can_be_continued_or_not_with_the_reason(name, special):
    codec = codec_of(name, TEMPLATES[name], special=special)
    assert taught_format(codec, None) == name
    found = try_bridges(codec, {})
    assert set(found) == ALL
    assert {kind for kind, reason in found.items() if reason} == REFUSED.get(name, set())
    assert all("becomes" in reason for reason in found.values() if reason)


@pytest.mark.parametrize("special", [True, False])
def test_thinking_that_a_template_drops_is_found_though_texts_lack_its_tags(special):
    codec = codec_of("hermes", HERMES_THINKING, special=special)
    found = try_bridges(codec, {})
    assert {kind for kind, reason in found.items() if reason} == {"thinking"}
    assert prove_bridge(codec, {}) == f"thinking: {found['thinking']}"
    assert "once user messages follow an answer" in found["thinking"]


def test_a_prompt_that_opens_thinking_has_it_closed_in_each_answer():
    found = try_bridges(codec_of("deepseek", DEEPSEEK_THINKING), {})
    assert all("once" in reason and "becomes" in reason for reason in found.values()) and set(found) == ALL


def test_a_template_without_calls_is_tried_on_words_alone():
    codec = codec_with([])
    codec.hf.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    assert try_bridges(codec, {}) == {"words": None} and prove_bridge(codec, {}) is None
    codec.hf.chat_template = codec.hf.chat_template.replace("m.content", "m.content | upper")
    assert "does not write an answer as it is" in prove_bridge(codec, {})
    codec.hf.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        prove_bridge(codec, {})


def test_a_template_of_mistral_gets_its_own_ids_of_calls():
    form = answer_format(codec_of("mistral", MISTRAL))
    assert form.name == "mistral" and len(form.new_call_id("add", 0)) == 9
    assert answer_format(codec_of("kimi", TEMPLATES["kimi"])).new_call_id("add", 3) == "functions.add:3"
    assert answer_format(codec_of("hermes", TEMPLATES["hermes"])).new_call_id("add", 3).startswith("call_")


def test_a_strangers_template_is_not_rendered():
    codec = codec_of("mistral", "{{ raise_exception('rendered') }}[TOOL_CALLS]")
    token_ids = codec.encode('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "x, y"}}]')
    form = answer_format(codec, codec.hf.chat_template, runs_template=False)
    assert form.read(token_ids, "", tools=TOOLS).calls == [ADD]
