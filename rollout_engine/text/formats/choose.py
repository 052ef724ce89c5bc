"""The format of a model's answers, by its chat template or by name."""

from typing import get_args

from rollout_engine.text.formats.answer import AnswerFormat
from rollout_engine.text.formats.make import THINKING, make_format
from rollout_engine.text.formats.renderers_format import RENDERERS, RenderersFormat, check_renderer
from rollout_engine.text.formats.tagged import Tags
from rollout_engine.text.formats.taught_format import taught_format
from rollout_engine.text.formats.tool_calls import TextForm, ToolFormat, check_format, format_of_template
from rollout_engine.text.tokenizer import TextCodec


def answer_format(
    codec: TextCodec, template: str | None = None, name: str | None = None, *, runs_template: bool = True
) -> AnswerFormat | None:
    """The format of answers under a chat template; None if it teaches neither thinking nor calls that are read here.

    Args:
        template: as `chat_template` of `ChatOptions`; None: the tokenizer's own.
        name: a `ToolFormat` that calls are written in, whatever the template teaches; "think": thinking alone;
            "renderers:NAME": as the package `renderers` reads a family (its extra has to be installed).
        runs_template: whether the template may be rendered to see that it writes calls as it is read here; False for
            templates of strangers.

    Raises `RequestError` for an unknown name, and without a chat template and a name.
    """
    has_none = template is None and not codec.hf.chat_template
    text = "" if name is not None and has_none else codec.find_template(template, None)
    form: ToolFormat | None = None
    if name is None:
        form = (
            taught_format(codec, template) if runs_template else format_of_template(codec.find_template(template, [{}]))
        )
    elif name.startswith(RENDERERS):
        return RenderersFormat(codec, name)
    elif name != "think":
        form = check_format(name)
    return make_format(codec, form, _find_tags(codec, text, is_wanted=name == "think"))


def check_format_name(name: str) -> str:
    """Return the name of a form of calls, as `answer_format` takes it. Raises `RequestError` for another one."""
    return check_renderer(name) if name.startswith(RENDERERS) else check_format(name)


def call_format(codec: TextCodec, template: str | None, form: str) -> AnswerFormat:
    """The format that finds the calls of a form in answers, without thinking that a template has.

    Of a `TextForm` thinking stays text, in which drafts of calls are no calls, as `parse_tool_calls` has it.
    """
    if form.startswith(RENDERERS):
        return RenderersFormat(codec, form)
    form = check_format(form)
    if form in get_args(TextForm):
        found = make_format(codec, form, None)
    else:
        has_none = template is None and not codec.hf.chat_template
        text = "" if has_none else codec.find_template(template, None)
        found = make_format(codec, form, _find_tags(codec, text, is_wanted=True))
    assert found is not None, "it has a form"
    return found


def _find_tags(codec: TextCodec, template: str, *, is_wanted: bool) -> Tags | None:
    """The tags of thinking that a template writes, or that the tokenizer has as tokens."""
    for tags in THINKING.values():
        if tags.closing in template or all(codec.find_added(tag) is not None for tag in tags.tokens):
            return tags
    return THINKING["think"] if is_wanted else None
