"""The requests of one caller that blocks for their outputs, over any client."""

import queue
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from rollout_engine.base.errors import DirtyWeightsError
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.faces.frontend import Frontend
from rollout_engine.results.open_streams import Stream

_POLL_SECONDS = 0.05
"""Seconds that a read waits for another thread or process, so that an interrupt is handled soon."""


class Reader:
    """Adds requests and reads their outputs, which no other caller gets. Call it inside `held()`."""

    def __init__(self, frontend: Frontend, on_arrival: Callable[[], object] | None = None) -> None:
        """`on_arrival` is called, on any thread, when `read` has something to return at once."""
        self._frontend = frontend
        self._open: dict[str, Stream] = {}
        self._arrived: queue.SimpleQueue[Stream | None] = queue.SimpleQueue()
        """Streams with something to take; None for a nudge."""
        self._wake = self._arrived.put if on_arrival is None else _both(self._arrived.put, on_arrival)
        self._put_back: list[RequestOutput] = []

    def __len__(self) -> int:
        """Requests whose finished output has not been read."""
        return len(self._open) + self.num_put_back

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open or any(output.request_id == request_id for output in self._put_back)

    @property
    def has_news(self) -> bool:
        """Whether `read` has something to return at once."""
        return bool(self._put_back) or not self._arrived.empty()

    @property
    def num_put_back(self) -> int:
        """Finished outputs that were put back."""
        return sum(output.finished for output in self._put_back)

    def add(self, prompt: Any, params: Any, request_id: str | None, **options: Any) -> str:
        """Queue one request; `options` of `Frontend.add_request`. Raises `RequestError`, nothing queued."""
        stream = self._frontend.add_request(prompt, params, request_id, self._wake, **options)
        self._open[stream.request_id] = stream
        return stream.request_id

    def add_all(self, prompts: Any, params: Any, **options: Any) -> list[str]:
        """Queue one prompt or a list of them; all, or none and a `RequestError` that names the index.

        `options` of `Frontend.add_requests`.
        """
        streams = self._frontend.add_requests(prompts, params, self._wake, **options)
        self._open.update((stream.request_id, stream) for stream in streams)
        return [stream.request_id for stream in streams]

    def read(self, *, always_step: bool = False) -> list[RequestOutput]:
        """Take outputs that have arrived, by `output_kind`; if there are none, compute a step, or wait briefly for one.

        `always_step`: compute a step in any case. Raises the error that ended a request without an output.
        """
        outputs, self._put_back = self._put_back, []
        if outputs:
            return outputs
        turn = self._frontend.client.turn
        if not self._arrived.empty():
            with suppress(DirtyWeightsError):  # there is something to take
                if always_step:
                    turn(lambda: False)
        elif not turn(lambda: not self._arrived.empty()):
            self._wait()
        try:
            for _ in range(self._arrived.qsize()):
                output = self._take(self._arrived.get())
                if output is not None:
                    outputs.append(output)
        except BaseException:  # of one request: the next read returns the others' outputs
            self.put_back(outputs)
            raise
        return outputs

    def nudge(self) -> None:
        """Have a `read` on another thread that waits, or the next one, return soon."""
        self._arrived.put(None)

    def put_back(self, outputs: list[RequestOutput]) -> None:
        """Have the next `read` return these again."""
        self._put_back = outputs + self._put_back

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests without a result. Unknown ids are a no-op."""
        ended = list(request_ids)
        for request_id in ended:
            stream = self._open.pop(request_id, None)
            if stream is not None:
                self._frontend.close(stream)
        if self._put_back:
            forgotten = set(ended)
            self._put_back = [output for output in self._put_back if output.request_id not in forgotten]

    def seed_of(self, request_id: str) -> int:
        """Sequence seed of sample 0 of an open request."""
        return self._open[request_id].request.seed

    def parts(self, request_id: str, starts: Sequence[int], min_tokens: int) -> list[CompletionOutput]:
        """New tokens of an open request's samples behind the first `starts`, one number each, without text.

        [] unless one of them has at least `min_tokens` there. `add(begun=...)` takes all of them in another process.
        """
        return self._frontend.streams.parts(request_id, starts, min_tokens)

    def num_tokens(self) -> int:
        """Tokens so far of the requests whose finished output has not been read."""
        return self._frontend.streams.num_tokens(self._open)

    def _take(self, stream: Stream | None) -> RequestOutput | None:
        if stream is None or stream.request_id not in self._open:
            return None
        try:
            output = self._frontend.take(stream)
        except BaseException:
            self._frontend.close(self._open.pop(stream.request_id))
            raise
        if output is not None and output.finished:
            del self._open[stream.request_id]
        return output

    def _wait(self) -> None:
        try:
            stream = self._arrived.get(timeout=_POLL_SECONDS)
        except queue.Empty:
            return
        self._arrived.put(stream)


def _both(put: Callable[[Stream], None], on_arrival: Callable[[], object]) -> Callable[[Stream], None]:
    """Put a stream, then call `on_arrival`. A stream holds this, so it must not hold the reader."""

    def wake(stream: Stream) -> None:
        put(stream)
        on_arrival()

    return wake
