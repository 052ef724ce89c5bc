"""The front end of an engine: it turns prompts into requests of a client, and outputs into results.

prompts ── InputProcessor ──> EngineClient.add_request        steps        EngineClient ──> OpenStreams ──> readers
"""

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Self

from transformers import PreTrainedTokenizerBase

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import LifecycleError, RequestError, RolloutEngineError
from rollout_engine.base.lora_request import LoRALike, LoRARequest
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.base.metrics import EngineMetrics, StatLogger
from rollout_engine.base.outputs import CompletionOutput, RequestOutput
from rollout_engine.base.pooling_params import supported_tasks
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.seeds import mix
from rollout_engine.engine.client import EngineClient, Route
from rollout_engine.engine.interrupts import allowed, held
from rollout_engine.engine.verb import Arguments, Verb
from rollout_engine.engine.verbs import VERBS
from rollout_engine.faces.draft_files import load_drafts, save_drafts
from rollout_engine.faces.weight_updates import update_weights
from rollout_engine.fleet.plan.ledger import end_of_tokens, make_continuation
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.process.client_routing import first_sequence_of
from rollout_engine.results.open_streams import OpenStreams, Stream
from rollout_engine.results.request_ids import RequestIds, as_request_ids
from rollout_engine.telemetry.spans import Spans, TraceHeaders, spans_to
from rollout_engine.telemetry.stat_loggers import all_loggers
from rollout_engine.telemetry.stat_thread import MetricsReader, StatThread
from rollout_engine.text.input_processor import CheckedPrompt, InputProcessor, Params, at_index, one_each
from rollout_engine.text.prompts import Prompt
from rollout_engine.text.tokenizer import TextCodec, tokenizer_directory
from sync.owner_process import OwnerProcess

Wake = Callable[[Stream], None]


class Frontend:
    """Requests and results of one client. Any thread may call anything here.

    Args:
        client: reaches the engine.
        codec: the tokenizer; None with `skip_tokenizer_init`.
        spans: record requests, pauses and updates.
        loggers: are shown the engine's metrics.
    """

    def __init__(
        self,
        client: EngineClient,
        codec: TextCodec | None,
        *,
        spans: Spans | None = None,
        loggers: Sequence[StatLogger] = (),
    ) -> None:
        self.client, self.spans = client, spans or Spans()
        config, index = client.info.config, client.index
        # Each client numbers its own requests: with the same root, clients would draw the same seeds.
        seed = config.seed if index == 0 else mix(config.seed, 2**63 + index)
        self.inputs = InputProcessor.from_config(
            config, codec, client.info, seed=seed, first_sequence_id=first_sequence_of(index)
        )
        self.streams = OpenStreams(
            codec,
            client.abort,
            stream_interval=config.stream_interval,
            on_closed=self.spans.request,
            quantization=config.quantization,
        )
        self.num_updates = 0
        """Weight updates through this object so far, failed ones too: the same version may then have other weights."""
        self._ids = RequestIds(self.streams.__contains__)
        self._admitting = threading.Lock()
        """Requests are numbered in the order in which they are sent to the core."""
        self._process = OwnerProcess()
        client.listen(self.streams)
        read = _metrics_of(client, self.streams)
        self._stat_thread = StatThread(loggers, read, self.streams.has_live, config.log_interval)
        parts = self._process, self._stat_thread, client, self.spans, self.inputs.close
        self.shutdown = weakref.finalize(self, _close, *parts)
        """Leave the engine, or end it if it is ours. Calling it again is a no-op."""

    @classmethod
    def start(
        cls, config: EngineConfig, start: "Callable[..., EngineClient]", stat_loggers: Sequence[StatLogger] = ()
    ) -> Self:
        """Load tokenizer and engine. `start(config, meanwhile)` makes the client, and calls `meanwhile` as it does.

        Raises `ConfigError` when they cannot be served.
        """
        loggers, spans = (
            all_loggers(stat_loggers, log_line=config.log_stats),
            spans_to(config.otlp_traces_endpoint, config.model),
        )
        codecs: list[TextCodec | None] = []
        try:
            directory = tokenizer_directory(config)  # a model that is nowhere is one error, before any process starts
            client = start(config, lambda: codecs.append(TextCodec.from_config(config, directory)))
        except BaseException:
            spans.close()
            raise
        try:
            return cls(client, codecs[0], spans=spans, loggers=loggers)
        except BaseException:
            client.shutdown()
            raise

    @classmethod
    def over(cls, client: EngineClient) -> Self:
        """Wrap an existing client of any engine. Ends the client if its tokenizer cannot be loaded."""
        config = client.info.config
        try:
            return cls(client, TextCodec.from_config(config), spans=spans_to(config.otlp_traces_endpoint, config.model))
        except BaseException:
            client.shutdown()
            raise

    def add_request(
        self,
        prompt: Prompt,
        params: Params | None,
        request_id: str | None,
        wake: Wake,
        *,
        priority: int = 0,
        session_id: str | None = None,
        replica_index: int | None = None,
        trace_headers: TraceHeaders | None = None,
        num_kept: int | None = None,
        seed: int | None = None,
        begun: Sequence[CompletionOutput] = (),
    ) -> Stream:
        """Queue a request; `wake(stream)` is called, perhaps on another thread, when there is something to take of it.

        `replica_index`: the replica of a fleet that is to begin with it. `num_kept`: number of its samples to return,
        the first to end; the others are aborted then. None: return all. `seed`: in place of the params' if given.
        `begun`: tokens that its samples got in an earlier process (`Reader.parts`), behind which they continue.
        Raises `RequestError`, nothing queued, and `EngineDeadError`.
        """
        self.client.require_usable()
        self.spans.check_headers(trace_headers)
        route = Route.from_options(session_id, replica_index)
        checked = self.inputs.check(prompt, params)  # without the lock: a long text takes its time
        with held(), self._admitting:
            return self._queue(checked, request_id, wake, priority, route, trace_headers, num_kept, seed, begun)

    def add_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None,
        wake: Wake,
        *,
        priority: int | Sequence[int] = 0,
        session_id: str | Sequence[str | None] | None = None,
        replica_index: int | None = None,
        trace_headers: TraceHeaders | None = None,
        num_kept: Sequence[int | None] | None = None,
        seeds: Sequence[int | None] | None = None,
        check_all: Callable[[Sequence[CheckedPrompt]], None] | None = None,
    ) -> list[Stream]:
        """Queue one prompt or a list of them, all checked before any is queued: `RequestError` names the index.

        `params`, `priority`, `session_id`: one for all or one each. `replica_index`: the replica of a fleet that is to
        begin with them. `num_kept`: one each, as in `add_request`. `seeds`: one each, in place of the params' if given.
        `check_all` is called with all prompts as token ids; an error that it raises refuses them.
        """
        self.client.require_usable()
        self.spans.check_headers(trace_headers)
        if not isinstance(session_id, list | tuple):
            Route.from_options(session_id, replica_index)
        streams: list[Stream] = []
        with held():
            try:
                with allowed():  # reading many prompts takes long, so an interrupt does not wait for it
                    checked = self.inputs.check_batch(prompts, params)
                    if check_all is not None:
                        check_all(checked)
                    priorities = one_each("priority", priority, len(checked), "an int")
                    sessions = one_each("session_id", session_id, len(checked), "a str")
                with self._admitting:
                    for index, each in enumerate(checked):
                        try:
                            route = Route.from_options(sessions[index], replica_index)
                            kept, seed = (given[index] if given else None for given in (num_kept, seeds))
                            streams.append(
                                self._queue(each, None, wake, priorities[index], route, trace_headers, kept, seed)
                            )
                        except RequestError as error:  # the core's own checks
                            raise at_index("prompts", index, error) from error
            except BaseException:
                for stream in streams:
                    self.close(stream)
                raise
        return streams

    def next_seed(self) -> int:
        """Draw a seed from the engine's own."""
        with self._admitting:
            return self.inputs.next_seed()

    def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; their streams still return the tokens so far. An unknown or finished id is a no-op."""
        self.require_own_process()
        self.client.abort(self.streams.sequence_ids_of(as_request_ids(request_ids)))

    def take(self, stream: Stream) -> RequestOutput | None:
        """Take a request's new output, if any. Raises its error, and `LifecycleError` in a forked child."""
        self.require_own_process()
        return self.streams.take(stream)

    def close(self, stream: Stream) -> None:
        """Forget a stream that is not read any more; unfinished it is aborted, without a result.

        No-op in a forked child.
        """
        if self._process.is_current:
            self.streams.close(stream)

    def get_sequence_ids(self, request_id: str) -> list[int]:
        """Sequence ids of a request's samples, as the core's log and `get_block_tables` show them; [] after its end.

        The core gives sequences numbers of its own, which are never used again.
        """
        self.require_own_process()
        return self.streams.sequence_ids_of([request_id])

    update_weights = update_weights
    save_drafts = save_drafts
    load_drafts = load_drafts

    def num_open(self) -> int:
        """Requests whose finished output has not been taken."""
        self.require_own_process()
        return len(self.streams)

    def get_metrics(self, *, timeout: float | None = None) -> EngineMetrics:
        """Counters and gauges of the core, timings of this client's requests; from any thread.

        `timeout` as for verbs: `CallTimeoutError` after so long. Of a fleet, a replica that does not answer in
        that time, or a few seconds, is shown with its last report.
        """
        return _metrics_of(self.client, self.streams)(timeout)

    def do_log_stats(self, *, timeout: float | None = None) -> None:
        """Show the metrics to every stat logger now. `timeout` as in `get_metrics`."""
        self.client.require_usable()
        self._stat_thread.write(timeout)

    @property
    def codec(self) -> TextCodec | None:
        """The tokenizer; None with `skip_tokenizer_init`."""
        return self.inputs.codec

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer. Raises `LifecycleError` with `skip_tokenizer_init=True`."""
        if self.inputs.codec is None:
            raise LifecycleError("get_tokenizer: there is none, the engine was made with skip_tokenizer_init=True.")
        return self.inputs.codec.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling settings that the checkpoint's generation_config.json recommends; never applied automatically."""
        return self.inputs.default_params()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The kinds of requests that the model serves: "generate", and those of `PoolingParams(kind=...)`."""
        info = self.client.info
        return tuple(supported_tasks(info.generates, info.pooling))

    def is_tracing_enabled(self) -> bool:
        """Whether spans of requests and verbs are recorded (`EngineConfig.otlp_traces_endpoint`)."""
        return self.spans.is_enabled

    def ensure_loras(self, lora: LoRALike | Sequence[LoRALike | None] | None, timeout: float | None = None) -> None:
        """Load the adapters of a call, if the engine does not have these revisions. Blocks.

        Raises as `add_lora`.
        """
        verb = VERBS["ensure_lora"]
        given = lora if isinstance(lora, list | tuple) else [lora]
        for request in {id(each): each for each in given if isinstance(each, LoRARequest) and each.has_values}.values():
            arguments = verb.bind((request,), {"timeout": timeout})
            self.client.call(verb.name, arguments).wait(verb, arguments)

    def require_own_process(self) -> None:
        """Raise `LifecycleError` in a forked child: another thread may have held a lock that is a copy here."""
        if not self._process.is_current:
            raise LifecycleError(self._process.error_message("The engine"))

    def require_running(self, verb: str, seconds: float | None = None) -> None:
        """Raise, naming `verb`, unless a request that is added now is computed without another call.

        An engine that does not answer within `seconds` is taken to run.
        """
        self.client.require_usable()
        answer = self.client.call("require_running", {"verb": verb})
        with suppress(TimeoutError):
            answer.result(seconds)
        answer.cancel()

    def span(self, verb: Verb, arguments: Arguments) -> AbstractContextManager[object]:
        """The tracing span around a call of a verb, if the verb has one."""
        if not verb.span:
            return nullcontext()
        return self.spans.during(verb.span, **{name: arguments[name] for name in verb.span_arguments})

    def _queue(
        self,
        checked: CheckedPrompt,
        request_id: str | None,
        wake: Wake,
        priority: int,
        route: Route,
        trace_headers: Mapping[str, str] | None = None,
        num_kept: int | None = None,
        seed: int | None = None,
        begun: Sequence[CompletionOutput] = (),
    ) -> Stream:
        name = self._ids.make() if request_id is None else self._ids.check_id(request_id)
        request = self.inputs.admit(checked, priority=priority, seed=seed)
        # Registered before the core receives it.
        stream = self.streams.add(name, request, checked.text, wake, trace_headers, num_kept)
        try:
            for part in self._restore(stream, request, begun) if begun else [request]:
                self.client.add_request(part, route)
        except BaseException as error:
            stream.error = error if isinstance(error, RolloutEngineError) else None
            if begun:
                self.client.abort(list(stream.request.sequence_ids))
            self.streams.close(stream)
            raise
        self._stat_thread.begin()
        return stream

    def _restore(
        self, stream: Stream, request: EngineCoreRequest, begun: Sequence[CompletionOutput]
    ) -> list[EngineCoreRequest]:
        """Give a new request the tokens that it had. Returns the requests for the rest of each sample."""
        live = self.streams.restore(stream, begun)
        ends = {id: end_of_tokens(request, id, tokens) for id, tokens in live.items()}
        if any(ends.values()):
            self.streams.deliver(
                EngineCoreOutputs(self.client.policy_version, ended=[end for end in ends.values() if end])
            )
        return [make_continuation(request, id, tokens) for id, tokens in live.items() if ends[id] is None]


def _metrics_of(client: EngineClient, streams: OpenStreams) -> MetricsReader:
    """Read the metrics without a reference to the front end, which ends when no reference is left."""

    def read(timeout: float | None = None) -> EngineMetrics:
        verb, arguments = VERBS["get_core_metrics"], {"timeout": timeout}
        if isinstance(client, FleetClient):
            core, replicas = client.metrics(verb.patience(arguments))
            return EngineMetrics(core=core, requests=streams.stats, replicas=replicas)
        core = client.call(verb.name, arguments).wait(verb, arguments)
        return EngineMetrics(core=core, requests=streams.stats)

    return read


def _close(
    process: OwnerProcess,
    stat_thread: StatThread,
    client: EngineClient,
    spans: Spans,
    close_inputs: Callable[[], object],
) -> None:
    if process.is_current:  # a forked child has none of their threads, and they are the parent's to end
        stat_thread.close()
        client.shutdown()
        spans.close()
        close_inputs()
