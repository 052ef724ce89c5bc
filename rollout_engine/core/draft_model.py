"""A small model that draws drafts: its steps, and the KV of its sequences in a small pool of its own.

    sequence's tokens   |0 .............. num_computed ...... len|            begin: compute the rest, in chunks
    drafted                                                       |d d d ..   draw: one more for each sequence

Each round introduces its sequences anew to the model's runner, with the tokens that they have by now. KV behind the
first token that was drafted and not drawn is computed again, and overwritten. A sequence begins with a copy of
its prompt's KV, if another sample of the same request has it. If the pool is short, the sequences that were
not drafted for longest lose their blocks, and compute their KV again if they are drafted again.

The model draws with the noise of the policy's own draw: the token at which the cumulative probability, in the order of
the vocabulary, passes the uniform number of (sequence seed, position), under the request's temperature, truncation and
penalties. Two models draw the same token unless that number lies between their cumulative probabilities of some token.
So models that agree always draw the same, and greedy rows agree wherever the most likely token is the same; independent
draws would agree as often as two coincide, sum p q. No way to draw agrees more often than 1 - TV(p, q). Shared Gumbel
noise is sure to reach (1 - TV) / (1 + TV) (Daliri, Musco, Suresh: "Coupling without Communication and Drafter-Invariant
Speculative Decoding", arXiv 2408.07978); a shared uniform has no such bound, since a difference at one token moves all
behind it, but the policy's tokens are drawn by it and stay as they are.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from rollout_engine.base.messages import ModelRunnerOutput, NewSequence, SampleTask, ScheduledSequence, SchedulerOutput
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.core.request import Request, Sequence

SHORT = 16
"""Tokens that are computed together with a draw."""
CHUNK = 512
"""Most other tokens computed in one round: the step that waits for the drafts waits for these."""


class Drawn(NamedTuple):
    """A drafted token."""

    token_id: int
    logprob: float
    """Log-prob under the draft model, before truncation."""


@dataclass(slots=True, eq=False)
class _Known:
    """A sequence of which the model has KV."""

    sequence_id: int
    request: Request
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    """Tokens of the sequence, and those drafted behind them."""
    num_agreed: int = 0
    """Tokens that the sequence is known to have."""
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    num_sent_blocks: int = 0
    """Entries of the block table that the runner has."""
    is_introduced: bool = False
    """Whether the runner has it, with `token_ids`."""

    @property
    def num_shared(self) -> int:
        """Tokens of the prompt, which other samples have too, with KV."""
        return min(self.num_computed, self.num_agreed, len(self.request.source.prompt_token_ids))

    def agreement(self, token_ids: list[int]) -> int:
        """How many first tokens are those that the sequence has by now, `token_ids`."""
        num, most = self.num_agreed, min(len(self.token_ids), len(token_ids))
        while num < most and token_ids[num] == self.token_ids[num]:
            num += 1
        return num


class DraftModel:
    """Drafts tokens for sequences, in rounds: `begin`, then `draw` as often as is worth it.

    Args:
        execute: runs a step of the draft model.
        num_blocks, block_size: its KV pool.
    """

    def __init__(
        self, execute: Callable[[SchedulerOutput], ModelRunnerOutput], *, num_blocks: int, block_size: int
    ) -> None:
        self._execute = execute
        self._num_blocks, self._block_size = num_blocks, block_size
        self._free = list(range(num_blocks))[::-1]
        self._known: OrderedDict[int, _Known] = OrderedDict()
        """By sequence id; the one drafted last at the end."""
        self._finished: list[int] = []
        """Sequence ids that the runner is to release with the next step."""
        self._round: set[int] = set()

    def num_missing(self, sequence: Sequence) -> int:
        """Tokens that `begin` and the first `draw` would have to compute."""
        known, num_tokens = self._known.get(sequence.sequence_id), len(sequence.token_ids)
        if known is not None:
            return num_tokens - min(known.num_computed, known.agreement(sequence.token_ids))
        sibling = self._sibling(sequence)
        return num_tokens - (0 if sibling is None else sibling.num_shared)

    def begin(self, sequences: list[Sequence]) -> list[Sequence]:
        """Begin a round: compute missing tokens, as far as one round may. Returns the sequences that can be drafted."""
        self._round = {sequence.sequence_id for sequence in sequences}
        ready, left = [], CHUNK
        for sequence in sorted(sequences, key=lambda each: self.num_missing(each) > SHORT):
            known = self._catch_up_with(sequence)
            if not self._reserve(known, len(sequence.token_ids)):
                continue
            while left and len(known.token_ids) - known.num_computed > SHORT:
                num_tokens = min(left, len(known.token_ids) - known.num_computed - 1)
                self._compute([sequence], num_tokens)
                left -= num_tokens
            if len(known.token_ids) - known.num_computed <= SHORT:
                ready.append(sequence)
            if not left:  # one that begins later may copy the blocks that this one has computed by then
                break
        return ready

    def draw(self, sequences: list[Sequence]) -> list[Drawn | None]:
        """Draft one more token for each; None for one that has no room in the pool, or cannot be sampled."""
        rows = [s for s in sequences if self._reserve(known := self._known[s.sequence_id], len(known.token_ids))]
        if not rows:
            return [None] * len(sequences)
        output = self._compute(rows)
        found: dict[int, Drawn | None] = {}
        for row, sequence in enumerate(rows):
            token_id, logprobs = output.token_ids[row], output.logprobs
            failed = row in output.errors
            self._known[sequence.sequence_id].token_ids.append(max(token_id, 0))
            found[sequence.sequence_id] = None if failed or logprobs is None else Drawn(token_id, logprobs[row])
        return [found.get(sequence.sequence_id) for sequence in sequences]

    def end(self, sequence_id: int) -> None:
        """Forget a sequence. An unknown id is a no-op."""
        known = self._known.pop(sequence_id, None)
        if known is not None:
            self._free += known.block_ids[::-1]
            self._finished.append(sequence_id)

    def clear(self) -> None:
        """Forget every sequence: their KV is gone, or is of other weights."""
        for sequence_id in list(self._known):
            self.end(sequence_id)

    def check_integrity(self) -> None:
        """Assert that each block is free, or has one owner."""
        used = [block for known in self._known.values() for block in known.block_ids]
        assert sorted(used + self._free) == list(range(self._num_blocks)), "draft blocks were lost, or are shared"

    def _catch_up_with(self, sequence: Sequence) -> _Known:
        """Return the record of a sequence, made if there is none, with the tokens that it has now."""
        known = self._known.get(sequence.sequence_id) or self._start(sequence)
        self._known.move_to_end(sequence.sequence_id)
        tokens = sequence.token_ids
        known.num_computed = min(known.num_computed, known.agreement(tokens), len(tokens) - 1)
        known.token_ids, known.num_agreed = tokens.copy(), len(tokens)
        known.num_sent_blocks, known.is_introduced = 0, False
        return known

    def _start(self, sequence: Sequence) -> _Known:
        """Begin with the KV of the prompt that another sample of the request has."""
        request, sibling = sequence.request, self._sibling(sequence)
        if sibling is None:
            params = msgspec.structs.replace(
                request.source.params,
                logprobs=0,
                logprobs_mode="tempered",
                prompt_logprobs=None,
                logprob_token_ids=None,
                structured_outputs=None,
                entropy=False,
                return_hidden_states=None,
            )
            known = self._known[sequence.sequence_id] = _Known(sequence.sequence_id, request, params)
            return known
        known = self._known[sequence.sequence_id] = _Known(sequence.sequence_id, request, sibling.params)
        num_shared = sibling.num_shared
        self._round.add(sibling.sequence_id)  # it keeps its blocks until they are copied
        if self._reserve(known, num_shared):
            sources = sibling.block_ids[: len(known.block_ids)]
            self._run(self._work(block_copies=list(zip(sources, known.block_ids, strict=True))))
            known.token_ids = sequence.token_ids[:num_shared]
            known.num_computed = known.num_agreed = num_shared
        return known

    def _sibling(self, sequence: Sequence) -> _Known | None:
        """Another sample of the request: the one that has most KV of the prompt."""
        found = (known for known in self._known.values() if known.request is sequence.request)
        return max(found, key=lambda known: known.num_shared, default=None)

    def _reserve(self, known: _Known, num_tokens: int) -> bool:
        """Take blocks for `num_tokens`; others that are not in this round may lose theirs."""
        num_missing = -(-num_tokens // self._block_size) - len(known.block_ids)
        while num_missing > len(self._free):
            oldest = next((name for name in self._known if name not in self._round), None)
            if oldest is None:
                return False
            self.end(oldest)
        known.block_ids += [self._free.pop() for _ in range(num_missing)]
        return True

    def _compute(self, sequences: list[Sequence], num_tokens: int | None = None) -> ModelRunnerOutput:
        """Compute the next tokens of each; None: all that are left, and draw."""
        work = self._work()
        for row, sequence in enumerate(sequences):
            name, known = sequence.sequence_id, self._known[sequence.sequence_id]
            if not known.is_introduced:
                known.is_introduced = True
                work.finished_sequence_ids.append(name)
                work.new.append(_new(sequence, known))
            start, first_block = known.num_computed, known.num_sent_blocks
            num = len(known.token_ids) - start if num_tokens is None else num_tokens
            work.scheduled.append(ScheduledSequence(name, start, num, known.block_ids[first_block:], first_block))
            if num_tokens is None:
                work.samples.append(SampleTask(name, row))
            known.num_computed, known.num_sent_blocks = start + num, len(known.block_ids)
        return self._run(work)

    def _run(self, work: SchedulerOutput) -> ModelRunnerOutput:
        try:
            return self._execute(work)
        except BaseException:
            self._finished += work.finished_sequence_ids  # the runner may not have released them
            raise

    def _work(self, block_copies: list[tuple[int, int]] | None = None) -> SchedulerOutput:
        finished, self._finished = self._finished, []
        return SchedulerOutput(0, 0, finished, [], block_copies or [], [], [])


def _new(sequence: Sequence, known: _Known) -> NewSequence:
    source = sequence.request.source
    return NewSequence(
        sequence_id=sequence.sequence_id,
        token_ids=known.token_ids.copy(),  # the runner appends to its own
        num_prompt_tokens=sequence.num_prompt_tokens,
        params=known.params,
        seed=sequence.seed,
        eos_token_ids=source.eos_token_ids,
        bad_words=source.bad_words,
    )
