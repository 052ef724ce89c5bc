"""A simulated engine: the scheduler's decisions, and the seconds that its steps take, many steps at a time.

    waiting   has no KV        ──admit──> prefilling ──prompt is computed──> decoding
    parked    stands on a      ──admit──────────────────────────────────────> decoding
              sibling's prompt

Steps in which every sequence decodes cost a sum that is known beforehand, so the engine goes to the next end of a
sequence, or to the next step that is not alike, at once. An event from outside cuts such a run at the end of the step
in progress. KV is counted in tokens, half a block lost for each sequence.
"""

import math
from collections.abc import Callable
from heapq import heappop, heappush

from rollout_engine.capacity.costs import StepCosts
from rollout_engine.capacity.options import EngineTable
from rollout_engine.capacity.prefixes import PrefixPool
from rollout_engine.capacity.sequences import EngineRequest, EngineSequence
from rollout_engine.capacity.steps import StepRun


class EngineCounts:
    """Counters of an engine since the simulation began."""

    __slots__ = ("busy_seconds", "num_cached", "num_looked_up", "num_preempted", "num_prefilled", "num_sampled")

    def __init__(self) -> None:
        self.busy_seconds = 0.0
        self.num_sampled = self.num_prefilled = 0
        self.num_looked_up = self.num_cached = 0
        """Tokens of admitted sequences, and how many of them were found in the prefix cache."""
        self.num_preempted = 0


class SimulatedEngine:
    """One engine. Its driver calls `begin` while it is idle, and `finish` at the end of the run that it began."""

    def __init__(self, table: EngineTable, costs: StepCosts, counts: EngineCounts, version: int) -> None:
        self.version = version
        self.counts = counts
        self.ended: list[EngineSequence] = []
        """Sequences that have ended since this was last emptied."""
        self.on_first_token: Callable[[EngineSequence, int], None] = lambda sequence, version: None
        """Called with each sequence that has its first token, and the version of the weights."""
        self.run: StepRun | None = None
        """The steps in progress."""
        self._table, self._costs = table, costs
        self._num_kv_tokens = table.num_kv_tokens
        self._pool = PrefixPool(self._num_kv_tokens, enabled=table.enable_prefix_caching)
        self._waiting: list[tuple[tuple[int, int], EngineSequence]] = []
        """Heap of waiting and parked sequences, oldest first."""
        self._prefilling: list[EngineSequence] = []
        self._chunks: list[tuple[EngineSequence, int]] = []
        """Prefilling sequences and their tokens in the run in progress."""
        self._decoding: dict[int, EngineSequence] = {}
        self._ends: list[tuple[int, int, EngineSequence]] = []
        """Heap of (step, count, sequence); outdated ones are dropped when met."""
        self._num_steps = self._num_context = self._num_arrivals = self._num_ends = 0

    @property
    def is_full(self) -> bool:
        """Whether a new sequence has to wait for the end of another one."""
        return len(self._decoding) + len(self._prefilling) >= self._table.max_num_seqs

    @property
    def has_work(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._decoding or self._prefilling or self._waiting)

    def sequences(self) -> list[EngineSequence]:
        """All that have not ended."""
        return [*self._decoding.values(), *self._prefilling, *(s for _, s in self._waiting if not s.is_over)]

    def add(self, request: EngineRequest) -> None:
        """Queue a request: its first sequence computes the prompt, the others follow."""
        self._num_arrivals += 1
        for sequence in request.sequences:
            sequence.order = (self._num_arrivals, sequence.sequence_id)
        request.sequences[0].is_leading = True
        heappush(self._waiting, (request.sequences[0].order, request.sequences[0]))

    def num_sampled(self, sequence: EngineSequence) -> int:
        """Tokens that a sequence has by the steps that are over."""
        since = self._num_steps - sequence.joined_at if sequence.sequence_id in self._decoding else 0
        return sequence.num_sampled + since

    def abort(self, sequence: EngineSequence) -> None:
        """End a sequence, between two steps."""
        sequence.is_over = True
        if sequence.sequence_id in self._decoding:
            self._leave_batch(sequence)
        elif sequence in self._prefilling:
            self._prefilling.remove(sequence)
            self._chunks = [chunk for chunk in self._chunks if chunk[0] is not sequence]
            self._pool.num_held -= sequence.num_own
        self._let_go(sequence)
        if sequence.is_leading and not sequence.request.is_forked:
            self._lead_on(sequence)

    def commit(self, version: int, *, recompute: bool) -> None:
        """Have the weights of a version, between two steps."""
        self.version = version
        self._pool.forget()
        if recompute:
            for sequence in [*self._decoding.values()]:
                self._preempt(sequence)
            for _, sequence in self._waiting:
                if sequence.is_parked:
                    self._let_go(sequence)

    def begin(self) -> StepRun | None:
        """Schedule the next steps; None if there is nothing to compute."""
        assert self.run is None, "a run is in progress"
        self._make_room()
        chunks = self._schedule_prefills()
        rows = len(self._decoding)
        if not rows and not chunks:
            assert not self._waiting, "work, but nothing scheduled"
            return None
        costs, context = self._costs, self._num_context
        seconds = costs.step_seconds + costs.row_seconds * rows + costs.context_token_seconds * context
        for sequence, num_tokens in chunks:
            seconds += costs.prefill_token_seconds * num_tokens
            seconds += costs.context_token_seconds * (sequence.num_computed + num_tokens)
        self._chunks = chunks
        num_steps = 1 if chunks else min(self._next_end() - self._num_steps, max(self._num_free() // rows, 1))
        self.run = StepRun(num_steps, seconds, costs.context_token_seconds * rows)
        return self.run

    def finish(self, num_steps: int) -> None:
        """End the current run after `num_steps` of its steps, or after all."""
        run, self.run = self.run, None
        assert run is not None, "no run is in progress"
        rows, counts = len(self._decoding), self.counts
        self._num_steps += num_steps
        self._num_context += rows * num_steps
        self._pool.num_held += rows * num_steps
        counts.num_sampled += rows * num_steps
        counts.busy_seconds += run.seconds_of(num_steps)
        while self._ends and self._ends[0][0] <= self._num_steps:
            step, _, sequence = heappop(self._ends)
            if sequence.ends_at == step and sequence.sequence_id in self._decoding:
                self._leave_batch(sequence)
                self._end(sequence)
        chunks, self._chunks = self._chunks, []
        for sequence, num_tokens in chunks if num_steps else ():
            sequence.num_computed += num_tokens
            counts.num_prefilled += num_tokens
            if sequence.num_computed == sequence.num_tokens:
                self._prefilling.remove(sequence)
                self._finish_prefill(sequence)

    def _schedule_prefills(self) -> list[tuple[EngineSequence, int]]:
        """Prompt tokens of the next step, and new sequences in the batch, oldest first."""
        table = self._table
        beside = table.max_prefill_beside_decode if self._decoding else table.max_num_batched_tokens
        budget = table.max_num_batched_tokens - len(self._decoding)
        chunks, passed = [], []
        for sequence in self._prefilling:
            num_tokens = min(sequence.num_tokens - sequence.num_computed, budget, beside)
            if num_tokens:
                chunks.append((sequence, num_tokens))
                budget, beside = budget - num_tokens, beside - num_tokens
        while budget and self._waiting and not self.is_full:
            sequence = self._waiting[0][1]
            if sequence.is_over:
                heappop(self._waiting)
                continue
            if self._waits_for_prefix(sequence):
                passed.append(heappop(self._waiting))
                continue
            if not (beside or sequence.is_parked) or not self._admit(sequence):
                break
            heappop(self._waiting)
            if sequence.is_parked:
                self._decode(sequence)
                budget -= 1
            else:
                self._prefilling.append(sequence)
                num_tokens = min(sequence.num_tokens - sequence.num_computed, budget, beside)
                chunks.append((sequence, num_tokens))
                budget, beside = budget - num_tokens, beside - num_tokens
        for each in passed:
            heappush(self._waiting, each)
        return chunks

    def _waits_for_prefix(self, sequence: EngineSequence) -> bool:
        """Whether another sequence computes the next prefix of a new one."""
        wanted = None if sequence.is_parked else sequence.request.first_missing(self._pool)
        return wanted is not None and any(s.request.first_missing(self._pool) == wanted for s in self._prefilling)

    def _admit(self, sequence: EngineSequence) -> bool:
        """Take KV for all tokens of a sequence, if that is free."""
        request, pool = sequence.request, self._pool
        if not sequence.is_parked:
            request.hold(pool)
        num_missing = sequence.num_tokens - request.num_held
        if num_missing > self._num_free() - len(self._decoding) and (self._decoding or self._prefilling):
            if not sequence.is_parked:
                request.release(pool)
            return False
        if sequence.is_parked:
            num_missing -= 1  # its last token takes room as the step is over
        else:
            sequence.has_kv = True
            findable = (sequence.num_tokens - 1) // self._table.block_size * self._table.block_size
            sequence.num_computed = min(request.num_held, findable)
            self.counts.num_looked_up += sequence.num_tokens
            self.counts.num_cached += sequence.num_computed
        sequence.num_own = num_missing
        pool.num_held += num_missing
        return True

    def _finish_prefill(self, sequence: EngineSequence) -> None:
        """A sequence's context is computed: it has its next token. If that was the prompt's, its siblings fork off."""
        request = sequence.request
        self._pool.num_held -= sequence.num_own
        request.publish(self._pool, sequence)
        sampled = [sequence]
        if not request.is_forked:
            request.is_forked = True
            sampled = [each for each in request.sequences if not each.is_over]
            request.num_holders += len(sampled) - 1
        for each in sampled:
            each.is_leading, each.has_kv = False, True
            each.num_sampled += 1
            self.counts.num_sampled += 1
            if each.num_sampled == 1:
                self.on_first_token(each, self.version)
            if each.num_sampled < each.length and each is not sequence:
                each.is_parked = True
                heappush(self._waiting, (each.order, each))
            elif each.num_sampled < each.length:
                self._decode(each)
            else:
                self._pool.num_held -= each.num_own
                self._end(each)

    def _decode(self, sequence: EngineSequence) -> None:
        """Put a sequence whose KV is complete but for its last token among those that decode."""
        sequence.is_parked = False
        sequence.joined_at = self._num_steps
        sequence.ends_at = self._num_steps + sequence.length - sequence.num_sampled
        self._decoding[sequence.sequence_id] = sequence
        self._num_context += sequence.num_tokens
        self._num_ends += 1
        heappush(self._ends, (sequence.ends_at, self._num_ends, sequence))

    def _leave_batch(self, sequence: EngineSequence) -> None:
        """Take a sequence out of those that decode, with the tokens and KV that it has by now."""
        num_new = self._num_steps - sequence.joined_at
        del self._decoding[sequence.sequence_id]
        sequence.num_sampled += num_new
        sequence.num_own += num_new
        sequence.ends_at = -1
        self._num_context -= sequence.num_tokens
        self._pool.num_held -= sequence.num_own

    def _end(self, sequence: EngineSequence) -> None:
        block_size = self._table.block_size
        self._pool.leave(sequence, sequence.num_own // block_size * block_size)
        sequence.is_over = True
        self._let_go(sequence)
        self.ended.append(sequence)

    def _let_go(self, sequence: EngineSequence) -> None:
        """Stand on the prompt of the request no longer."""
        if sequence.has_kv:
            sequence.request.release(self._pool)
        sequence.is_parked = sequence.has_kv = False
        sequence.num_own = sequence.num_computed = 0

    def _lead_on(self, ended: EngineSequence) -> None:
        """Let the next live sequence compute the prompt."""
        for sequence in ended.request.sequences:
            if not sequence.is_over:
                sequence.is_leading = True
                heappush(self._waiting, (sequence.order, sequence))
                break

    def _preempt(self, sequence: EngineSequence) -> None:
        self._leave_batch(sequence)
        self._let_go(sequence)
        heappush(self._waiting, (sequence.order, sequence))

    def _make_room(self) -> None:
        """Have KV for one more token of each sequence: the last parked lose their references, then the youngest."""
        if self._num_free() >= len(self._decoding):
            return
        parked = sorted((sequence for _, sequence in self._waiting if sequence.is_parked), key=lambda s: s.order)
        while self._num_free() < len(self._decoding) and len(self._decoding) > 1:
            if parked:
                self._let_go(parked.pop())
            else:
                self.counts.num_preempted += 1
                self._preempt(max(self._decoding.values(), key=lambda sequence: sequence.order))

    def _num_free(self) -> int:
        lost = (len(self._decoding) + len(self._prefilling)) * self._table.block_size // 2
        return self._num_kv_tokens - lost - self._pool.num_held

    def _next_end(self) -> int:
        while self._ends[0][2].ends_at != self._ends[0][0]:
            heappop(self._ends)
        return self._ends[0][0]

    def check_integrity(self) -> None:
        """Recount the totals that are kept in addition to the sequences."""
        context = sum(each.num_prompt + self.num_sampled(each) for each in self._decoding.values())
        assert context == self._num_context, f"{self._num_context} context tokens are counted, and there are {context}"
        requests = {id(each.request): each.request for each in self.sequences()}
        own = sum(each.num_own + self._num_steps - each.joined_at for each in self._decoding.values())
        own += sum(each.num_own for each in self._prefilling)
        held = {id(prefix): prefix.num_tokens for each in requests.values() for prefix in each.prefixes}
        assert self._pool.num_held == own + sum(held.values()), "KV is held by nobody, or twice"
        assert math.isfinite(self.counts.busy_seconds), "steps take for ever"
