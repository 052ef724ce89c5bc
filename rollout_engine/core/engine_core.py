"""The engine's loop on one screen: schedule, execute, update."""

from collections import deque
from collections.abc import Callable, Collection

from rollout_engine.base.errors import LifecycleError, RetryableError, WeightUpdateError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest
from rollout_engine.base.metrics import CoreMetrics, CoreStats
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.base.version_pin import check_standing
from rollout_engine.core.adapters import Adapter, AdapterTable
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.draft_index import DraftIndex
from rollout_engine.core.executor import Executor
from rollout_engine.core.gauges import read_metrics
from rollout_engine.core.lifecycle import Lifecycle, PauseMode
from rollout_engine.core.model_drafts import ModelDrafts
from rollout_engine.core.recorder import Recorder, recorded_entry, recorded_step
from rollout_engine.core.request import Request
from rollout_engine.core.request_checks import check_request
from rollout_engine.core.request_table import PATIENCE, Preparation, RequestTable
from rollout_engine.core.result_processor import ResultProcessor
from rollout_engine.core.scheduler import Scheduler
from rollout_engine.core.speculation import speculator_of
from rollout_engine.core.step import Step
from rollout_engine.core.tier import Tier
from rollout_engine.core.tiered_tables import TieredTables


class EngineCore:
    """Requests in, tokens out. Every sequence ends in exactly one output with a `finish_reason`."""

    def __init__(
        self,
        executor: Executor,
        config: CoreConfig,
        *,
        policy_version: int = 0,
        prepare: Callable[[SamplingParams], Preparation | None] = lambda params: None,
        tier: Tier | None = None,
    ) -> None:
        """`prepare` begins work that a request needs before its first step, during steps; None if there is none.
        `tier`: KV outside of the pool."""
        self._executor, self._prepare = executor, prepare
        self.config = config
        self._tables = TieredTables(config, policy_version, tier)
        self._scheduler = Scheduler(self._tables, config, speculator_of(config, self._tables, executor))
        self._requests = RequestTable(config.pictures)
        self.adapters = AdapterTable(config.max_loras)
        """Adapters that requests may name. A change here has to be made in the model runner too."""
        self._results = ResultProcessor(self._scheduler, self._requests)
        self._steps: deque[Step] = deque()
        """Steps in flight, oldest first."""
        self.lifecycle = Lifecycle()
        """The state, and the calls that it allows. Change it only by the methods of the core."""
        self._clear_cache_when_paused = False
        self.recorders: list[Recorder] = []

    @recorded_step
    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, update. Returns the outputs of the oldest step that have not been returned yet.

        As many as `config.num_ahead` more are submitted before the result of the oldest one is waited for. While
        nothing may be computed, an empty step releases finished sequences in the runner.
        """
        if self._requests.num_preparing:
            is_idle = not (self._steps or self._scheduler.num_queued or self._results.has_pending)
            for request in self._requests.take_prepared(PATIENCE if is_idle else 0.0):
                self._results.begin(request)
        num_ahead = self.config.num_ahead - len(self._results.pending_outputs)
        while len(self._steps) <= num_ahead and (step := self._schedule()):
            self._steps.append(step)
            step.submit(self._executor, self.recorders)
        if self._steps and not self._results.pending_outputs:  # outputs that `quiesce` collected are returned first
            self._update(self._steps.popleft())
        if not self.has_unfinished_requests():
            self._wait_for_steps()
        self._save_when_idle()
        self._finish_draining()
        return self._results.pop_outputs()

    def _schedule(self) -> Step | None:
        """Schedule the next step. None when there is nothing to submit, or its content is not known yet."""
        num_in_flight = len(self._steps)
        if num_in_flight and self._steps[-1].has_drafts:
            return None
        if self.lifecycle.can_step:
            step = self._scheduler.schedule(num_in_flight)
        else:
            self.lifecycle.require_alive("step")
            step = self._scheduler.empty_step(num_in_flight)
        can_wait = num_in_flight and self.num_unfinished_requests  # finished sequences go with a later step
        if step.work.scheduled or (step.work.finished_sequence_ids and not can_wait):
            return step
        self._scheduler.take_back(step.work)
        return None

    def _update(self, step: Step) -> None:
        """Wait for the result of a step and apply it. If the step failed, its sequences end and all others continue."""
        outputs = EngineCoreOutputs(step.work.policy_version, num_cached_tokens=step.num_cached_tokens)
        try:
            result = step.result()
        except BaseException as error:
            self._results.fail(step, error, self._steps)
            if not isinstance(error, Exception):  # interrupted from outside: the next outputs hold the ends
                self._finish_draining()
                raise
            self._results.append(outputs)
        else:
            self._results.update_from_output(step, result, outputs)

    @recorded_entry
    def quiesce(self) -> None:
        """Wait for the steps in flight; the next calls return their outputs. Call it before you block stepping."""
        self._wait_for_steps()

    def _wait_for_steps(self) -> None:
        while self._steps:
            self._update(self._steps.popleft())

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request, or raise `RequestError`: out of bounds, too long for the KV pool, or with ids in use.

        One for a later policy version waits, and is not in flight; one for a past version is refused (`version_pin`).
        While the engine is paused, asleep or overwritten, it waits; with admission="reject" `RetryableError` is raised.
        `DirtyWeightsError` if an update has left the weights incomplete, `LifecycleError` after shutdown.
        """
        self.lifecycle.require_alive("add_request")
        self.lifecycle.require_clean("add_request")
        admits = self.lifecycle.admits
        if self.config.admission == "reject" and not admits:
            state = self.lifecycle.describe()
            raise RetryableError(f"The engine is {state} and takes no requests (admission='reject'); try again later.")
        check_request(request, self.config)
        standing = check_standing(request.params, self.policy_version, has_tokens=bool(request.output_token_ids))
        adapter = self.adapters.use(request.lora) if request.lora else None
        is_held = standing == "early" or not admits
        added = self._requests.add(request, adapter, held=is_held)
        if standing == "over":
            self._results.end_out_of_range([added], self.policy_version)
        elif not is_held:
            self._queue(added)
        for recorder in self.recorders:
            recorder.record_request(request)

    @recorded_entry
    def abort_sequences(self, sequence_ids: Collection[int]) -> EngineCoreOutputs:
        """End sequences; the outputs name them. An unknown or finished id is a no-op."""
        known = self._requests.filter_known(sequence_ids)
        for sequence_id in sorted(known, reverse=True):  # a leader last, so that no sibling has to take over
            sequence = self._requests.live(sequence_id)
            if sequence is not None:
                self._results.end(sequence, "abort")
        self._save_when_idle()
        self._finish_draining()
        return self._results.pop_outputs()

    @recorded_entry
    def pause(self, mode: PauseMode = "abort", *, clear_cache: bool = False) -> EngineCoreOutputs:
        """Stop at this step boundary; return the ends of sequences that mode "abort" ended.

        With mode "wait" the pause is complete when `lifecycle.draining` is False again: keep stepping until then.
        With `clear_cache` it then forgets every known prefix, and frozen requests compute their KV again.
        """
        self.lifecycle.pause(mode, in_flight=self.num_in_flight > 0)
        self._clear_cache_when_paused |= clear_cache
        return self._stop(mode)

    @recorded_entry
    def resume(self) -> None:
        """Lift the pause: frozen requests continue and held ones join. A pause that is still draining is cancelled."""
        self.lifecycle.resume()
        self._clear_cache_when_paused = False
        self._admit_held()

    @recorded_entry
    def sleep(self, level: int = 1, mode: PauseMode = "abort") -> EngineCoreOutputs:
        """Release the memory of KV and weights (2: forget these; 0: release none); `mode` and result as in `pause`.

        With mode "wait" the engine falls asleep once no request is in flight. Requests kept over a sleep compute their
        KV again afterwards, unless it kept all memory.
        """
        self.lifecycle.sleep(level, mode, in_flight=self.num_in_flight > 0)
        return self._stop(mode)

    @recorded_entry
    def wake_up(self, tags: Collection[str] | None = None) -> None:
        """Take memory back: "weights", "kv_cache", or all; "scheduling" ends level 0. Level 2 waits for an update.

        If there is no room for the weights, the executor's error is raised and everything stays asleep.
        """
        level = self.lifecycle.level
        woken = self.lifecycle.wake_up(tags)
        if "weights" in woken and not self.lifecycle.dirty:
            try:
                self._executor.restore_weights()
            except BaseException:
                self.lifecycle.undo_wake_up(woken, level)
                raise
        self._admit_held()

    @recorded_entry
    def reset_prefix_cache(self, *, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Forget every known prefix; return whether that was done.

        While requests in flight hold blocks nothing is done, unless `reset_running_requests`: then they compute their
        KV again. Once done, no block from before can match, unless the tier has it: `reset_connector` forgets those.
        """
        self.lifecycle.require_alive("reset_prefix_cache")
        self._wait_for_steps()
        if reset_running_requests:
            self._scheduler.recompute_all()
        elif self._tables.usage:
            return False
        self._tables.clear_cache(with_tier=reset_connector)
        return True

    @recorded_entry
    def begin_update(self, verb: str = "update_weights") -> None:
        """Begin a weight update. Steps continue until `commit_version`. Errors name `verb`, the caller's method."""
        self.lifecycle.begin_update(verb)

    @recorded_entry
    def close_for_update(self, mode: PauseMode) -> EngineCoreOutputs:
        """Admit no request until `end_update`. Requests in flight end now ("abort"; returns the ends) or continue."""
        self.lifecycle.close_for_update(mode, in_flight=self.num_in_flight > 0)
        if mode == "abort":
            self._results.abort(self._requests.in_flight)
            self._finish_draining()
        return self._results.pop_outputs()

    @recorded_entry
    def commit_version(self, version: int, kv: str = "keep") -> int:
        """The weights are now `version`'s. Called between steps; returns the number of live requests.

        kv="keep": sequences continue on the KV they have. kv="recompute": they compute it again under the new weights;
        always so if `version` does not grow: it would not distinguish old KV. Requests for other versions end.
        """
        if kv not in ("keep", "recompute"):
            raise WeightUpdateError(f"kv={kv!r} is not allowed: must be 'keep' or 'recompute'.")
        self._wait_for_steps()
        self._results.end_out_of_range(self._requests.ending_at(version), version)
        grows = version > self._tables.policy_version
        if not grows:
            self._tables.clear_cache()
        if kv == "recompute" or not grows:
            self._scheduler.recompute_all()
        self._tables.start_version(version)
        self._admit_held()
        return self.num_unfinished_requests

    @recorded_entry
    def commit_draft(self) -> int:
        """The draft model has other weights now: learn anew how often it is right. Returns the number of requests."""
        if self.draft_model is not None:
            self.draft_model.reset()
        return self.num_unfinished_requests

    @recorded_entry
    def end_update(self, *, dirty: bool | None) -> None:
        """End the update. `dirty`: False if it is complete, True if it left a mixture, None if it changed nothing."""
        self.lifecycle.end_update(dirty=dirty)
        self._admit_held()

    @recorded_entry
    def shutdown(self) -> None:
        """Refuse every method from now on."""
        self.lifecycle.shut_down()

    @property
    def policy_version(self) -> int:
        """Version of the live weights."""
        return self._tables.policy_version

    @property
    def num_unfinished_requests(self) -> int:
        """Requests (not sequences) that have not ended."""
        return len(self._requests.by_id)

    @property
    def unfinished_requests(self) -> list[Request]:
        """Requests that have not ended, in order of arrival."""
        return list(self._requests.by_id.values())

    @property
    def unfinished_sequences(self) -> list[int]:
        """Ids of all sequences that have not ended, in order of arrival."""
        return [s.sequence_id for request in self._requests.by_id.values() for s in request.live_sequences]

    def num_using(self, adapter: Adapter) -> int:
        """Unfinished requests that run under an adapter."""
        return self._requests.num_using(adapter)

    @property
    def num_in_flight(self) -> int:
        """Unfinished requests, without those held until resume, wake-up or the end of an update."""
        return self._requests.num_in_flight

    @property
    def stats(self) -> CoreStats:
        """Counters since start."""
        return self._scheduler.stats

    @property
    def draft_index(self) -> DraftIndex | None:
        """The finished samples that tokens are drafted from; None if no token is drafted."""
        speculator = self._scheduler.speculator
        return None if speculator is None else speculator.index

    @property
    def draft_model(self) -> ModelDrafts | None:
        """Drafts of a small model; None if there is none."""
        speculator = self._scheduler.speculator
        return None if speculator is None else speculator.model

    def num_draining(self, verb: str) -> int:
        """Requests in flight, which steps will finish. Raises `LifecycleError`, naming `verb`, when they are frozen."""
        self.lifecycle.require_alive(verb)
        if self.num_in_flight and not self.lifecycle.can_step:
            what = f"{self.num_in_flight} requests are frozen while the engine is {self.lifecycle.describe()}"
            raise LifecycleError(f"{verb}: {what}; let it run, or abort them.")
        return self.num_in_flight

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything to return, now or once the engine runs again."""
        return bool(self._requests.by_id or self._results.has_pending)

    def can_progress(self) -> bool:
        """Whether `step()` has anything to return now. If not, a loop should wait for the next call from outside."""
        return bool(self._steps or self._results.has_pending or (self.lifecycle.can_step and self.num_in_flight))

    def cache_usage(self) -> float:
        """Blocks referenced by live requests / all blocks."""
        return self._tables.usage

    def metrics(self) -> CoreMetrics:
        """Counters and gauges of now."""
        return read_metrics(self._scheduler, self._requests, self.lifecycle, self.config)

    def check_integrity(self) -> None:
        """Recount everything from scratch; AssertionError names the difference."""
        self._scheduler.check_integrity()
        self.adapters.check_integrity()
        self._requests.check_integrity(self.lifecycle.admits, self.policy_version, self._scheduler.num_queued)
        # a pause that waited for the last ends is complete once they are returned
        drains = self.num_in_flight or self._results.has_pending
        assert drains or not self.lifecycle.draining, "nothing drains"
        assert len(self._steps) <= self.config.num_ahead, f"{len(self._steps)} steps are in flight"
        if self.config.speculation is None:  # else one step may leave several outputs
            num_results = len(self._steps) + len(self._results.pending_outputs)
            assert num_results <= self.config.num_ahead, f"{num_results} results have not been returned"

    def _admit_held(self) -> None:
        if self.lifecycle.admits:
            for request in self._requests.take_held(self.policy_version):
                self._queue(request)

    def _queue(self, request: Request) -> None:
        """Schedule a request, once its preparation is complete."""
        preparation = self._scheduler.prepare(request, self._prepare(request.source.params))
        if preparation is None:
            self._results.begin(request)
        else:
            self._requests.hold_until_prepared(request, preparation)

    def _save_when_idle(self) -> None:
        """Save KV that the next step would save, unless there will be one."""
        if not self._steps and not self.num_in_flight:
            self._tables.save_noted()

    def _stop(self, mode: PauseMode) -> EngineCoreOutputs:
        """Begin a pause or sleep that the lifecycle has accepted; complete it unless requests have to finish first."""
        if mode == "abort":
            self._results.abort(self._requests.in_flight)
        if not self.lifecycle.draining:
            self._finish_stop()
        return self._results.pop_outputs()

    def _finish_draining(self) -> None:
        """Complete the pause or sleep that waits for requests, if none is in flight any more."""
        if self.lifecycle.draining and not self.num_in_flight:
            self._finish_stop()

    def _finish_stop(self) -> None:
        """Complete a pause or sleep: clear the cache and release memory as it asked."""
        self._wait_for_steps()
        level = self.lifecycle.finish_draining()
        if level or self._clear_cache_when_paused:
            self._scheduler.recompute_all()
            self._tables.clear_cache()
            self._clear_cache_when_paused = False
        if level:
            if self.draft_model is not None:
                self.draft_model.release(forget=level == 2)
            self._tables.save_noted()
            self._executor.release_kv()
            self._executor.release_weights(forget=level == 2)
