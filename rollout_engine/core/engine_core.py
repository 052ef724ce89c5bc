"""The engine's loop on one screen: schedule, execute, update."""

import logging
from collections.abc import Iterable
from copy import deepcopy

from rollout_engine.core.block_tables import BlockTables
from rollout_engine.core.door import CoreConfig, check_request
from rollout_engine.core.executor import Executor
from rollout_engine.core.lifecycle import Lifecycle, PauseMode
from rollout_engine.core.request import Request, Sequence
from rollout_engine.core.scheduler import Scheduler
from rollout_engine.core.token_columns import fill_columns
from rollout_engine.errors import LifecycleError, RequestError, RetryableError, WeightUpdateError
from rollout_engine.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelRunnerOutput,
    ScheduledSequence,
    SchedulerOutput,
    SequenceEnd,
)
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
        self._requests: dict[str, Request] = {}
        self._held: dict[str, Request] = {}
        """Those that came while the engine was not running; they join at resume, wake-up or the end of an update."""
        self._clear_wanted = False
        self._sequences: dict[str, Sequence] = {}
        self._num_arrived = 0
        self._ended: list[SequenceEnd] = []
        """Ends that no outputs have told yet."""

    @property
    def policy_version(self) -> int:
        """Version of the live weights."""
        return self._tables.policy_version

    @property
    def num_unfinished_requests(self) -> int:
        """Requests (not sequences) that have not ended."""
        return len(self._requests)

    @property
    def unfinished_request_ids(self) -> list[str]:
        """Ids of the requests that have not ended, in order of arrival."""
        return list(self._requests)

    @property
    def stats(self) -> CoreStats:
        """Counters since start."""
        return self._scheduler.stats

    @property
    def num_in_flight(self) -> int:
        """Unfinished requests without those that wait for resume or wake-up."""
        return len(self._requests) - len(self._held)

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
            num_requests=len(self._requests),
            num_running=len(self._scheduler.running),
            num_waiting=len(self._scheduler.waiting) + len(self._scheduler.parked),
            cache_usage=self._tables.usage,
            policy_version=self.policy_version,
            state=self.lifecycle.state,
            counters=deepcopy(self.stats),
        )

    def has_unfinished_requests(self) -> bool:
        """Whether `step()` has anything to give, now or once the engine runs again."""
        return bool(self._requests or self._ended)

    def can_progress(self) -> bool:
        """Whether `step()` has anything to give now: a loop waits for the next call from outside when it has not."""
        return bool(self._ended or (self.lifecycle.can_step and self.num_in_flight))

    def cache_usage(self) -> float:
        """Blocks referenced by live requests / all blocks."""
        return self._tables.usage

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request, or raise `RequestError`: out of bounds, too long for the KV pool, or its id is in use.

        While paused, asleep or overwritten by an update it waits for the end of that; with admission="reject" it
        raises `RetryableError`. `DirtyWeightsError` where an update has left the weights incomplete, `LifecycleError`
        after the end.
        """
        self._check_admission()
        check_request(request, self._config)
        if request.request_id in self._requests:
            raise RequestError.for_field("request_id", request.request_id, "unique among unfinished requests")
        made = Request(request, self._num_arrived)
        for sequence in made.sequences:
            if sequence.sequence_id in self._sequences:
                other = self._sequences[sequence.sequence_id].request.source.request_id
                hint = f"It would name a sequence '{sequence.sequence_id}', and so does unfinished request '{other}'."
                raise RequestError.for_field("request_id", request.request_id, "distinct from all sequence ids", hint)
        self._num_arrived += 1
        self._requests[request.request_id] = made
        self._sequences.update((sequence.sequence_id, sequence) for sequence in made.sequences)
        if self.lifecycle.admits:
            self._scheduler.add(made)
        else:
            self._held[request.request_id] = made

    def abort_requests(self, request_ids: Iterable[str]) -> EngineCoreOutputs:
        """End requests, or single samples by child id `{i}_{request_id}`; the outputs say which sequences ended.

        An unknown or finished id is a no-op. Where an id names both a request and a sample of another, the request
        is meant.
        """
        for request_id in request_ids:
            if request_id in self._requests:
                self._end_all(self._requests[request_id], "abort")
            elif request_id in self._sequences and not self._sequences[request_id].ended:
                self._end(self._sequences[request_id], "abort")
        self._settle_if_draining()
        return self._tell(EngineCoreOutputs(self.policy_version))

    def step(self) -> EngineCoreOutputs:
        """Schedule, execute, update. Called while idle or paused it lets the runner forget what has ended."""
        work = self._schedule()
        outputs = EngineCoreOutputs(self.policy_version, num_cached_tokens=self._found_in_cache(work))
        if work.scheduled or work.finished:
            try:
                result = self._executor.execute(work)
                _check_result(work, result)
            except BaseException as error:
                self._fail(work, error)
                if not isinstance(error, Exception):  # interrupted from outside: the next outputs tell what ended
                    self._settle_if_draining()
                    raise
            else:
                self._update(work, result, outputs)
        self._settle_if_draining()
        return self._tell(outputs)

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
        return self._tell(EngineCoreOutputs(self.policy_version))

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
        return self._tell(EngineCoreOutputs(self.policy_version))

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Take memory back: "weights", "kv_cache", or all. Weights forgotten by level 2 then wait for an update."""
        if "weights" in self.lifecycle.wake_up(tags) and not self.lifecycle.dirty:
            self._executor.restore_weights()
        self._admit_held()

    def reset_prefix_cache(self, *, reset_running_requests: bool = False) -> bool:
        """Forget every known prefix; whether that was done.

        While requests in flight hold blocks it is not, and nothing changes, unless `reset_running_requests`: then they
        compute their KV again. Either way no block from before can match afterwards.
        """
        self.lifecycle.require_alive("reset_prefix_cache")
        if reset_running_requests:
            self._scheduler.recompute_all()
        elif self._tables.usage:
            return False
        self._tables.clear_cache()
        return True

    def begin_update(self) -> None:
        """An update is under way; steps go on until `commit_version`."""
        self.lifecycle.begin_update()

    def close_for_update(self, mode: PauseMode) -> EngineCoreOutputs:
        """What is in flight ends now ("abort"; returns those ends), or is to finish ("wait"), and nothing new joins it
        until `end_update`."""
        self.lifecycle.close_for_update(mode, in_flight=self.num_in_flight > 0)
        if mode == "abort":
            self._abort_in_flight()
            self._settle_if_draining()
        return self._tell(EngineCoreOutputs(self.policy_version))

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
        grows = version > self._tables.policy_version
        if not grows:
            self._tables.clear_cache()
        if kv == "recompute" or not grows:
            self._scheduler.recompute_all()
        self._tables.policy_version = version
        return len(self._requests)

    def check_integrity(self) -> None:
        """Recount everything from scratch; AssertionError says what is off."""
        self._scheduler.check_integrity()
        assert self._held.keys() <= self._requests.keys(), "a request is held that has ended"
        assert not (self._held and self.lifecycle.admits), "requests are held though the engine runs"
        assert self.num_in_flight or not self.lifecycle.draining, "nothing drains"
        known = {s.sequence_id: s for request in self._requests.values() for s in request.sequences}
        assert known == self._sequences, "the sequences of live requests and the known sequences differ"
        for name, request in self._requests.items():
            live = request.live_sequences
            joined = name not in self._held
            assert len(live) == request.num_live > 0, f"{name}: {len(live)} live sequences, {request.num_live} counted"
            queued = [sequence for sequence in live if sequence.queue is not None]
            expected = live if request.forked else live[:joined]
            assert queued == expected, f"{name}: {len(queued)} of {len(live)} queued"
        num_queued = sum(sequence.queue is not None for sequence in known.values())
        assert num_queued == self._scheduler.num_queued, "a stranger is queued"

    def _schedule(self) -> SchedulerOutput:
        if self.lifecycle.can_step:
            return self._scheduler.schedule()
        self.lifecycle.require_alive("step")
        return self._scheduler.farewell()

    def _check_admission(self) -> None:
        self.lifecycle.require_alive("add_request")
        self.lifecycle.require_clean("add_request")
        if self._config.admission == "reject" and not self.lifecycle.admits:
            state = self.lifecycle.describe()
            raise RetryableError(f"The engine is {state} and takes no requests (admission='reject'); try again later.")

    def _admit_held(self) -> None:
        if self.lifecycle.admits:
            for request in self._held.values():
                self._scheduler.add(request)
            self._held.clear()

    def _abort_in_flight(self) -> None:
        for request in [request for name, request in self._requests.items() if name not in self._held]:
            self._end_all(request, "abort")

    def _settle_if_draining(self) -> None:
        if self.lifecycle.draining and not self.num_in_flight:
            self._settle()

    def _settle(self) -> None:
        """Complete a pause or sleep, unless something is in flight that it waits for."""
        if self.lifecycle.draining and self.num_in_flight:
            return
        level = self.lifecycle.drained()
        if level or self._clear_wanted:
            self.reset_prefix_cache(reset_running_requests=True)
            self._clear_wanted = False
        if level:
            self._executor.release_kv()
            self._executor.release_weights(forget=level == 2)

    def _update(self, work: SchedulerOutput, result: ModelRunnerOutput, outputs: EngineCoreOutputs) -> None:
        self.stats.num_steps += 1
        for row in work.scheduled:
            self._scheduler.advance(self._sequences[row.request_id], row.num_tokens)
        drawn = [self._sequences[task.request_id] for task in work.samples]
        fill_columns(outputs, drawn, result)
        for index, logprobs in result.prompt_logprobs.items():
            request = self._sequences[work.scheduled[index].request_id].request
            outputs.prompt_logprobs[request.source.first_sequence] = logprobs
        self.stats.num_tokens_sampled += len(outputs.sequences)
        for index, message in result.errors.items():
            self._end(drawn[index], "error", message)
        for sequence, token_id in zip(drawn, result.token_ids, strict=True):
            if not sequence.ended and sequence.append(token_id):
                self._ended.append(SequenceEnd(sequence.number, *sequence.finish()))
                self._retire(sequence)

    def _found_in_cache(self, work: SchedulerOutput) -> dict[int, int]:
        """`EngineCoreOutputs.num_cached_tokens` of the requests that `work` introduces."""
        requests = (self._sequences[new.request_id].request for new in work.new)
        return {r.source.first_sequence: r.num_cached_tokens or 0 for r in requests}

    def _tell(self, outputs: EngineCoreOutputs) -> EngineCoreOutputs:
        outputs.ended, self._ended = self._ended, []
        return outputs

    def _fail(self, work: SchedulerOutput, error: BaseException) -> None:
        """The executor raised: what it was working on ends, everything else goes on."""
        self.stats.num_steps += 1
        self.stats.num_failed_steps += 1
        message = f"step {work.step} failed: {type(error).__name__}: {error}"
        logger.warning("%s\n%s", message, _dump(work), exc_info=error)
        self._scheduler.unsend(work)
        for row in work.scheduled:
            sequence = self._sequences[row.request_id]
            if sequence.request.forked:
                self._end(sequence, "error", message)
            else:  # it computed the prompt for all
                self._end_all(sequence.request, "error", message)

    def _end_all(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """The leader ends last, so that no sibling has to take over."""
        for sequence in reversed(request.live_sequences):
            self._end(sequence, reason, error)

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """End a sequence that got no token."""
        if reason == "error":
            self._tables.distrust(sequence)
        self._ended.append(SequenceEnd(sequence.number, reason, error=error))
        self._retire(sequence)

    def _retire(self, sequence: Sequence) -> None:
        self._scheduler.end(sequence)
        request = sequence.request
        if request.num_live == 0:
            del self._requests[request.source.request_id]
            self._held.pop(request.source.request_id, None)
            for ended in request.sequences:
                del self._sequences[ended.sequence_id]


def _check_result(work: SchedulerOutput, result: ModelRunnerOutput) -> None:
    for name in ("token_ids", "logprobs", "kept_logprob_mass"):
        column = getattr(result, name)
        if column is not None and len(column) != len(work.samples):
            raise ValueError(f"the executor returned {len(column)} {name} for {len(work.samples)} samples")


def _dump(work: SchedulerOutput) -> str:
    """What was scheduled, one line a sequence, without any tokens."""
    head = (
        f"policy_version {work.policy_version}, {work.num_tokens} tokens, {len(work.scheduled)} scheduled, "
        f"{len(work.samples)} samples, {len(work.new)} new, {len(work.block_copies)} block copies"
    )
    return "\n".join([head, *(_dump_row(row) for row in work.scheduled)])


def _dump_row(row: ScheduledSequence) -> str:
    start, end = row.num_computed_tokens, row.num_computed_tokens + row.num_tokens
    return f"  {row.request_id}: tokens [{start}, {end}), {row.first_block + len(row.block_ids)} blocks"
