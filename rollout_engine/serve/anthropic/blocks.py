"""Answers as blocks of Anthropic's dialect, whole and as the events of a stream.

content_block_start    content_block_delta, any number    content_block_stop
"""

from collections.abc import Callable, Iterator
from typing import Any

from rollout_engine.serve.chat.call import Answer, write_arguments
from rollout_engine.serve.chat.sealed import seal, sign
from rollout_engine.text.formats.answer import AnswerPiece


def write_blocks(answer: Answer, *, hides_thinking: bool) -> list[dict[str, Any]]:
    """The blocks of a whole answer. `hides_thinking`: leave thinking to its signature."""
    parts = answer.parts
    blocks: list[dict[str, Any]] = []
    if parts.thinking is not None:
        shown = "" if hides_thinking else parts.thinking
        blocks.append(
            {"type": "thinking", "thinking": shown, "signature": _sign(parts.thinking, hides_thinking=hides_thinking)}
        )
    if parts.text:
        blocks.append({"type": "text", "text": parts.text})
    for call_id, call in zip(answer.call_ids, parts.calls, strict=True):
        blocks.append({"type": "tool_use", "id": call_id, "name": call.name, "input": call.arguments})
    return blocks


class BlockEvents:
    """The events of the blocks of one answer."""

    def __init__(self, make_call_id: Callable[[str, int], str], *, hides_thinking: bool) -> None:
        self._make_call_id, self._hides_thinking = make_call_id, hides_thinking
        self.call_ids: list[str] = []
        """Ids of the calls so far."""
        self._index = -1
        """The number of the last block; -1 before the first."""
        self._open: str | None = None
        """Kind of the block that is open."""
        self._thinking = ""

    def write(self, piece: AnswerPiece) -> Iterator[dict[str, Any]]:
        """The events of a piece."""
        if piece.call is not None:
            yield from self.close()
            call_id = self._make_call_id(piece.call.name, len(self.call_ids))
            self.call_ids.append(call_id)
            yield self._start("call", {"type": "tool_use", "id": call_id, "name": piece.call.name, "input": {}})
            yield self._delta({"type": "input_json_delta", "partial_json": write_arguments(piece.call.arguments)})
            yield from self.close()
            return
        if self._open != piece.kind:
            yield from self.close()
            empty = {"thinking": "", "signature": ""} if piece.kind == "thinking" else {"text": ""}
            yield self._start(piece.kind, {"type": piece.kind, **empty})
        if piece.kind == "thinking":
            self._thinking += piece.text
        if piece.text and not (piece.kind == "thinking" and self._hides_thinking):
            yield self._delta({"type": f"{piece.kind}_delta", piece.kind: piece.text})

    def close(self) -> Iterator[dict[str, Any]]:
        """The events that end the block that is open."""
        if self._open is None:
            return
        if self._open == "thinking":
            signature = _sign(self._thinking, hides_thinking=self._hides_thinking)
            yield self._delta({"type": "signature_delta", "signature": signature})
        self._open = None
        yield {"type": "content_block_stop", "index": self._index}

    def _start(self, kind: str, block: dict[str, Any]) -> dict[str, Any]:
        self._open, self._index = kind, self._index + 1
        return {"type": "content_block_start", "index": self._index, "content_block": block}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def _sign(thinking: str, *, hides_thinking: bool) -> str:
    return seal(thinking) if hides_thinking else sign(thinking)
