"""Whether turns can be continued token by token under a chat template, tried on answers of each kind.

    prompt of the next turn = this turn's prompt + the sampled ids + glue            text/chat_turns.py

`try_bridges` samples nothing: it writes answers as the template's own format has them, ends them as the template does,
and asks `ChatTurns` for the glue behind them. What fails for one of these fails for what a policy samples alike.
"""

from typing import Any, Literal, TypeAlias

from rollout_engine.base.errors import RequestError
from rollout_engine.text.chat_turns import ChatTurns, RewrittenTurns, once_followed
from rollout_engine.text.conversations import ChatOptions
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
_WORDS, _THOUGHT = "Some words: 0f1e2d3c.", "Let me see: 1e0f."


def prove_bridge(codec: TextCodec, options: ChatOptions, name: str | None = None) -> Reason:
    """Why turns cannot be continued under a chat template and its options; None if answers of each kind can be.

    `name`: as of `answer_format`. Raises `RequestError` without a chat template.
    """
    return next((f"{kind}: {reason}" for kind, reason in try_bridges(codec, options, name).items() if reason), None)


def try_bridges(codec: TextCodec, options: ChatOptions, name: str | None = None) -> dict[BridgeKind, Reason]:
    """The same by kind of answer. Kinds that the template does not write are left out."""
    form = answer_format(codec, options.get("chat_template"), name)
    found: dict[BridgeKind, Reason] = {"words": _reason(codec, options, _WORDS, [_NEXT])}
    if form is not None and (thought := form.write(_THOUGHT, _WORDS)) is not None:
        found["thinking"] = _reason(codec, options, thought, [_NEXT])
    if form is None or form.name == "think":
        return found
    for kind, number in _CALLS.items():
        said, reason = _written_calls(codec, options, number)
        if said is None:
            if reason is not None:
                found[kind] = reason
            continue
        results = [_result(index) for index in range(number)]
        found[kind] = _reason(codec, options, said, results, has_tools=True)
        if number == 1 and (thought := form.write(_THOUGHT, "")) is not None:
            found["thinking before a call"] = _reason(codec, options, thought + said, results, has_tools=True)
    return found


_CALLS: dict[BridgeKind, int] = {"one call": 1, "two calls": 2}


def _reason(
    codec: TextCodec, options: ChatOptions, said: str, new: list[dict[str, Any]], *, has_tools: bool = False
) -> Reason:
    """Why `new` messages cannot follow an answer that was sampled with this text, special tokens included."""
    try:
        turns = ChatTurns(codec, **_with_tools(options, has_tools))
        past = [_QUESTION]
        for _ in range(2):  # the second answer stands behind one that is no longer the last
            shown = turns.text(past)
            opened = _unopened(shown, said)
            token_ids = codec.encode(opened, add_special_tokens=False)
            text = _shown(codec, token_ids)
            end = codec.encode(turns.closing.rstrip(), add_special_tokens=False)[:1]
            past += [turns.message(text), *new]
            turns.between(shown, turns.text(past), text, [*token_ids, *end])
    except RewrittenTurns as rewritten:
        return once_followed([each["role"] for each in new], rewritten.how)
    except RequestError as refused:
        return str(refused)
    return None


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
    if _NAME not in whole[len(shown) :] and "call0000" not in whole[len(shown) :]:
        return None, None
    if not whole.startswith(shown):
        return None, "the chat template begins an answer that is a call otherwise than its prompt ends"
    written = whole[len(shown) :]
    closing = turns.closing if turns.closing and written.endswith(turns.closing) else ""
    return written.removesuffix(closing), None


def _unopened(shown: str, said: str) -> str:
    """An answer without thinking's tag at its beginning if the prompt ends with it."""
    tag, found, rest = said.partition("\n")
    return rest if found and tag and shown.rstrip().endswith(tag) else said


def _shown(codec: TextCodec, token_ids: list[int]) -> str:
    stream = codec.new_stream(skip_special_tokens=True)
    return stream.push(token_ids) + stream.flush()


def _with_tools(options: ChatOptions, has_tools: bool) -> dict[str, Any]:
    given: dict[str, Any] = dict(options)
    if has_tools:
        given["tools"] = [*(given.get("tools") or ()), _TOOL]
    return given


def _call(index: int) -> dict[str, Any]:
    arguments = {"word": "a b", "limit": index}
    return {"id": f"call0000{index}", "type": "function", "function": {"name": _NAME, "arguments": arguments}}


def _result(index: int) -> dict[str, Any]:
    return {"role": "tool", "content": f"Result {index}.", "name": _NAME, "tool_call_id": f"call0000{index}"}
