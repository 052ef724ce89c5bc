"""The form of tool calls that a chat template teaches, tried on a call that it writes itself."""

from os.path import commonprefix
from typing import Any

from rollout_engine.episodes.tool_calls import ToolFormat, format_of_template, parse_typed_calls
from rollout_engine.errors import RequestError
from rollout_engine.text.tokenizer import TextCodec

_NAME, _ARGUMENTS = "look_up_0f1e2d3c", {"word": "a b", "limit": 3}
_PARAMETERS = {"type": "object", "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Look up.", "parameters": _PARAMETERS}}
_CALL = {"id": "call00000", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "A question."}]
_ANSWER = {"role": "assistant", "content": "", "tool_calls": [_CALL]}


def taught_format(codec: TextCodec, chat_template: str | None) -> ToolFormat | None:
    """The form that a template teaches: the tokenizer's own, or `chat_template`. Raises `RequestError` for none.

    None if it teaches no form that is read here, or writes calls between the tags of one, but in another way.
    """
    form = format_of_template(codec.find_template(chat_template, [_TOOL]))
    if form is None:
        return None
    try:
        texts = [
            codec.render_chat(messages, [_TOOL], chat_template=chat_template, add_generation_prompt=False)
            for messages in (_QUESTION, [*_QUESTION, _ANSWER])
        ]
    except RequestError:  # it writes no calls, or wants more than these messages have
        return form
    written = texts[1][len(commonprefix(texts)) :]
    if _NAME not in written:
        return form
    if form == "llama3":  # its calls begin an answer, and the header of the answer is written too
        written = written[max(written.find("{"), 0) :]
    calls = parse_typed_calls(written, form, [_TOOL]).calls
    return form if any((call.name, call.arguments) == (_NAME, _ARGUMENTS) for call in calls) else None
