"""An engine whose core is another process, for any thread: requests as streams, verbs as futures.

`AsyncLLM` is its face for event loops; `RolloutPolicy` reads it from plain threads.
"""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout_engine.config import EngineConfig
from rollout_engine.errors import EngineDeadError, LifecycleError, RolloutEngineError
from rollout_engine.frontend.client_split import first_sequence_of
from rollout_engine.frontend.core_client import HEARTBEAT_SECONDS, MAX_BACKLOG_BYTES, CoreClient
from rollout_engine.frontend.input_processor import CheckedPrompt, InputProcessor
from rollout_engine.frontend.lifeline import CoreProcess
from rollout_engine.frontend.open_streams import OpenStreams, Stream
from rollout_engine.frontend.prompts import Prompt
from rollout_engine.frontend.request_ids import RequestIds, as_request_ids
from rollout_engine.frontend.spans import Spans, TraceHeaders, spans_to
from rollout_engine.frontend.stat_loggers import all_loggers
from rollout_engine.frontend.stat_thread import StatThread
from rollout_engine.frontend.tokenizer import TextCodec
from rollout_engine.frontend.weight_push import WeightPusher
from rollout_engine.frontend.wire import AddRequest, Ready
from rollout_engine.messages import UpdateOptions
from rollout_engine.metrics import CoreMetrics, EngineMetrics, StatLogger
from rollout_engine.outputs import RequestOutput, UpdateReport
from rollout_engine.sampling_params import SamplingLike
from rollout_engine.seeds import mix
from sync.base import WeightSource

logger = logging.getLogger("rollout_engine")


class RemoteEngine:
    """Prompts are tokenized and outputs put together here; the core computes. Made by `start` or `connect`."""

    def __init__(
        self,
        client: CoreClient,
        ready: Ready,
        codec: TextCodec | None,
        spans: Spans,
        loggers: Sequence[StatLogger] = (),
    ) -> None:
        self.client, self.ready, self.spans = client, ready, spans
        # Clients count their requests apart: without a root of its own, each would draw what the others drew.
        index, seed = client.client_index, ready.config.seed
        seed = seed if index == 0 else mix(seed, 2**63 + index)
        self.inputs = InputProcessor.from_config(
            ready.config, codec, ready, seed=seed, first_sequence=first_sequence_of(index)
        )
        self.streams = OpenStreams(
            codec, client.abort, stream_interval=ready.config.stream_interval, on_closed=spans.request
        )
        self.streams.policy_version = ready.policy_version
        self._admitting = threading.Lock()
        self._ids = RequestIds(self.streams.__contains__)
        client.listen(self.streams.deliver, self.streams.fail_all)
        self.stat_thread = StatThread(
            loggers, _metrics_of(client, self.streams), self.streams.__len__, ready.config.log_interval
        )
        self._pusher = WeightPusher(client)
        self.shutdown = weakref.finalize(self, _close, self.stat_thread, client, self._pusher, spans)
        """Leave the core, or end it if it is ours. Calling it again is a no-op."""

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        hang_seconds: float,
        start_seconds: float,
        stat_loggers: Sequence[StatLogger] = (),
    ) -> "RemoteEngine":
        """Over a new core, which ends with this engine. Raises `ConfigError`, `EngineDeadError`."""
        loggers, spans = all_loggers(stat_loggers, log_line=config.log_stats), spans_to(config.otlp_traces_endpoint)
        process = CoreProcess(config, heartbeat_seconds=HEARTBEAT_SECONDS, max_backlog_bytes=MAX_BACKLOG_BYTES)
        try:
            codec = _load_codec(config)  # while the core loads the model
            process.wait_ready(start_seconds)
            client = CoreClient.start(process, hang_seconds=hang_seconds)
            ready = client.wait_welcome()
        except BaseException:
            process.end(kill=True)
            spans.close()
            raise
        logger.info("%s, core process %d", ready.choices, ready.pid)
        return cls(client, ready, codec, spans, loggers)

    @classmethod
    def connect(cls, address: str, *, hang_seconds: float) -> "RemoteEngine":
        """Over a core that somebody else started. Raises `EngineDeadError`."""
        client = CoreClient.connect(address, hang_seconds=hang_seconds)
        ready = client.wait_welcome()
        try:
            return cls(client, ready, _load_codec(ready.config), spans_to(ready.config.otlp_traces_endpoint))
        except BaseException:
            client.close()
            raise

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingLike | None,
        request_id: str | None,
        wake: Callable[[Stream], None],
        *,
        priority: int = 0,
        trace_headers: TraceHeaders | None = None,
    ) -> Stream:
        """Queue a request; `wake(stream)` is called, on another thread, when there is something to take of it.

        Raises `RequestError`, nothing queued, and `EngineDeadError`.
        """
        self.spans.check_headers(trace_headers)
        return self._queue(self.inputs.check(prompt, params), request_id, wake, priority, trace_headers)

    def add_requests(
        self, prompts: Sequence[Any], params: Sequence[SamplingLike], wake: Callable[[Stream], None]
    ) -> list[Stream]:
        """Queue a batch, all checked before any is queued: `RequestError` names the index."""
        checked = self.inputs.check_batch(list(prompts), list(params))
        streams: list[Stream] = []
        try:
            for each in checked:
                streams.append(self._queue(each, None, wake, 0))
        except BaseException:
            for stream in streams:
                self.close(stream)
            raise
        return streams

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; their streams still give what they had. An unknown or finished id is a no-op."""
        self.client.abort(self.streams.sequences_of(as_request_ids(request_ids)))

    def take(self, stream: Stream) -> RequestOutput | None:
        """Take the new output of a request, if any. Raises what ended it, and `LifecycleError` in a forked child."""
        self.client.require_own_process()
        return self.streams.take(stream)

    def close(self, stream: Stream) -> None:
        """Nobody reads a stream any more; unfinished it is aborted, without a result. No-op in a forked child."""
        if self.client.owner.is_here:
            self.streams.close(stream)

    def update_weights(self, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
        """One whole update of the core's weights; blocks. See `WeightVerbs.update_weights`."""
        report = self.spans.update(partial(self._pusher.push, source, version, options))
        self.streams.policy_version = report.version
        return report

    def call(self, name: str, kind: Any = None, **arguments: Any) -> Future[Any]:
        """Call a utility of the core; the future gives its result as `kind`."""
        return self.client.call(name, kind, **arguments)

    def get_metrics(self) -> EngineMetrics:
        """Counters and gauges of the core, timings of this client's requests; blocks."""
        return _metrics_of(self.client, self.streams)()

    def score(
        self, prompt_token_ids: Sequence[list[int]], completion_token_ids: Sequence[list[int]], temperature: float
    ) -> Future[list[np.ndarray]]:
        """Log-probs of given completions under the live weights. Raises `RequestError`."""
        pairs = self.inputs.check_scored(prompt_token_ids, completion_token_ids, temperature)
        return self.call(
            "score",
            list[np.ndarray],
            prompt_token_ids=[prompt for prompt, _ in pairs],
            completion_token_ids=[completion for _, completion in pairs],
            temperature=temperature,
        )

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer. Raises `LifecycleError` with `skip_tokenizer_init=True`."""
        if self.inputs.codec is None:
            raise LifecycleError("get_tokenizer: there is none, the engine was made with skip_tokenizer_init=True.")
        return self.inputs.codec.hf

    def _queue(
        self,
        checked: CheckedPrompt,
        request_id: str | None,
        wake: Callable[[Stream], None],
        priority: int,
        trace_headers: TraceHeaders | None = None,
    ) -> Stream:
        self._require_alive()
        with self._admitting:
            name = self._ids.make() if request_id is None else self._ids.check(request_id)
            request = self.inputs.admit(checked, priority=priority)
            stream = self.streams.add(name, request, checked.text, wake, trace_headers)
            try:
                self.client.send(AddRequest(request))
            except RolloutEngineError as error:
                stream.error = error
                self.streams.close(stream)
                raise
        return stream

    def _require_alive(self) -> None:
        self.client.require_own_process()
        if self.client.dead_error is not None:
            raise EngineDeadError(*self.client.dead_error.args)


def _metrics_of(client: CoreClient, streams: OpenStreams) -> Callable[[], EngineMetrics]:
    """Without a reference to the engine, which ends when nobody has one."""
    return lambda: EngineMetrics(core=client.call("get_core_metrics", CoreMetrics).result(), requests=streams.stats)


def _close(stat_thread: StatThread, client: CoreClient, pusher: WeightPusher, spans: Spans) -> None:
    if not client.owner.is_here:  # a forked child has none of their threads, and they are the parent's to end
        return
    stat_thread.close()
    client.close()
    pusher.close()
    spans.close()


def _load_codec(config: EngineConfig) -> TextCodec | None:
    return TextCodec.from_config(config)
