"""The engine's loop on one screen: schedule, execute, update."""

import logging
from collections import deque
from collections.abc import Iterable
from copy import deepcopy

from rollout_engine.core.block_tables import BlockTables
from rollout_engine.core.door import CoreConfig, check_request
from rollout_engine.core.executor import Executor
from rollout_engine.core.lifecycle import Lifecycle, PauseMode
from rollout_engine.core.request import Request, Sequence
from rollout_engine.core.requests import Requests
from rollout_engine.core.scheduler import Scheduler
from rollout_engine.core.step import Step
from rollout_engine.core.token_columns import fill_columns
from rollout_engine.errors import LifecycleError, RetryableError, WeightUpdateError
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest, ModelRunnerOutput, SequenceEnd
from rollout_engine.metrics import CoreMetrics, CoreStats
from rollout_engine.outputs import FinishReason

logger = logging.getLogger(__name__)


class EngineCore:
    """Requests in, tokens out. Every sequence ends in exactly one output with a `finish_reason`."""

    def __init__(self, executor: Executor, config: CoreConfig, *, policy_version: int = 0) -> None:
        self._executor = executor
        self._config = config
        self._tables = BlockTables(
            config.num_blocks,
            config.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            policy_version=policy_version,
        )
        self._scheduler = Scheduler(
            self._tables,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_prefill_beside_decode=config.max_prefill_beside_decode,
            max_scored_tokens=config.max_scored_tokens,
        )
        self.lifecycle = Lifecycle()
        """Ask it what is allowed; change it only by the verbs below."""
        self._requests = Requests()
        self._clear_wanted = False
        self._steps: deque[Step] = deque()
        """In flight, oldest first."""
        self._untold: deque[EngineCoreOutputs] = deque()
        """What steps have brought, each to be told by itself."""
        self._ended: list[SequenceEnd] = []
        """Ends to be told after them."""

    @property
    def policy_version(self) -> int:
        """Version of the live weights."""
        return self._tables.policy_version

    @property
    def num_unfinished_requests(self) -> int:
        """Requests (not sequences) that have not ended."""
        return len(self._requests.by_id)

    @property
    def unfinished_sequences(self) -> list[int]:
        """Ids of all sequences that have not ended, in order of arrival."""
        return [s.sequence_id for request in self._requests.by_id.values() for s in request.live_sequences]

    @property
    def stats(self) -> CoreStats:
        """Counters since start."""
        return self._scheduler.stats

    @property
    def num_in_flight(self) -> int:
        """Unfinished requests without those that wait for resume or wake-up."""
        return self._requests.num_in_flight

    def num_draining(self, verb: str) -> int:
        """Requests in flight, which steps will finish. Raises `LifecycleError`, naming `verb`, when they are frozen."""
        self.lifecycle.require_alive(verb)
        if self.num_in_flight and not self.lifecycle.can_step:
            what = f"{self.num_in_flight} requests are frozen while the engine is {self.lifecycle.describe()}"
            raise LifecycleError(f"{verb}: {what}; let it run, or abort them.")
        return self.num_in_flight

    def metrics(self) -> CoreMetrics:
        """Counters and gauges of now."""
        return CoreMetrics(
            num_requests=len(self._requests.by_id),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + len(self._scheduler.parked),
            cache_usage=self._tables.usage,
            policy_version=self.policy_version,
            state=self.lifecycle.state,
            counters=deepcopy(self.stats),
        )

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything to give, now or once the engine runs again."""
        return bool(self._requests.by_id or self._ended or self._untold)

    def can_progress(self) -> bool:
        """Whether `step()` has anything to give now: a loop waits for the next call from outside when it has not."""
        told_next = self._ended or self._untold or self._steps
        return bool(told_next or (self.lifecycle.can_step and self.num_in_flight))

    def cache_usage(self) -> float:
        """Blocks referenced by live requests / all blocks."""
        return self._tables.usage

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request, or raise `RequestError`: out of bounds, too long for the KV pool, or with numbers in use.

        While paused, asleep or overwritten by an update it waits for the end of that; with admission="reject" it
        raises `RetryableError`. `DirtyWeightsError` where an update has left the weights incomplete, `LifecycleError`
        after the end.
        """
        self._check_admission()
        check_request(request, self._config)
        admits = self.lifecycle.admits
        made = self._requests.add(request, held=not admits)
        if admits:
            self._scheduler.add(made)

    def abort_sequences(self, sequence_ids: Iterable[int]) -> EngineCoreOutputs:
        """End sequences; the outputs say which. An unknown or finished id is a no-op."""
        for sequence_id in sorted(sequence_ids, reverse=True):  # a leader last, so that no sibling has to take over
            sequence = self._requests.live(sequence_id)
            if sequence is not None:
                self._end(sequence, "abort")
        self._settle_if_draining()
        return self._tell()

    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, update. Called while idle or paused it lets the runner forget what has ended.

        With async scheduling the next step is submitted before the result of this one is waited for.
        """
        window = 1 + self._config.async_scheduling - len(self._untold)
        while len(self._steps) < window and self._submit():
            pass
        if self._steps and not self._untold:
            self._collect()
        if not self.has_unfinished_requests():
            self.quiesce()
        self._settle_if_draining()
        return self._tell()

    def quiesce(self) -> None:
        """Wait for what is in flight; the next outputs tell what it brought. Whoever keeps steps out calls it first."""
        while self._steps:
            self._collect()

    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = False) -> EngineCoreOutputs:
        """Stop at this step boundary; returns the ends of what mode "abort" ended.

        With mode "wait" the pause is complete when `lifecycle.draining` is False again: keep stepping until then.
        `clear_cache` forgets every known prefix once it is; frozen requests then compute their KV again.
        """
        self.lifecycle.pause(mode, in_flight=self.num_in_flight > 0)
        self._clear_wanted |= clear_cache
        if mode == "abort":
            self._abort_in_flight()
        self._settle()
        return self._tell()

    def resume(self) -> None:
        """Lift the pause; frozen requests go on and held ones join. A pause still draining is called off."""
        self.lifecycle.resume()
        self._clear_wanted = False
        self._admit_held()

    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> EngineCoreOutputs:
        """Release the memory of KV and weights, these with level 2 for good; `mode` and result as in `pause`.

        With mode "wait" the engine falls asleep when nothing is in flight any more. Requests kept over a sleep compute
        their KV again afterwards.
        """
        self.lifecycle.sleep(level, mode, in_flight=self.num_in_flight > 0)
        if mode == "abort":
            self._abort_in_flight()
        self._settle()
        return self._tell()

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory back: "weights", "kv_cache", or all. Weights forgotten by level 2 then wait for an update.

        Where there is no room for the weights, the executor's error is raised and everything sleeps on.
        """
        level = self.lifecycle.level
        woken = self.lifecycle.wake_up(tags)
        if "weights" in woken and not self.lifecycle.dirty:
            try:
                self._executor.restore_weights()
            except BaseException:
                self.lifecycle.sleep_on(woken, level)
                raise
        self._admit_held()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget every known prefix; whether that was done.

        While requests in flight hold blocks it is not, and nothing changes, unless `reset_running_requests`: then they
        compute their KV again. Either way no block from before can match afterwards.
        """
        self.lifecycle.require_alive("reset_prefix_cache")
        self.quiesce()
        if reset_running_requests:
            self._scheduler.recompute_all()
        elif self._tables.usage:
            return False
        self._tables.clear_cache()
        return True

    def begin_update(self, verb: str = "update_weights") -> None:
        """An update is under way, which `verb` asked for; steps go on until `commit_version`."""
        self.lifecycle.begin_update(verb)

    def close_for_update(self, mode: PauseMode) -> EngineCoreOutputs:
        """What is in flight ends now ("abort"; returns those ends), or is to finish ("wait"), and nothing new joins it
        until `end_update`."""
        self.lifecycle.close_for_update(mode, in_flight=self.num_in_flight > 0)
        if mode == "abort":
            self._abort_in_flight()
            self._settle_if_draining()
        return self._tell()

    def end_update(self, *, dirty: bool | None) -> None:
        """It has ended. `dirty`: False when complete, True when it left a mixture, None when weights are as before."""
        self.lifecycle.end_update(dirty=dirty)
        self._admit_held()

    def shutdown(self) -> None:
        """No verb works any more."""
        self.lifecycle.die()

    def commit_version(self, version: int, kv: str = "keep") -> int:
        """The weights are now `version`'s. Called between steps; returns the number of live requests.

        kv="keep": sequences go on over the KV they have. kv="recompute": they compute it again under the new weights;
        always so when `version` does not grow, since old KV could not be told from new by its version any more.
        """
        if kv not in ("keep", "recompute"):
            raise WeightUpdateError(f"kv={kv!r} is not allowed: must be 'keep' or 'recompute'.")
        self.quiesce()
        grows = version > self._tables.policy_version
        if not grows:
            self._tables.clear_cache()
        if kv == "recompute" or not grows:
            self._scheduler.recompute_all()
        self._tables.policy_version = version
        return len(self._requests.by_id)

    def check_integrity(self) -> None:
        """Recount everything from scratch; AssertionError says what is off."""
        self._scheduler.check_integrity()
        self._requests.check_integrity(may_hold=not self.lifecycle.admits, num_queued=self._scheduler.num_queued)
        ends_to_tell = self._untold or self._ended  # a pause that waited for them is complete once they are told
        assert self.num_in_flight or ends_to_tell or not self.lifecycle.draining, "nothing drains"
        num_results = len(self._steps) + len(self._untold)
        assert num_results <= self._config.async_scheduling, f"{num_results} results wait to be told"

    def _submit(self) -> bool:
        """Begin the next step, if there is one."""
        num_in_flight = len(self._steps)
        if self.lifecycle.can_step:
            step = self._scheduler.schedule(num_in_flight)
        else:
            self.lifecycle.require_alive("step")
            step = self._scheduler.farewell(num_in_flight)
        work = step.work
        if not work.scheduled and (num_in_flight and self._requests.by_id or not work.finished):
            self._scheduler.unsend(work)
            return False
        self._steps.append(step)
        step.submit(self._executor)
        return True

    def _collect(self) -> None:
        """Wait for the oldest step, and take in what it brought."""
        step = self._steps.popleft()
        outputs = EngineCoreOutputs(step.work.policy_version, num_cached_tokens=step.num_cached_tokens)
        try:
            result = step.result()
        except BaseException as error:
            self._fail(step, error)
            if not isinstance(error, Exception):  # interrupted from outside: the next outputs tell what ended
                self._settle_if_draining()
                raise
        else:
            self._update(step, result, outputs)
        if outputs.sequences or outputs.num_cached_tokens or outputs.prompt_logprobs:
            self._untold.append(outputs)

    def _check_admission(self) -> None:
        self.lifecycle.require_alive("add_request")
        self.lifecycle.require_clean("add_request")
        if self._config.admission == "reject" and not self.lifecycle.admits:
            state = self.lifecycle.describe()
            raise RetryableError(f"The engine is {state} and takes no requests (admission='reject'); try again later.")

    def _admit_held(self) -> None:
        if self.lifecycle.admits:
            for request in self._requests.take_held():
                self._scheduler.add(request)

    def _abort_in_flight(self) -> None:
        for request in self._requests.in_flight:
            self._end_all(request, "abort")

    def _settle_if_draining(self) -> None:
        if self.lifecycle.draining and not self.num_in_flight:
            self._settle()

    def _settle(self) -> None:
        """Complete a pause or sleep, unless something is in flight that it waits for."""
        if self.lifecycle.draining and self.num_in_flight:
            return
        self.quiesce()
        level = self.lifecycle.drained()
        if level or self._clear_wanted:
            self.reset_prefix_cache(reset_running_requests=True)
            self._clear_wanted = False
        if level:
            self._executor.release_kv()
            self._executor.release_weights(forget=level == 2)

    def _update(self, step: Step, result: ModelRunnerOutput, outputs: EngineCoreOutputs) -> None:
        self.stats.num_steps += 1
        self._scheduler.confirm(step)
        fill_columns(outputs, step.drawn, result)
        for index, logprobs in result.prompt_logprobs.items():
            request = step.rows[index].request
            if request.num_live:
                outputs.prompt_logprobs[request.source.first_sequence] = logprobs
        self.stats.num_tokens_sampled += len(outputs.sequences)
        for index, message in result.errors.items():
            if not step.drawn[index].ended:
                self._end(step.drawn[index], "error", message)
        for sequence, token_id in zip(step.drawn, result.token_ids, strict=True):
            if not sequence.ended and sequence.append(token_id):
                self._ended.append(SequenceEnd(sequence.sequence_id, *sequence.finish()))
                self._retire(sequence)

    def _tell(self) -> EngineCoreOutputs:
        outputs = self._untold.popleft() if self._untold else EngineCoreOutputs(self.policy_version)
        if not self._untold:
            outputs.ended, self._ended = self._ended, []
        return outputs

    def _fail(self, step: Step, error: BaseException) -> None:
        """The executor raised: what it was working on ends, everything else goes on."""
        self.stats.num_steps += 1
        self.stats.num_failed_steps += 1
        message = f"step {step.work.step} failed: {type(error).__name__}: {error}"
        logger.warning("%s\n%s", message, step.dump(), exc_info=error)
        forked_since = [request for later in self._steps for request in later.forked]
        for sequence in step.sequences:
            request = sequence.request
            if not sequence.ended and (not request.forked or request in forked_since):  # it computes the prompt for all
                self._end_all(request, "error", message)
            elif not sequence.ended:
                self._end(sequence, "error", message)
        while self._steps:
            self._scheduler.withdraw(self._steps.pop())
        self._scheduler.unsend(step.work)

    def _end_all(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """The leader ends last, so that no sibling has to take over."""
        for sequence in reversed(request.live_sequences):
            self._end(sequence, reason, error)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence that got no token."""
        if reason == "error":
            self._tables.distrust(sequence)
        self._ended.append(SequenceEnd(sequence.sequence_id, reason, error=error))
        self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        self._scheduler.end(sequence)
        request = sequence.request
        if request.num_live == 0:
            self._requests.remove(request)
