"""Makes the format of a family for one tokenizer."""

from functools import partial
from typing import get_args

from rollout_engine.text.formats.answer import AnswerFormat
from rollout_engine.text.formats.families import FAMILIES
from rollout_engine.text.formats.harmony import HarmonyFormat
from rollout_engine.text.formats.tagged import TaggedFormat, Tags
from rollout_engine.text.formats.text_calls import TextCalls
from rollout_engine.text.formats.tool_calls import TextForm, ToolFormat
from rollout_engine.text.formats.transcript import Spell
from rollout_engine.text.tokenizer import TextCodec

THINKING = {
    "seed": Tags("<seed:think>", "</seed:think>", ("<seed:think>", "</seed:think>")),
    "mistral": Tags("[THINK]", "[/THINK]", ("[THINK]", "[/THINK]")),
    "gemma": Tags("<|channel>thought", "<channel|>", ("<|channel>", "<channel|>")),
    "think": Tags("<think>", "</think>", ("<think>", "</think>")),
}
"""Name -> the tags around thinking."""
_TEXT_FORMS: tuple[TextForm, ...] = get_args(TextForm)


def make_format(codec: TextCodec, form: ToolFormat | None, thinking: Tags | None) -> AnswerFormat | None:
    """The format with calls of this form and thinking between these tags; None for neither.

    "harmony" has tags of its own around thinking.
    """
    if form == "harmony":
        return HarmonyFormat(codec)
    if form is None:
        return None if thinking is None else TaggedFormat(codec, "think", thinking, None)
    for each in _TEXT_FORMS:
        if each == form:
            return TaggedFormat(codec, form, thinking, partial(_text_calls, each))
    family = FAMILIES[form]
    return TaggedFormat(codec, form, thinking, family.make, tags=family.tags, call_id=family.call_id)


def _text_calls(form: TextForm, spell: Spell) -> TextCalls:
    return TextCalls(form)
