"""The scheduler decides which sequences compute how many tokens in the next step."""

import sys
from bisect import bisect_left, insort

from rollout_engine.base.messages import NewSequence, SampleTask, ScheduledSequence, SchedulerOutput
from rollout_engine.base.metrics import CoreStats
from rollout_engine.base.pictures import end_between_pictures
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.micro_batches import MicroBatches
from rollout_engine.core.request import Request, Sequence
from rollout_engine.core.request_table import Preparation
from rollout_engine.core.speculation import Speculator
from rollout_engine.core.step import Step
from rollout_engine.core.tiered_tables import TieredTables

_NOTHING: list[int] = []
"""No blocks, or no drafts: no caller changes the lists of a scheduled sequence."""


class Scheduler:
    """Sequences stand in one of three queues, each sorted by (priority, arrival, index).

    waiting   hold no blocks                          ──admit──>  running
    parked    forked, hold references to shared KV    ──admit──>  running
    running   at most max_num_seqs

    When blocks run out, the last of `parked` drops its references, then the last of `running` is preempted; both go
    back to `waiting` with their tokens and compute their KV again later. The first running sequence can always take
    all blocks, and `check_request` refuses a request that needs more: every step with work computes something.

    Slots of states run out likewise, if the model keeps any. A running sequence has a slot, which it shares with
    parked ones alone once no step is in flight; so when all of those have dropped their references, it needs no other.
    """

    def __init__(self, tables: TieredTables, config: CoreConfig, speculator: Speculator | None = None) -> None:
        self.tables = tables
        self._config = config
        self.stats = CoreStats() if tables.tier is None else CoreStats(kv_tier=tables.tier.stats)
        self.speculator = speculator
        self.waiting: list[Sequence] = []
        self.parked: list[Sequence] = []
        self.running: list[Sequence] = []
        self._max_num_seqs = config.max_num_seqs
        self._micro = MicroBatches(config)
        self._prefill_budget = 0
        """Tokens that this step may still compute in chunks of more than one."""
        self._scored_budget = 0
        """Prompt tokens that this step may still score: their logits all exist at the same time."""
        self._finished: list[int] = []
        """Sequence ids that the runner is to release with the next step."""

    @property
    def num_queued(self) -> int:
        """Sequences in all three queues."""
        return len(self.waiting) + len(self.parked) + len(self.running)

    def schedule(self, num_in_flight: int = 0) -> Step:
        """One token budget: running sequences first, then parked and waiting ones by (priority, arrival).

        A chunk that begins with a picture that must not be split goes beyond it, if need be, to the picture's end.
        Behind `num_in_flight` steps no sequence loses blocks: those that end there may free enough. The step may be
        empty.
        """
        step = self.empty_step(num_in_flight)
        self._scored_budget = self._config.max_scored_tokens
        decodes = any(sequence.num_tokens - sequence.num_computed_tokens == 1 for sequence in self.running)
        self._prefill_budget = self._config.max_prefill_beside_decode if decodes else sys.maxsize
        if not num_in_flight or self._running_fit():
            most = self._micro.begin(step, self.running, self.parked, self.waiting)
            budget = self._schedule_running(step, most)
            if not num_in_flight or self.running:
                budget = self._schedule_waiting(step, budget)
            if self.speculator is not None and not num_in_flight:
                self.speculator.add_drafts(step, most - budget)
        self.tables.finish_scheduling(step.work.scheduled, step.rows)
        step.work.finished_sequence_ids += self._take_finished()
        self.tables.complete(step.work)
        self._advance(step)
        assert step.rows or num_in_flight or not self.num_queued, "work, but nothing scheduled"
        return step

    def empty_step(self, num_in_flight: int = 0) -> Step:
        """An empty step that only releases finished sequences in the runner."""
        return Step(
            SchedulerOutput(
                step=self.stats.num_steps + num_in_flight,
                policy_version=self.tables.policy_version,
                finished_sequence_ids=self._take_finished(),
                new=[],
                block_copies=[],
                scheduled=[],
                samples=[],
            )
        )

    def requeue_finished(self, work: SchedulerOutput) -> None:
        """Name the finished sequences of `work` again in the next step: the runner may not have released them."""
        self._finished = work.finished_sequence_ids + self._finished

    def take_back(self, work: SchedulerOutput) -> None:
        """Take back an empty step that is not submitted."""
        self.requeue_finished(work)
        self.tables.take_back(work)

    def prepare(self, request: Request, other: Preparation | None) -> Preparation | None:
        """Begin to bring the KV of a new request near. Returns a wait for that and for `other`; None if unneeded."""
        return self.tables.prepare(request, other) if self._may_skip(request.leader) else other

    def add(self, request: Request) -> None:
        """Queue the leader of a request; its other sequences follow when the prompt has been computed."""
        self._move(request.leader, self.waiting)

    def end(self, sequence: Sequence) -> None:
        """Remove an ended sequence. If it was computing the prompt, the next live sequence does so from here."""
        was_leader = sequence.queue is not None and not sequence.request.forked
        if sequence.request.source.params.kv_hint is not None:
            self.tables.apply_hint(sequence)
        self._reset(sequence, None)
        if self.speculator is not None:
            self.speculator.end(sequence)
        sequence.ended = True
        sequence.request.num_live -= 1
        if was_leader and sequence.request.num_live:
            self.add(sequence.request)

    def update_from_output(self, step: Step) -> None:
        """Record a completed step, whose tokens the sequences have, and publish the blocks it filled."""
        stats, block_size = self.stats, self.tables.block_size
        num_before = stats.num_tokens_computed
        stats.num_steps += 1
        for row, sequence in zip(step.work.scheduled, step.rows, strict=True):
            start, num_tokens = row.num_computed_tokens, row.num_scheduled_tokens
            stats.num_tokens_computed += num_tokens
            if sequence.ended:
                stats.num_surplus_tokens += num_tokens
                continue
            if start < sequence.num_prompt_tokens:
                stats.num_prompt_tokens_computed += min(num_tokens, sequence.num_prompt_tokens - start)
            if start < sequence.num_lost_tokens:
                stats.num_recomputed_tokens += min(num_tokens, sequence.num_lost_tokens - start)
            if row.draft_token_ids:
                source = step.draft_sources[row.sequence_id]
                self.stats.drafts.count(source, len(row.draft_token_ids), sequence.num_computed_tokens - start - 1)
                num_tokens = sequence.num_computed_tokens - start
                self.tables.keep_drafted(sequence)
            if num_tokens > 1 or (start + 1) % block_size == 0:  # else no block became full
                self.tables.publish(sequence, start + num_tokens)
        stats.step_tokens.observe(stats.num_tokens_computed - num_before)

    def rollback(self, step: Step) -> None:
        """Roll back a failed step; its tokens are computed again."""
        self.requeue_finished(step.work)
        for sequence in step.sampled:
            sequence.num_pending_tokens -= 1
        for row, sequence in zip(step.work.scheduled, step.rows, strict=True):
            if not sequence.ended:
                sequence.num_computed_tokens -= row.num_scheduled_tokens - len(row.draft_token_ids)
                self._drop(sequence)
                if len(sequence.token_ids) == sequence.num_prompt_tokens and sequence.request.num_live == 1:
                    sequence.request.forked = False  # of several sequences, `step.forked` has the request
        for request in step.forked:
            if request.num_live:
                self._unfork(request)

    def recompute_all(self) -> None:
        """Make every sequence with KV drop it and compute it again."""
        for sequence in self.running + self.parked:
            self._drop(sequence)

    def check_integrity(self) -> None:
        """Assert that the queues are sorted and disjoint, and hold the sequences that their names promise."""
        queued = self.waiting + self.parked + self.running
        assert len({sequence.sequence_id for sequence in queued}) == len(queued), "a sequence stands in two queues"
        assert len(self.running) <= self._max_num_seqs, f"{len(self.running)} running of {self._max_num_seqs}"
        for queue in (self.waiting, self.parked, self.running):
            assert queue == sorted(queue), "a queue is out of order"
            assert all(sequence.queue is queue for sequence in queue), "a sequence does not know its queue"
        assert not any(s.block_ids or s.in_runner for s in self.waiting), "a waiting sequence holds something"
        assert all(s.block_ids and s.in_runner for s in self.parked), "a parked sequence holds nothing"
        assert all(s.in_runner for s in self.running), "a running sequence is unknown to the runner"
        assert not any(s.ended for s in queued), "an ended sequence is queued"
        assert not any(s.num_pending_tokens for s in self.waiting), "a waiting sequence awaits a token"
        self.tables.check_integrity(queued)

    def _schedule_running(self, step: Step, budget: int) -> int:
        position, scheduled, samples = 0, step.work.scheduled, step.work.samples
        while budget and position < len(self.running):
            sequence = self.running[position]
            position += 1
            if self._micro.are_several and self._micro.leaves_out(sequence):
                continue
            if sequence.decodes_in_place:  # most of most steps: all that `_schedule_tokens` would do for it
                name, start, first_block = sequence.sequence_id, sequence.num_computed_tokens, sequence.num_sent_blocks
                samples.append(SampleTask(name, len(scheduled)))
                scheduled.append(ScheduledSequence(name, start, 1, _NOTHING, first_block, _NOTHING))
                step.rows.append(sequence)
                step.sampled.append(sequence)
                budget -= 1
                continue
            num_tokens = self._take_tokens(sequence, budget)
            if num_tokens:
                end = sequence.num_computed_tokens + num_tokens
                if end > sequence.num_writable_tokens and not self._make_room(sequence, end):
                    break
                self._schedule_tokens(step, sequence, num_tokens)
                budget = max(0, budget - num_tokens)
        return budget

    def _schedule_waiting(self, step: Step, budget: int) -> int:
        num_passed = 0
        while budget and len(self.running) < self._max_num_seqs:
            first = self.waiting[num_passed : num_passed + 1] + self._micro.first_ready(self.parked)
            if not first or self._must_wait(sequence := min(first)):
                break
            if self._looks_up(sequence) and not self.tables.attach_prefix(sequence):
                num_passed += 1
                continue
            if not self._admit(sequence):
                break
            num_tokens = self._take_tokens(sequence, budget)
            self._schedule_tokens(step, sequence, num_tokens)
            budget = max(0, budget - num_tokens)
        return budget

    def _running_fit(self) -> bool:
        """Whether all running sequences can continue without taking blocks from any."""
        return self.tables.fit_together(
            [s for s in self.running if s.num_tokens > s.num_writable_tokens and not s.awaits_last_token]
        )

    def _must_wait(self, sequence: Sequence) -> bool:
        """Whether the sequence will end anyway, or the step has no budget left for its prompt or for loads of KV."""
        if sequence.awaits_last_token or self._micro.is_full or self.tables.has_loaded_enough:
            return True
        if sequence.scores_prompt and not self._scored_budget:
            return True
        return not self._prefill_budget and sequence.num_tokens - sequence.num_computed_tokens > 1

    def _take_tokens(self, sequence: Sequence, budget: int) -> int:
        """Take tokens for `sequence` from the budgets of this step; 0 if it must wait for another step, or will end."""
        if sequence.awaits_last_token:
            return 0
        start = sequence.num_computed_tokens
        num_tokens = min(budget, sequence.num_tokens - start)
        is_decode = num_tokens == 1
        if not is_decode:
            num_tokens = min(num_tokens, self._prefill_budget)
            if sequence.scores_prompt:
                num_tokens = min(num_tokens, self._scored_budget)
        if start < sequence.num_prompt_tokens and (whole := self._config.whole_pictures(sequence.request.source)):
            num_tokens = end_between_pictures(whole, start, start + num_tokens) - start
        if not is_decode:
            if sequence.scores_prompt:
                self._scored_budget = max(0, self._scored_budget - num_tokens)
            self._prefill_budget = max(0, self._prefill_budget - num_tokens)
        return num_tokens

    def _make_room(self, sequence: Sequence, end: int) -> bool:
        """Free blocks until running `sequence` fits up to `end`; False if it had to give up its own."""
        while not self.tables.fits(sequence, end):
            if self.parked:
                self._drop_references()
                continue
            victim = self.running[-1]
            self.stats.num_preemptions += 1
            self._drop(victim)
            if victim is sequence:
                return False
        return True

    def _may_skip(self, sequence: Sequence) -> bool:
        """Whether tokens of a sequence need not be computed if their KV is known."""
        return not (sequence.returns_prompt or self._config.pools_beyond_last(sequence.pooling))

    def _looks_up(self, sequence: Sequence) -> bool:
        return sequence.queue is self.waiting and self.tables.caching and self._may_skip(sequence)

    def _admit(self, sequence: Sequence) -> bool:
        """Move to `running` if all its tokens fit along with the others. No running sequence loses blocks for it."""
        came_without_blocks, looks_up = sequence.queue is self.waiting, self._looks_up(sequence)
        while not self.tables.fits(sequence, sequence.num_tokens):
            if self.running or not self.parked or self.parked[-1] is sequence:
                assert self.running, f"sequence {sequence.sequence_id} does not fit an empty pool"
                if came_without_blocks:
                    self.tables.release(sequence)
                return False
            self._drop_references()
        self._move(sequence, self.running)
        if looks_up:
            self.tables.load_prefix(sequence)
        if came_without_blocks:
            self.stats.num_looked_up_tokens += sequence.num_tokens if looks_up else 0
            self.stats.num_cached_tokens += sequence.num_computed_tokens
            if sequence.request.num_cached_tokens is None:
                sequence.request.num_cached_tokens = sequence.num_computed_tokens
        return True

    def _schedule_tokens(self, step: Step, sequence: Sequence, num_tokens: int) -> None:
        """Add one row to the step, and the samples drawn from it."""
        work = step.work
        start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + num_tokens
        state = None
        if end > sequence.num_writable_tokens:
            copies, state = self.tables.extend(sequence, end)
            self.stats.num_block_copies += len(copies)
            work.block_copies += copies
        if not sequence.in_runner:
            self._add_to_runner(step, sequence)
        first_block = sequence.num_sent_blocks
        new_blocks = sequence.block_ids[first_block:] if first_block < len(sequence.block_ids) else _NOTHING
        sequence.num_sent_blocks = len(sequence.block_ids)
        name = sequence.sequence_id
        work.scheduled.append(ScheduledSequence(name, start, num_tokens, new_blocks, first_block, _NOTHING, state))
        step.rows.append(sequence)
        if end < sequence.num_tokens or sequence.pooling is not None:
            return
        row = len(work.scheduled) - 1
        for sample in [sequence] if sequence.request.forked else sequence.request.live_sequences:
            if not sample.in_runner:
                self._add_to_runner(step, sample)
            work.samples.append(SampleTask(sample.sequence_id, row))
            step.sampled.append(sample)

    def _advance(self, step: Step) -> None:
        """Count the scheduled tokens as computed. If a prompt is complete, its siblings fork off."""
        for row, sequence in zip(step.work.scheduled, step.rows, strict=True):
            sequence.num_computed_tokens += row.num_scheduled_tokens - len(row.draft_token_ids)
            if sequence.kv_min_version is None:
                sequence.kv_min_version = self.tables.policy_version
            if not sequence.request.forked and sequence.num_computed_tokens == sequence.num_tokens:
                self._fork(sequence)
        for sequence in step.sampled:
            sequence.num_pending_tokens += 1

    def _add_to_runner(self, step: Step, sequence: Sequence) -> None:
        request = sequence.request
        step.num_cached_tokens[request.source.first_sequence_id] = request.num_cached_tokens or 0
        step.work.new.append(
            NewSequence(
                sequence_id=sequence.sequence_id,
                token_ids=sequence.token_ids.copy(),  # the runner appends to its own
                num_prompt_tokens=sequence.num_prompt_tokens,
                params=request.source.params,
                seed=sequence.seed,
                eos_token_ids=request.source.eos_token_ids,
                bad_words=request.source.bad_words,
                pooling=request.source.pooling,
                adapter_slot=-1 if request.adapter is None else request.adapter.slot,
                pictures=request.source.pictures,
                thinking=request.source.thinking,
            )
        )
        sequence.in_runner = True

    def _fork(self, leader: Sequence) -> None:
        leader.request.forked = True
        for sibling in leader.request.live_sequences:
            if sibling is not leader:
                self.tables.fork(leader, sibling)
                self._move(sibling, self.parked)

    def _unfork(self, request: Request) -> None:
        """Undo a fork: the prompt was not computed after all."""
        for sequence in request.live_sequences:
            self._reset(sequence, None)
        request.forked = False
        self.add(request)

    def _drop_references(self) -> None:
        self.stats.num_references_dropped += 1
        self._drop(self.parked[-1])

    def _drop(self, sequence: Sequence) -> None:
        """Move `sequence` back to `waiting`; it keeps its tokens and computes their KV again."""
        sequence.num_lost_tokens = max(sequence.num_lost_tokens, sequence.num_computed_tokens)
        self._reset(sequence, self.waiting)

    def _reset(self, sequence: Sequence, queue: list[Sequence] | None) -> None:
        """Release the blocks of `sequence` and its state in the runner, and move it to `queue`."""
        self.tables.release(sequence)
        if sequence.in_runner:
            self._finished.append(sequence.sequence_id)
            sequence.in_runner = False
        self._move(sequence, queue)

    def _take_finished(self) -> list[int]:
        taken, self._finished = self._finished, []
        return taken

    def _move(self, sequence: Sequence, queue: list[Sequence] | None) -> None:
        if sequence.queue is not None:
            del sequence.queue[bisect_left(sequence.queue, sequence)]
        if queue is not None:
            insort(queue, sequence)
        sequence.queue = queue
