"""Holds the open requests of one client and wakes their readers. Any thread may call anything here.

engine's thread: deliver(outputs) ──> OutputProcessor.update ──> wake the readers of changed requests
reader:          take(stream) <── rendered when it is read: a slow reader delays no other

Only its reader holds a stream. If the reader has forgotten it (a generator that was dropped, perhaps with its event
loop), the request is aborted and forgotten with the next outputs, or at the next look.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from rollout_engine.base.errors import EngineDeadError, RolloutEngineError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.base.metrics import RequestStats
from rollout_engine.base.outputs import CompletionOutput, Quantization, RequestOutput
from rollout_engine.results.open_request import OpenRequest
from rollout_engine.results.output_processor import OutputProcessor
from rollout_engine.text.tokenizer import TextCodec


class Stream:
    """One open request, as its reader holds it; `wake` signals that there is something to `take`."""

    __slots__ = ("__weakref__", "error", "request", "wake")

    def __init__(self, request: OpenRequest, wake: Callable[["Stream"], None]) -> None:
        self.request, self.wake = request, wake
        self.error: RolloutEngineError | None = None
        """Why the request has no further output, if an error ended it."""

    @property
    def request_id(self) -> str:
        """Id that the user gave the request, or the engine made."""
        return self.request.request_id

    @property
    def first_sequence_id(self) -> int:
        """Id of its first sequence in the core."""
        return self.request.sequence_ids.start


class OpenStreams:
    """Guards an `OutputProcessor` with a lock and maps each of its requests to its stream, while one reads it."""

    def __init__(
        self,
        codec: TextCodec | None,
        abort: Callable[[list[int]], None],
        *,
        stream_interval: int = 1,
        on_closed: Callable[[OpenRequest, BaseException | None], None] = lambda request, error: None,
        quantization: Quantization | None = None,
    ) -> None:
        """`abort` ends sequences in the core; `quantization`: that of the engine."""
        self._processor = OutputProcessor(
            codec, stream_interval=stream_interval, on_closed=on_closed, quantization=quantization
        )
        self._abort = abort
        self._streams: dict[int, weakref.KeyedRef[OpenRequest, Stream]] = {}
        """Streams by the id of their first sequence; the key is the request."""
        self._dropped: deque[weakref.KeyedRef[OpenRequest, Stream]] = deque()
        """Streams that their readers forgot without closing them. The garbage collector appends, on any thread."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        self._close_dropped()
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of that id is open."""
        self._close_dropped()
        return request_id in self._processor

    def has_live(self) -> bool:
        """Whether some request has a sample that has not ended."""
        self._close_dropped()
        return self._processor.has_live

    @property
    def stats(self) -> RequestStats:
        """Timings of all requests so far."""
        return self._processor.stats

    def sequence_ids_of(self, request_ids: Iterable[str]) -> list[int]:
        """Return the sequence ids of these open requests, in order. Unknown request ids have none."""
        with self._lock:
            return self._processor.sequence_ids_of(request_ids)

    def num_tokens(self, request_ids: Iterable[str]) -> int:
        """Count the tokens of these open requests so far; 0 for those whose finished output was taken."""
        with self._lock:
            return self._processor.num_tokens(request_ids)

    def add(
        self,
        request_id: str,
        request: EngineCoreRequest,
        text: str | None,
        wake: Callable[[Stream], None],
        trace_headers: Mapping[str, str] | None = None,
        num_kept: int | None = None,
    ) -> Stream:
        """Open a request; call it before the core gets it. `wake` is called when there is something to take.

        `num_kept`: as in `OutputProcessor.add`.
        """
        with self._lock:
            opened = self._processor.add(request_id, request, text, trace_headers, num_kept)
            stream = Stream(opened, wake)
            self._streams[request.first_sequence_id] = weakref.KeyedRef(stream, self._dropped.append, opened)
            return stream

    def parts(self, request_id: str, starts: Sequence[int], min_tokens: int) -> list[CompletionOutput]:
        """New tokens of an open request's samples, as `OutputProcessor.parts` returns them."""
        with self._lock:
            return self._processor.parts(request_id, starts, min_tokens)

    def restore(self, stream: Stream, parts: Iterable[CompletionOutput]) -> dict[int, list[int]]:
        """Give a new request the tokens that an earlier process had; wakes its reader if nothing is left to sample.

        Returns the tokens of the samples that have not ended, by their sequence ids.
        """
        with self._lock:
            live = self._processor.restore(stream.request, parts)
        if not live:
            stream.wake(stream)
        return live

    def take(self, stream: Stream) -> RequestOutput | None:
        """Take the new output of a request, if any. Raises the error that ended it, after its last output."""
        with self._lock:
            output = self._processor.take(stream.request) if stream.first_sequence_id in self._streams else None
            if output is not None and output.finished:
                del self._streams[stream.first_sequence_id]
        if output is None and stream.error is not None:
            raise stream.error
        return output

    def close(self, stream: Stream) -> None:
        """Stop reading a stream; an unfinished request is aborted without a result."""
        with self._lock:
            if self._streams.pop(stream.first_sequence_id, None) is None:
                return
            self._processor.discard(stream.request_id, stream.error)
        if stream.error is None:
            self._abort(list(stream.request.sequence_ids))

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Add the outputs of a step, and wake the readers that have something to take."""
        self._close_dropped()
        with self._lock:
            changed, stopped = self._processor.update(outputs)
            found = [self._streams[request.sequence_ids.start]() for request in changed]
        if stopped:
            self._abort(stopped)  # before a reader asks the core whether work is left
        for stream in found:
            if stream is not None:
                stream.wake(stream)

    def refuse(self, first_sequence_id: int, error: RolloutEngineError) -> None:
        """End a request that the core did not accept, or of which it did not accept the rest of one sample."""
        with self._lock:
            owner = self._processor.owner_of(first_sequence_id)
        if owner is None:
            return
        self._fail([owner.sequence_ids.start], lambda: error)
        if first_sequence_id != owner.sequence_ids.start:
            self._abort(list(owner.sequence_ids))

    def fail_all(self, error: EngineDeadError) -> None:
        """End every open request after the core has died."""
        with self._lock:
            open_now = list(self._streams)
        self._fail(open_now, lambda: EngineDeadError(*error.args))

    def _fail(self, first_sequence_ids: Iterable[int], make_error: Callable[[], RolloutEngineError]) -> None:
        with self._lock:
            found = [self._streams[first]() for first in first_sequence_ids if first in self._streams]
        for stream in found:
            if stream is not None:
                stream.error = make_error()  # one each: raising an error adds to its traceback
                stream.wake(stream)

    def _close_dropped(self) -> None:
        """Abort and forget the requests whose readers are gone."""
        if not self._dropped:
            return
        aborted: list[int] = []
        with self._lock:
            while self._dropped:
                reference = self._dropped.popleft()
                request = reference.key
                if self._streams.get(request.sequence_ids.start) is reference:
                    del self._streams[request.sequence_ids.start]
                    self._processor.discard(request.request_id)
                    aborted += request.sequence_ids
        if aborted:
            self._abort(aborted)
