"""Open requests of a core in another process, and who waits for them. Any thread may call anything here.

client's thread: deliver(outputs) ──> OutputProcessor.update ──> wake those who have something to take
reader:          take(stream) <── rendered when it is read: a slow reader costs nothing but its own delay
"""

import asyncio
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping

import msgspec

from rollout_engine.errors import EngineDeadError, RolloutEngineError
from rollout_engine.frontend.output_processor import OpenRequest, OutputProcessor
from rollout_engine.frontend.tokenizer import TextCodec
from rollout_engine.frontend.wire import Outputs, Refused
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest, IdLogprobs
from rollout_engine.metrics import RequestStats
from rollout_engine.outputs import RequestOutput

_SLICE = 512
"""Tokens taken in at a time; between two slices other threads have their turn."""
_WAKES = 32
"""Readers wakened in one iteration of an event loop, so that its other callbacks wait for no more than these."""


class Stream:
    """One open request, and how its reader is told that there is something to `take`."""

    def __init__(self, request: OpenRequest, wake: Callable[["Stream"], None]) -> None:
        self.request, self.wake = request, wake
        self.error: RolloutEngineError | None = None
        """Why nothing more will come."""

    @property
    def request_id(self) -> str:
        """The user's."""
        return self.request.request_id

    @property
    def first_sequence(self) -> int:
        """The core's."""
        return self.request.sequences.start


class OpenStreams:
    """The output processor behind a lock, and a stream for each of its requests."""

    def __init__(
        self,
        codec: TextCodec | None,
        abort: Callable[[list[int]], None],
        *,
        stream_interval: int = 1,
        on_closed: Callable[[OpenRequest, BaseException | None], None] = lambda request, error: None,
    ) -> None:
        """`abort` has the core end sequences."""
        self._processor = OutputProcessor(codec, stream_interval=stream_interval, on_closed=on_closed)
        self._abort = abort
        self._streams: dict[int, Stream] = {}
        """By the first sequence of their request."""
        self._lock = threading.Lock()
        self.policy_version = 0
        """Of the last outputs."""

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request of that id is open."""
        return request_id in self._processor

    @property
    def stats(self) -> RequestStats:
        """Timings of all requests so far."""
        return self._processor.stats

    def sequences_of(self, request_ids: Iterable[str]) -> list[int]:
        """Sequence ids of these open requests, in order. Unknown request ids have none."""
        with self._lock:
            return self._processor.sequences_of(request_ids)

    def add(
        self,
        request_id: str,
        request: EngineCoreRequest,
        text: str | None,
        wake: Callable[[Stream], None],
        trace_headers: Mapping[str, str] | None = None,
    ) -> Stream:
        """Open a request, before the core hears of it. `wake` is called when there is something to take."""
        with self._lock:
            stream = Stream(self._processor.add(request_id, request, text, trace_headers), wake)
            self._streams[request.first_sequence] = stream
            return stream

    def take(self, stream: Stream) -> RequestOutput | None:
        """Take the new output of a request; None: nothing yet. Raises what ended it, once all it had was taken."""
        with self._lock:
            output = self._processor.take(stream.request) if stream.first_sequence in self._streams else None
            if output is not None and output.finished:
                del self._streams[stream.first_sequence]
        if output is None and stream.error is not None:
            raise stream.error
        return output

    def close(self, stream: Stream) -> None:
        """Nobody reads a stream any more: what is unfinished is aborted without a result."""
        with self._lock:
            if self._streams.pop(stream.first_sequence, None) is None:
                return
            self._processor.discard(stream.request_id, stream.error)
        if stream.error is None:
            self._abort(list(stream.request.sequences))

    def deliver(self, message: Outputs | Refused) -> None:
        """Take in what the core sent."""
        if isinstance(message, Refused):
            self._fail([message.first_sequence], message.failure.as_error)
            return
        for part in (part for outputs in message.steps for part in _slices(outputs)):
            with self._lock:
                changed, stopped = self._processor.update(part)
                streams = [self._streams[request.sequences.start] for request in changed]
            self.policy_version = part.policy_version
            if stopped:
                self._abort(stopped)  # before a reader asks the core what it still has to do
            for stream in streams:
                stream.wake(stream)

    def fail_all(self, error: EngineDeadError) -> None:
        """The core is gone."""
        with self._lock:
            open_now = list(self._streams)
        self._fail(open_now, lambda: EngineDeadError(*error.args))

    def _fail(self, first_sequences: Iterable[int], make_error: Callable[[], RolloutEngineError]) -> None:
        with self._lock:
            streams = [self._streams[first] for first in first_sequences if first in self._streams]
        for stream in streams:
            stream.error = make_error()  # each its own: raising one adds to its traceback
            stream.wake(stream)


class LoopWaker:
    """Wakes coroutines of one event loop from any thread, a few per iteration."""

    _of: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopWaker]" = weakref.WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._waiting: dict[asyncio.Event, None] = {}
        self._lock = threading.Lock()
        self._scheduled = False

    @classmethod
    def of(cls, loop: asyncio.AbstractEventLoop) -> "LoopWaker":
        """The one of this loop."""
        waker = cls._of.get(loop)
        return cls._of.setdefault(loop, cls(loop)) if waker is None else waker

    def wake(self, event: asyncio.Event) -> None:
        """Set an event of the loop soon."""
        loop = self._loop()
        with self._lock:
            self._waiting[event] = None
            if self._scheduled or loop is None:
                return
            self._scheduled = True
        try:
            loop.call_soon_threadsafe(self._run)
        except RuntimeError:
            self._scheduled = False  # the loop is closed: nobody waits

    def _run(self) -> None:
        with self._lock:
            chosen = list(itertools.islice(self._waiting, _WAKES))
            for event in chosen:
                del self._waiting[event]
            self._scheduled = again = bool(self._waiting)
        for event in chosen:
            event.set()
        if again:
            asyncio.get_running_loop().call_soon(self._run)


def _slices(outputs: EngineCoreOutputs) -> Iterator[EngineCoreOutputs]:
    """The same outputs, so many tokens at a time; the ends come with the last."""
    count = len(outputs.sequences)
    if count <= _SLICE:
        yield outputs
        return
    rows = {} if outputs.id_logprobs is None else dict(outputs.id_logprobs.rows())
    for start in range(0, count, _SLICE):
        part = slice(start, start + _SLICE)
        top = outputs.top_logprobs
        yield msgspec.structs.replace(
            outputs,
            sequences=outputs.sequences[part],
            token_ids=outputs.token_ids[part],
            kv_min_versions=outputs.kv_min_versions[part],
            logprobs=outputs.logprobs and outputs.logprobs[part],
            kept_logprob_mass=outputs.kept_logprob_mass and outputs.kept_logprob_mass[part],
            top_logprobs=top and (top[0][part], top[1][part]),
            sampled_ranks=None if outputs.sampled_ranks is None else outputs.sampled_ranks[part],
            id_logprobs=IdLogprobs.of({s: rows[s] for s in outputs.sequences[part] if s in rows}),
            ended=outputs.ended if start + _SLICE >= count else [],
            num_cached_tokens=outputs.num_cached_tokens if start == 0 else {},
            prompt_logprobs=outputs.prompt_logprobs if start == 0 else {},
        )
        time.sleep(0)
