"""Whether turns can be continued token by token under a chat template, tried on answers of each kind.

    prompt of the next turn = this turn's prompt + the sampled ids + glue            text/chat_turns.py

`try_bridges` samples nothing: it writes answers as the template's own format has them, ends them as the template does,
and asks `ChatTurns` for the glue behind them. A kind that fails here fails for answers of a policy that are written
alike.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias
from weakref import WeakKeyDictionary

from rollout_engine.base.errors import RequestError
from rollout_engine.base.tool_call import ToolCall
from rollout_engine.text.chat_turns import ChatTurns, RewrittenTurns, once_followed
from rollout_engine.text.conversations import ChatOptions
from rollout_engine.text.formats.answer import AnswerFormat, AnswerParts
from rollout_engine.text.formats.choose import answer_format
from rollout_engine.text.tokenizer import TextCodec

BridgeKind: TypeAlias = Literal["words", "thinking", "thinking before a call", "one call", "two calls"]
"""Kinds of answers. The first two are followed by a user's message, the others by results of tools."""
Reason: TypeAlias = str | None
"""Why turns cannot be continued; None: they can."""

_NAME = "look_up_0f1e2d3c"
_SCHEMA = {"type": "object", "properties": {"word": {"type": "string"}, "limit": {"type": "integer"}}}
_TOOL = {"type": "function", "function": {"name": _NAME, "description": "Look up.", "parameters": _SCHEMA}}
_QUESTION = {"role": "user", "content": "A question: 3c2d1e0f."}
_NEXT = {"role": "user", "content": "The next question."}
_OPENING = re.compile(r"(?:<[\w:]*think>|\[THINK\])\s*\Z")
"""The end of a prompt that opens thinking."""
_KNOWN: "WeakKeyDictionary[TextCodec, dict[str, dict[BridgeKind, Reason]]]" = WeakKeyDictionary()
_MOST_KNOWN = 64
_WORDS, _THOUGHT = "Some words: 0f1e2d3c.", "Let me see: 1e0f."


def prove_bridge(codec: TextCodec, options: ChatOptions, name: str | None = None) -> Reason:
    """Why turns cannot be continued under a chat template and its options; None if answers of each kind can be.

    `name`: as of `answer_format`. Raises `RequestError` without a chat template.
    """
    return next((f"{kind}: {reason}" for kind, reason in try_bridges(codec, options, name).items() if reason), None)


def try_bridges(codec: TextCodec, options: ChatOptions, name: str | None = None) -> dict[BridgeKind, Reason]:
    """The same by kind of answer. Kinds that the template does not write are left out."""
    form = answer_format(codec, options.get("chat_template"), name)
    words = _Trial(codec, options, form, [_NEXT])
    found: dict[BridgeKind, Reason] = {"words": words.reason((form and form.write(None, _WORDS)) or _WORDS)}
    if form is not None and (thought := form.write(_THOUGHT, _WORDS)) is not None:
        found["thinking"] = words.reason(thought)
    if form is None or form.name == "think":
        return found
    for kind, number in _CALLS.items():
        said, reason = _written_calls(codec, options, number)
        if said is not None:
            said = form.write_calls([ToolCall(_NAME, _arguments(index)) for index in range(number)]) or said
        if said is None:
            found |= {} if reason is None else {kind: reason}
            continue
        trial = _Trial(codec, options, form, [_result(index) for index in range(number)])
        found[kind] = trial.reason(said)
        if number == 1 and (thought := form.write(_THOUGHT, "")) is not None:
            found["thinking before a call"] = trial.reason(thought + said)
    return found


def known_bridges(codec: TextCodec, options: ChatOptions, name: str | None = None) -> dict[BridgeKind, Reason]:
    """`try_bridges`, whose trials are made once for a template and its options."""
    key = repr((codec.find_template(options.get("chat_template"), options.get("tools")), sorted(options.items()), name))
    known = _KNOWN.setdefault(codec, {})
    if key not in known:
        if len(known) >= _MOST_KNOWN:
            known.clear()
        known[key] = try_bridges(codec, options, name)
    return known[key]


def needs_parts(codec: TextCodec, options: ChatOptions, form: AnswerFormat) -> bool:
    """Whether a template takes results of tools only behind a message with "tool_calls", not behind its text."""
    said, _ = _written_calls(codec, options, 1)
    trial = _Trial(codec, options, form, [_result(0)])
    return said is not None and trial.is_refused(said, in_parts=False) and not trial.is_refused(said, in_parts=True)


def message_of(parts: AnswerParts, call_ids: Sequence[str]) -> dict[str, Any]:
    """The message of an answer in its parts; `call_ids`: one for each call."""
    message: dict[str, Any] = {"role": "assistant", "content": parts.text}
    if parts.thinking:
        message["reasoning_content"] = parts.thinking
    if parts.calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in parts.calls]
        pairs = zip(call_ids, functions, strict=True)
        message["tool_calls"] = [{"id": each, "type": "function", "function": function} for each, function in pairs]
    return message


_CALLS: dict[BridgeKind, int] = {"one call": 1, "two calls": 2}


class _Trial:
    """Answers, each followed by the same new messages."""

    def __init__(
        self, codec: TextCodec, options: ChatOptions, form: AnswerFormat | None, new: list[dict[str, Any]]
    ) -> None:
        self._codec, self._form, self._new = codec, form, new
        self._has_tools = new[0]["role"] == "tool"
        self._options = _with_tools(options, self._has_tools)

    def reason(self, said: str) -> Reason:
        """Why they cannot follow an answer that was sampled with this text, special tokens included."""
        try:
            self._continue(said, in_parts=False)
        except RewrittenTurns as rewritten:
            return once_followed([each["role"] for each in self._new], rewritten.how)
        except RequestError as refused:
            return self._reason_in_parts(said) if self._form is not None else str(refused)
        return None

    def is_refused(self, said: str, *, in_parts: bool) -> bool:
        """Whether the template does not render them."""
        try:
            self._continue(said, in_parts=in_parts)
        except RewrittenTurns:
            return False
        except RequestError:
            return True
        return False

    def _reason_in_parts(self, said: str) -> Reason:
        try:
            self._continue(said, in_parts=True)
        except RewrittenTurns as rewritten:
            return once_followed([each["role"] for each in self._new], rewritten.how)
        except RequestError as refused:
            return str(refused)
        return None

    def _continue(self, said: str, *, in_parts: bool) -> None:
        """Raise `RequestError` unless there is glue behind the first such answer and the second."""
        turns, past = ChatTurns(self._codec, **self._options), [_QUESTION]
        for _ in range(2):  # the first answer has other tokens behind it in the second prompt
            shown = turns.text(past)
            opened = self._behind(shown, said)
            token_ids = self._codec.encode(opened, add_special_tokens=False)
            message = turns.message(opened)
            if in_parts and self._form is not None:
                tools = self._options.get("tools") or []
                parts = self._form.read(token_ids, opened, prompt_end=shown, tools=tools, skip_special_tokens=False)
                message = message_of(parts, [call["id"] for call in map(_call, range(len(parts.calls)))])
            end = self._codec.encode(turns.closing.rstrip(), add_special_tokens=False)[:1]
            past += [message, *self._new]
            turns.between(shown, turns.text(past), opened, [*token_ids, *end])

    def _behind(self, shown: str, said: str) -> str:
        """An answer behind a prompt: if that has opened the thinking, without the tag, and the thinking is closed."""
        opening = _OPENING.search(shown)
        if opening is None or self._form is None:
            return said
        tag = opening[0].strip()
        if not said.startswith(tag):
            said = self._form.write("", said) or said
        return said.removeprefix(tag).lstrip("\n")


def _written_calls(codec: TextCodec, options: ChatOptions, number: int) -> tuple[str | None, Reason]:
    """(an answer that is calls, as the template writes it; why there is none, or None if the template writes none)."""
    calls = [_call(index) for index in range(number)]
    answer = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        turns = ChatTurns(codec, **_with_tools(options, True))
        shown = turns.text([_QUESTION])
        rendering: dict[str, Any] = {**_with_tools(options, True), "add_generation_prompt": False}
        whole = codec.render_chat([_QUESTION, answer], **rendering)
    except RequestError:
        return None, None
    begun = _OPENING.sub("", shown)  # behind no thinking there may be no tag of it
    start = len(begun) if whole.startswith(begun) else len(shown)
    if _NAME not in whole[start:] and "call0000" not in whole[start:]:
        return None, None
    if not whole.startswith(begun):
        return None, "the chat template begins an answer that is a call otherwise than its prompt ends"
    written = whole[start:]
    closing = turns.closing if turns.closing and written.endswith(turns.closing) else ""
    return written.removesuffix(closing), None


def _with_tools(options: ChatOptions, has_tools: bool) -> dict[str, Any]:
    given: dict[str, Any] = dict(options)
    if has_tools:
        given["tools"] = [*(given.get("tools") or ()), _TOOL]
    return given


def _call(index: int) -> dict[str, Any]:
    function = {"name": _NAME, "arguments": _arguments(index)}
    return {"id": f"call0000{index}", "type": "function", "function": function}


def _arguments(index: int) -> dict[str, Any]:
    return {"word": "a b", "limit": index}


def _result(index: int) -> dict[str, Any]:
    return {"role": "tool", "content": f"Result {index}.", "name": _NAME, "tool_call_id": f"call0000{index}"}
