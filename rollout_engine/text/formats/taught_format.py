"""The form of tool calls that a chat template teaches, tried on a call that it writes itself."""

import json
from os.path import commonprefix
from typing import Any

from rollout_engine.base.errors import RequestError
from rollout_engine.text.formats.make import make_format
from rollout_engine.text.formats.tool_calls import ToolFormat, format_of_template
from rollout_engine.text.tokenizer import TextCodec

_NAME, _ARGUMENTS = "look_up_0f1e2d3c", {"word": "a b", "limit": 3}
_PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Look up.", "parameters": _PARAMETERS}}
_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "A question."}]


def taught_format(codec: TextCodec, chat_template: str | None) -> ToolFormat | None:
    """The form that a template teaches: the tokenizer's own, or `chat_template`. Raises `RequestError` for none.

    None if it teaches no form that is read here, or writes calls between the tags of one, but in another way.
    """
    form = format_of_template(codec.find_template(chat_template, [_TOOL]))
    if form is None:
        return None
    # Some templates take arguments as an object, as transformers gives them, others as text, as OpenAI's clients do.
    tried = {_reads_back(codec, chat_template, form, each) for each in (_ARGUMENTS, json.dumps(_ARGUMENTS))}
    return form if True in tried or tried == {None} else None


def _reads_back(codec: TextCodec, chat_template: str | None, form: ToolFormat, arguments: Any) -> bool | None:
    """Whether a call that the template writes is found again; None if it writes none."""
    call = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    try:
        before, after = (
            codec.render_chat(messages, [_TOOL], chat_template=chat_template, add_generation_prompt=False)
            for messages in (_QUESTION, [*_QUESTION, answer])
        )
    except RequestError:  # it writes no calls, or wants more than these messages have
        return None
    written = _find_insertion(before, after)
    if _NAME not in written:
        return None
    if form == "llama3":  # its calls begin an answer, and the header of the answer is written too
        written = written[max(written.find("{"), 0) :]
    reader = make_format(codec, form, None)
    assert reader is not None, "it has a form"
    token_ids = codec.encode(written, add_special_tokens=False)
    found = reader.read(token_ids, codec.decode(token_ids), tools=[_TOOL], skip_special_tokens=False).calls
    return any((each.name, each.arguments) == (_NAME, _ARGUMENTS) for each in found)


def _find_insertion(before: str, after: str) -> str:
    """The part of the second text between the common beginning and the common end of both."""
    start = len(commonprefix([before, after]))
    end = len(commonprefix([before[start:][::-1], after[start:][::-1]]))
    return after[start : len(after) - end]
