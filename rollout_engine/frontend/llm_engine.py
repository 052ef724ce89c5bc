"""The engine in the caller's process: add requests, step, collect results."""

import gc
import logging
import time
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from types import TracebackType

import numpy as np
from transformers import PreTrainedTokenizerBase

from rollout_engine.config import EngineConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.errors import LifecycleError, RequestError, WeightUpdateError
from rollout_engine.execution.executor import InlineExecutor
from rollout_engine.execution.weight_update import update_from_source
from rollout_engine.frontend.engine_lock import EngineLock
from rollout_engine.frontend.input_processor import CheckedPrompt, InputProcessor, at_index, each_priority
from rollout_engine.frontend.interrupts import allowed
from rollout_engine.frontend.lifecycle_control import LifecycleControl, UpdateSteps
from rollout_engine.frontend.lifecycle_verbs import LifecycleVerbs
from rollout_engine.frontend.output_processor import OutputProcessor
from rollout_engine.frontend.prompts import Prompt
from rollout_engine.frontend.request_ids import RequestIds, as_request_ids
from rollout_engine.frontend.scoring import score_pairs
from rollout_engine.frontend.spans import Spans, TraceHeaders, spans_to
from rollout_engine.frontend.start_up import core_config, describe_choices, release
from rollout_engine.frontend.stat_loggers import StatLog, all_loggers
from rollout_engine.frontend.tokenizer import TextCodec
from rollout_engine.frontend.weight_verbs import WeightVerbs
from rollout_engine.frontend.worker_calls import WorkerCalls, WorkerVerbs
from rollout_engine.messages import EngineCoreOutputs, UpdateOptions
from rollout_engine.metrics import CoreStats, EngineMetrics, RequestStats, StatLogger
from rollout_engine.outputs import RequestOutput, UpdateReport
from rollout_engine.sampling_params import SamplingLike, SamplingParams
from sync.base import WeightSource
from sync.own_process import OwnProcess

logger = logging.getLogger("rollout_engine")


class LLMEngine(LifecycleVerbs, WeightVerbs, WorkerVerbs):
    """Synchronous stepping: every request added ends in exactly one finished `RequestOutput` of some `step()`.

    >>> engine = LLMEngine.from_config(EngineConfig(model="path/or/hub-id"))
    >>> engine.add_request("a", "Once upon a time", SamplingParams(max_tokens=16))
    >>> while engine.has_unfinished_requests():
    ...     for output in engine.step():
    ...         print(output.outputs[0].text)

    Any thread may call any method; a call waits for the step in progress.
    """

    def __init__(
        self,
        core: EngineCore,
        executor: InlineExecutor,
        input_processor: InputProcessor,
        output_processor: OutputProcessor,
        *,
        stat_loggers: Sequence[StatLogger] = (),
        log_interval: float = 10.0,
        spans: Spans | None = None,
    ) -> None:
        self._core = core
        self._executor = executor
        self._inputs = input_processor
        self._outputs = output_processor
        self._log = StatLog(stat_loggers, self.get_metrics, log_interval)
        self._spans = spans or Spans()
        self._lock, self._is_torn = EngineLock(self._tear), False
        self._control = LifecycleControl(
            core, self._lock, step=self._step_for_others, deliver=self._deliver, spans=self._spans
        )
        self._calls = WorkerCalls(core, executor, self._control, self._lock, self._spans)
        self._ready: list[RequestOutput] = []
        """Results of aborts and results handed back, for the next step to return."""
        self._ids = RequestIds(self.is_unfinished)
        self.fp32_head = False
        """Whether logits are float32 whatever the model's dtype."""
        self._release = weakref.finalize(self, release, executor, OwnProcess())

    @classmethod
    def from_config(cls, config: EngineConfig, *, stat_loggers: Sequence[StatLogger] = ()) -> "LLMEngine":
        """Load model and tokenizer. Raises `ConfigError` when they cannot be served.

        `stat_loggers` are shown the engine's metrics, beside the log line and those that packages have registered.
        """
        loggers = all_loggers(stat_loggers, log_line=config.log_stats)
        spans = spans_to(config.otlp_traces_endpoint)
        executor = InlineExecutor.from_config(config)
        info = executor.info
        codec = TextCodec.from_config(config)
        inputs = InputProcessor.from_config(config, codec, info)
        core = EngineCore(executor, core_config(config, info))
        outputs = OutputProcessor(codec, stream_interval=config.stream_interval, on_closed=spans.request)
        engine = cls(
            core, executor, inputs, outputs, stat_loggers=loggers, log_interval=config.log_interval, spans=spans
        )
        engine.fp32_head = config.fp32_head
        executor.follow(core, engine.lifecycle_control.boundary)
        gc.collect()
        gc.freeze()  # what start-up made stays; the collector need not walk it between steps
        logger.info("%s", describe_choices(config, info))
        return engine

    @property
    def lifecycle_control(self) -> LifecycleControl:
        return self._control

    @property
    def worker_calls(self) -> WorkerCalls:
        return self._calls

    @property
    def policy_version(self) -> int:
        """Version of the live weights."""
        return self._core.policy_version

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingLike | None = None,
        *,
        priority: int = 0,
        trace_headers: TraceHeaders | None = None,
    ) -> str:
        """Queue one request and return its id. Lower `priority` runs first. Raises `RequestError`, nothing queued.

        `trace_headers` (W3C `traceparent`) make its span, if there is one, part of the caller's trace.
        """
        queued: list[str] = []
        try:
            with self._lock:
                self._require_open()
                self._ids.check(request_id)
                self._spans.check_headers(trace_headers)
                checked = self._inputs.check(prompt, params)
                queued.append(request_id)
                self._queue(request_id, checked, priority, trace_headers)
            return request_id
        except BaseException:
            self._take_back(queued)
            raise

    def add_requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingLike | Sequence[SamplingLike] | None = None,
        *,
        priority: int | Sequence[int] = 0,
    ) -> list[str]:
        """Queue one prompt or a list of them, under new ids, which are returned in order.

        `params`, `priority`: one for all or one each. All are checked before any is queued: `RequestError` names the
        index.
        """
        queued: list[str] = []
        try:
            with self._lock:
                self._require_open()
                with allowed():  # reading many prompts takes its time
                    checked = self._inputs.check_batch(prompts, params)
                    priorities = each_priority(priority, len(checked))
                for index, each in enumerate(checked):
                    queued.append(self._ids.make())
                    try:
                        self._queue(queued[-1], each, priorities[index])
                    except RequestError as error:  # the core's own door
                        raise at_index("prompts", index, error) from error
            return queued
        except BaseException:
            self._take_back(queued)
            raise

    def step(self) -> list[RequestOutput]:
        """Compute one step. Returns what it brought, by `output_kind`, and the results of aborts since the last.

        While paused or asleep it computes nothing. Raises `DirtyWeightsError` when requests cannot go on before a
        complete weight update. Whatever is raised, by an interrupt too, the next `step()` returns what this one had.
        """
        self._lock.require_usable()
        self._control.give_way()
        ready: list[RequestOutput] = []
        try:
            with self._lock:
                self._require_open()
                if not self._ready:
                    self._control.require_step()
                self._deliver(self._timed_step())
                self._log.tick(idle=self._outputs.num_open == 0)
                ready, self._ready = self._ready, []
            return ready
        except BaseException:
            self._keep(ready)
            raise

    def abort_request(self, request_ids: str | Iterable[str], *, discard: bool = False) -> None:
        """End requests; the next `step()` returns what they had, with finish_reason "abort".

        `discard=True`: it returns nothing of them. An unknown or finished id is a no-op.
        """
        with self._lock:
            self._require_open()
            ids = as_request_ids(request_ids)
            self._deliver(self._core.abort_sequences(self._outputs.sequences_of(ids)))
            if discard:
                self._discard(set(ids))

    def wait_until_steppable(self, timeout: float) -> None:
        """While paused or asleep: return when that changes, or after `timeout` seconds. Call it without any lock."""
        if not self._ready:
            self._control.wait_until_steppable(timeout)

    def require_running(self, verb: str) -> None:
        """Raise `LifecycleError` or `DirtyWeightsError` where steps alone would not complete a request added now."""
        self._lock.require_usable()
        self._require_open()
        self._core.lifecycle.require_running(verb)

    def hand_back(self, outputs: Iterable[RequestOutput]) -> None:
        """Give back results of a step that somebody else waits for; the next `step()` returns them first."""
        self._keep(list(outputs))

    def is_unfinished(self, request_id: str) -> bool:
        """Whether the finished output of `request_id` is still to be returned."""
        return request_id in self._outputs or any(ready.request_id == request_id for ready in self._ready)

    def num_tokens(self, request_ids: Iterable[str]) -> int:
        """Tokens that these requests have so far; 0 for those whose finished output is there."""
        return self._outputs.num_tokens(request_ids)

    def get_sequence_ids(self, request_id: str) -> list[int]:
        """Sequence ids of a request's samples, as the core's log and `get_block_tables` show them; [] after its end.

        The core knows sequences by numbers of its own, which are never used again.
        """
        with self._lock:
            return self._outputs.sequences_of([request_id])

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything more to give."""
        return self._outputs.num_open > 0 or bool(self._ready)

    def get_num_unfinished_requests(self) -> int:
        """Requests whose finished output has not been returned."""
        return self._outputs.num_open + sum(result.finished for result in self._ready)

    def get_metrics(self) -> EngineMetrics:
        """Counters, gauges and timings of now; from any thread."""
        return EngineMetrics(core=self._core.metrics(), requests=self._outputs.stats)

    def do_log_stats(self) -> None:
        """Show the metrics to every stat logger now."""
        self._log.write()

    def get_cache_usage(self) -> float:
        """KV blocks referenced by live requests / all blocks."""
        return self._core.cache_usage()

    @property
    def request_stats(self) -> RequestStats:
        """Timings of requests, as they are filled in."""
        return self._outputs.stats

    @property
    def stats(self) -> CoreStats:
        """Counters since start-up."""
        return self._core.stats

    @property
    def num_sequences_in_runner(self) -> int:
        """Sequences whose state the runner holds; those that have ended leave it with the next step."""
        return self._executor.num_sequences

    def check_integrity(self) -> None:
        """Recount requests, blocks and references from scratch; AssertionError says what is off."""
        with self._lock:
            self._core.check_integrity()

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """The Hugging Face tokenizer. Raises `LifecycleError` with `skip_tokenizer_init=True`."""
        if self._inputs.codec is None:
            raise LifecycleError("get_tokenizer: there is none, the engine was made with skip_tokenizer_init=True.")
        return self._inputs.codec.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """Sampling settings that the checkpoint's generation_config.json recommends; nothing applies them by itself."""
        return self._inputs.default_params()

    def get_model_metadata(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name -> (dtype, shape) of every weight."""
        with self._lock:
            self._require_open()
            return self._executor.metadata()

    def apply_update(self, source: WeightSource, version: int | None, options: UpdateOptions) -> UpdateReport:
        """See `update_weights`."""
        self._require_open()
        if options.transport not in (None, "inproc"):
            what = f"transport='{options.transport}' leads to another process"
            raise WeightUpdateError(f"update_weights: {what}; an engine in this one takes weights by 'inproc'.")
        with self._control.updating(lambda: self._executor.updater.dirty):
            steps = UpdateSteps(self._core, self._control, options.kv)
            update = partial(update_from_source, self._executor.updater, source, steps, options, version)
            return self._spans.update(partial(self._core.stats.updates.count, update))

    def score(
        self,
        prompt_token_ids: Sequence[list[int]],
        completion_token_ids: Sequence[list[int]],
        *,
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Log-probs of given completions under the live weights, per sequence float32 [len(completion)].

        They are what sampling those tokens at `temperature` would have returned ("tempered"). Raises `RequestError`.
        """
        pairs = self._inputs.check_scored(prompt_token_ids, completion_token_ids, temperature)
        with self._lock:
            self._core.lifecycle.require_weights("score")
            with allowed():
                return score_pairs(self._executor, pairs, temperature)

    def shutdown(self) -> None:
        """Free model and KV pool; open requests are dropped. Calling it again is a no-op."""
        if not self._lock.is_usable:  # a forked child has nothing to free
            return
        if self._release.alive:
            self._log.close()
            self._spans.close()
        with self._lock:
            self._control.shutdown()
            self._release()

    def __enter__(self) -> "LLMEngine":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _timed_step(self) -> EngineCoreOutputs:
        start = time.monotonic()
        outputs = self._core.step()
        outputs.start_time = start
        return outputs

    def _step_for_others(self) -> None:
        self.hand_back(self.step())

    def _deliver(self, outputs: EngineCoreOutputs) -> None:
        """Keep results for the next `step` to return; what a stop string has ended ends in the core as well."""
        results, stopped = self._outputs.process(outputs)
        self._ready += results
        if stopped:
            self._deliver(self._core.abort_sequences(stopped))

    def _keep(self, results: list[RequestOutput]) -> None:
        """The next `step` returns these first."""
        if results:
            with self._lock:
                self._ready = results + self._ready

    def _take_back(self, request_ids: list[str]) -> None:
        """Undo `_queue`, as far as it came."""
        if request_ids:
            self.abort_request(request_ids, discard=True)

    def _queue(
        self, request_id: str, checked: CheckedPrompt, priority: int, trace_headers: TraceHeaders | None = None
    ) -> None:
        request = self._inputs.admit(checked, priority=priority)
        self._outputs.add(request_id, request, checked.text, trace_headers)  # a tokenizer may raise: before the core
        self._core.add_request(request)
        self._log.begin()

    def _discard(self, request_ids: set[str]) -> None:
        for request_id in request_ids:
            self._outputs.discard(request_id)
        self._ready = [result for result in self._ready if result.request_id not in request_ids]

    def _require_open(self) -> None:
        if self._is_torn:
            what = "The engine was interrupted twice in the middle of a step, which may be half done"
            raise LifecycleError(f"{what}: shut it down and make a new one.")
        if not self._release.alive:
            raise LifecycleError("The engine is shut down; make a new one.")

    def _tear(self) -> None:
        self._is_torn = True
        self._core.shutdown()
