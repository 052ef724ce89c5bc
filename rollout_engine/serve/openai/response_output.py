"""Answers as the output items of OpenAI's responses, whole and as the events of a stream.

output_item.added
    content_part.added, reasoning_text.delta ..., reasoning_text.done, content_part.done      of thinking
    content_part.added, output_text.delta ..., output_text.done, content_part.done            of words
    function_call_arguments.delta, function_call_arguments.done                               of a call
output_item.done
"""

import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from rollout_engine.serve.chat.call import write_arguments
from rollout_engine.serve.chat.sealed import seal
from rollout_engine.text.formats.answer import AnswerPiece

Event = dict[str, Any]
_PARTS = {"thinking": "reasoning_text", "text": "output_text"}


class ItemEvents:
    """The events of the items of one answer. Joined, they are the items of a whole answer.

    Args:
        seals_thinking: whether reasoning items have contents that clients hand back unread.
    """

    def __init__(self, make_call_id: Callable[[str, int], str], *, seals_thinking: bool) -> None:
        self._make_call_id, self._seals_thinking = make_call_id, seals_thinking
        self.items: list[dict[str, Any]] = []
        """The items that are complete."""
        self.call_ids: list[str] = []
        """Ids of the calls so far."""
        self._open: str | None = None
        """Kind of the item that is open."""
        self.thinking: str | None = None
        """The thinking so far; None without any."""
        self._id, self._text = "", ""
        self._logprobs: list[Any] = []

    def write(self, piece: AnswerPiece, logprobs: list[Any]) -> Iterator[Event]:
        """The events of a piece. `logprobs`: of its tokens; none for one that is no text."""
        if piece.call is not None:
            yield from self.close()
            yield from self._write_call(piece.call.name, write_arguments(piece.call.arguments))
            return
        if self._open != piece.kind:
            yield from self.close()
            yield from self._start(piece.kind)
        self._text += piece.text
        if piece.kind == "thinking":
            self.thinking = (self.thinking or "") + piece.text
        self._logprobs += logprobs
        if piece.text:
            more = {"logprobs": logprobs} if piece.kind == "text" else {}
            yield self._of_part(f"response.{_PARTS[piece.kind]}.delta", delta=piece.text, **more)

    def close(self, *, status: str = "completed", logprobs: Sequence[Any] = ()) -> Iterator[Event]:
        """The events that end the item that is open.

        `status`: "incomplete" if the answer was cut in it. `logprobs`: of tokens without text behind its text.
        """
        if self._open is None:
            return
        self._logprobs += logprobs if self._open == "text" else ()
        kind, part = self._open, self._part(self._text)
        more = {"logprobs": self._logprobs} if kind == "text" else {}
        yield self._of_part(f"response.{_PARTS[kind]}.done", text=self._text, **more)
        yield self._of_part("response.content_part.done", part=part)
        item = self._item([part], status)
        if kind == "thinking" and self._seals_thinking:
            item["encrypted_content"] = seal(self._text)
        self._open = None
        yield self._finish(item)

    def _start(self, kind: str) -> Iterator[Event]:
        self._open, self._text, self._logprobs = kind, "", []
        self._id = f"{'rs' if kind == 'thinking' else 'msg'}_{uuid.uuid4().hex[:24]}"
        item = self._item([], "in_progress")
        yield {"type": "response.output_item.added", "output_index": len(self.items), "item": item}
        yield self._of_part("response.content_part.added", part=self._part(""))

    def _item(self, content: list[Any], status: str) -> dict[str, Any]:
        if self._open == "thinking":
            return {"id": self._id, "type": "reasoning", "summary": [], "content": content, "status": status}
        return {"id": self._id, "type": "message", "role": "assistant", "content": content, "status": status}

    def _part(self, text: str) -> dict[str, Any]:
        if self._open == "thinking":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}

    def _of_part(self, kind: str, **more: Any) -> Event:
        place = {"item_id": self._id, "output_index": len(self.items), "content_index": 0}
        return {"type": kind, **place, **more}

    def _write_call(self, name: str, arguments: str) -> Iterator[Event]:
        call_id = self._make_call_id(name, len(self.call_ids))
        self.call_ids.append(call_id)
        item = {"id": f"fc_{uuid.uuid4().hex[:24]}", "type": "function_call", "call_id": call_id, "name": name}
        index = len(self.items)
        begun = {**item, "arguments": "", "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        place = {"item_id": item["id"], "output_index": index}
        yield {"type": "response.function_call_arguments.delta", **place, "delta": arguments}
        yield {"type": "response.function_call_arguments.done", **place, "name": name, "arguments": arguments}
        yield self._finish({**item, "arguments": arguments, "status": "completed"})

    def _finish(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        return {"type": "response.output_item.done", "output_index": len(self.items) - 1, "item": item}
