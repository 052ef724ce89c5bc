"""When a draft model is run, for which sequences and how far: as it gives more tokens a second.

A drafted token costs a step of the draft model for the sequences that are drafted together, and a row of the policy's
step; both were measured at load. How often a token is right is learned, by the probability that the draft model gave
it. The model is run if drafts pay by the mean of that, and stops when one more token for the likeliest would not.

    first use of a sequence   its prompt is computed once the drafts that it went without would have saved as much
    drafts do not pay         one token is drafted now and then, in a two-hundredth of the time at most, and compared
                              with the drawn token: nothing else is computed
    it raises                 it is not run any more, until its weights are sent again; requests continue without drafts
"""

import logging
from bisect import bisect_right
from itertools import islice
from typing import NamedTuple

from rollout_engine.core.draft_choice import (
    LEAST_EXPECTED_GAIN,
    SECONDS_PER_TOKEN,
    Proposal,
    RightRates,
    StepCosts,
    choose,
)
from rollout_engine.core.draft_model import CHUNK, SHORT, DraftModel
from rollout_engine.core.request import Sequence
from rollout_engine.core.step import Step

logger = logging.getLogger("rollout_engine")

_SECONDS_PER_ROUND = 200e-6
"""Host time to begin a round and to end it."""
_SECONDS_PER_DRAFT = 20e-6
"""Host time for each drafted token."""
_SHARE_TO_PROBE = 0.005
"""Share of the time that is spent on drafts while they do not pay."""
_NUM_CANDIDATES = 4
"""Sequences of a step that are looked at for that."""
_STEPS_PER_CHOICE = 16
_LOGPROBS = (-3.0, -2.0, -1.0, -0.5, -0.1)
"""Bounds of the kinds of drafted tokens."""
_ANY = len(_LOGPROBS) + 1
"""The kind of all tokens."""


class _Judged(NamedTuple):
    """A draft that waits to be compared with the drawn tokens."""

    sequence: Sequence
    start: int
    """Tokens that the sequence had before it."""
    drafted: list[tuple[int, int]]
    """Token id and kind."""


class ModelDrafts:
    """Decides about the drafts of a model, and learns how often they are right."""

    def __init__(
        self,
        model: DraftModel,
        costs: StepCosts,
        draft_costs: StepCosts,
        *,
        max_model_len: int,
        max_draft_tokens: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._model, self._costs, self._draft_costs = model, costs, draft_costs
        self._max_model_len = max_model_len
        self._max_draft_tokens, self._max_num_tokens = max_draft_tokens, max_num_batched_tokens
        self._judged: list[_Judged] = []
        self._credits: dict[int, float] = {}
        """Sequence id -> seconds that drafts would have saved it, as long as the model has not computed its tokens."""
        self.reset()

    def reset(self) -> None:
        """Begin anew: the model has other weights, or has lost its KV."""
        self._model.clear()
        self._rates = RightRates(_ANY + 1)
        self._allowance = 0.0
        """Seconds for probes."""
        self._probe_seconds = 0.0
        """The least that the next one takes."""
        self._judged.clear()
        self._sizes, self._may_pay, self._num_steps_left = (0, 0), False, 0
        self.is_off = False
        """It has raised."""

    def release(self, *, forget: bool) -> None:
        """The model's KV is gone; `forget`: so are its weights, until others are sent."""
        self._model.clear()
        self.is_off |= forget

    def end(self, sequence: Sequence) -> None:
        """Release the state of a sequence that has ended."""
        self._model.end(sequence.sequence_id)
        self._credits.pop(sequence.sequence_id, None)

    def improve(self, proposals: list[Proposal], step: Step) -> list[Proposal]:
        """Add drafts of the model for rows without one, or with one that is less likely to be right."""
        if self.is_off:
            return proposals
        if self._judged:
            self._judge()
        num_rows, num_samples = step.work.num_scheduled_tokens, len(step.work.samples)
        if (num_rows, num_samples) != self._sizes or not self._num_steps_left:
            self._sizes, self._num_steps_left = (num_rows, num_samples), _STEPS_PER_CHOICE
            self._may_pay = self._gain(num_samples, num_rows, float(num_samples)) >= LEAST_EXPECTED_GAIN
        self._num_steps_left -= 1
        try:
            if self._may_pay:
                return self._draft(proposals, step)
            self._allowance += _SHARE_TO_PROBE * self._costs.of(num_rows)
            if self._allowance >= self._probe_seconds:
                self._probe(step)
        except Exception as error:
            self._model.clear()
            self.is_off = True
            logger.warning("The draft model failed, and drafts no more until its weights are sent.", exc_info=error)
        return proposals

    def _draft(self, proposals: list[Proposal], step: Step) -> list[Proposal]:
        mean = self._rates.of(_ANY)
        kept = [each for each in proposals if each.chances[0] >= mean]
        has_draft = {each.sequence.sequence_id for each in kept}
        rows = {s.sequence_id: (row, s) for row, s in step.decode_rows() if s.sequence_id not in has_draft}
        num_rows, num_samples = step.work.num_scheduled_tokens, len(step.work.samples)
        counts = choose(kept, self._costs, num_rows, num_samples, self._max_num_tokens - num_rows)
        tokens = num_samples + sum(sum(each.chances[:num]) for each, num in zip(kept, counts, strict=True))
        num_rows += sum(counts)
        gain = self._gain(len(rows), num_rows, tokens)
        if gain < LEAST_EXPECTED_GAIN:
            return proposals
        saved = (1 - 1 / gain) * self._costs.with_drafts(num_rows) / len(rows)
        sequences = [s for _, s in rows.values() if self._is_worth_beginning(s, saved)]
        sequences = self._model.begin(sequences[: self._max_num_tokens - num_rows]) if sequences else []
        mine = self._extend(
            [Proposal(*rows[s.sequence_id], [], [], "draft_model") for s in sequences], num_rows, tokens
        )
        drafted = {each.sequence.sequence_id for each in mine}
        return mine + [each for each in proposals if each.sequence.sequence_id not in drafted]

    def _is_worth_beginning(self, sequence: Sequence, saved: float) -> bool:
        """Whether the model has a sequence's tokens, or is to compute them now: drafts save `saved` seconds a step."""
        if self._room(sequence) < 1:
            return False
        num_missing = self._model.num_missing(sequence)
        if num_missing <= SHORT:
            self._credits.pop(sequence.sequence_id, None)
            return True
        credit = self._credits.get(sequence.sequence_id, 0.0) + saved
        self._credits[sequence.sequence_id] = credit
        seconds = self._draft_costs.of(num_missing)
        return credit >= seconds and saved * (sequence.max_num_tokens - len(sequence.token_ids)) > seconds

    def _extend(self, proposals: list[Proposal], num_rows: int, tokens: float) -> list[Proposal]:
        """Draw drafts as long as they give more tokens a second than `num_rows` rows for `tokens` tokens."""
        drafted: dict[int, list[tuple[int, int]]] = {each.sequence.sequence_id: [] for each in proposals}
        active, spent = proposals, _SECONDS_PER_ROUND
        while active:
            spent += self._seconds_to_draft(len(active))
            can_go_on = []
            for each, found in zip(active, self._model.draw([each.sequence for each in active]), strict=True):
                if found is None:
                    continue
                kind = bisect_right(_LOGPROBS, found.logprob)
                drafted[each.sequence.sequence_id].append((found.token_id, kind))
                if found.token_id in each.sequence.request.end_token_ids:
                    continue  # it would be drawn behind the tokens before it anyway
                each.token_ids.append(found.token_id)
                each.chances.append((each.chances[-1] if each.chances else 1.0) * self._rates.of(kind))
                num_rows, tokens = num_rows + 1, tokens + each.chances[-1]
                if len(each.token_ids) < self._room(each.sequence):
                    can_go_on.append(each)
            active = self._worth_going_on(can_go_on, num_rows, tokens, spent)
        for each in proposals:
            sequence = each.sequence
            self._judged.append(_Judged(sequence, len(sequence.token_ids), drafted[sequence.sequence_id]))
        return [each for each in proposals if each.token_ids]

    def _room(self, sequence: Sequence) -> int:
        """Most tokens that may be drafted for a sequence; not more than 0 if none may."""
        num_tokens = len(sequence.token_ids)
        longest = min(sequence.max_num_tokens - 1, self._max_model_len)
        return min(self._max_draft_tokens, longest - num_tokens)

    def _worth_going_on(self, proposals: list[Proposal], num_rows: int, tokens: float, spent: float) -> list[Proposal]:
        """The likeliest drafts, as many as are worth one more token each."""
        mean, seconds = self._rates.of(_ANY), self._costs.with_drafts(num_rows)
        rate = tokens / (seconds + SECONDS_PER_TOKEN * tokens + spent)
        proposals = sorted(proposals, key=lambda each: -each.chances[-1])[: max(self._max_num_tokens - num_rows, 0)]
        gained, best, num_worth = 0.0, 0.0, 0
        for num, each in enumerate(proposals, start=1):
            gained += each.chances[-1] * mean
            extra = (
                self._costs.with_drafts(num_rows + num)
                - seconds
                + SECONDS_PER_TOKEN * gained
                + self._seconds_to_draft(num)
            )
            if gained - rate * extra > best:
                best, num_worth = gained - rate * extra, num
        return proposals[:num_worth]

    def _gain(self, num_drafting: int, num_rows: int, tokens: float) -> float:
        """Tokens a second with drafts for `num_sequences`, over those without, `tokens` a step."""
        rate, best = self._rates.of(_ANY), 0.0
        for num in (1, 2, 4, 8):
            if num_drafting and num <= min(self._max_draft_tokens, (self._max_num_tokens - num_rows) // num_drafting):
                gained = tokens + num_drafting * sum(rate**place for place in range(1, num + 1))
                seconds = self._costs.with_drafts(num_rows + num * num_drafting) + SECONDS_PER_TOKEN * gained
                seconds += _SECONDS_PER_ROUND + num * self._seconds_to_draft(num_drafting)
                best = max(best, gained / seconds)
        return best * (self._costs.of(num_rows) + SECONDS_PER_TOKEN * tokens) / tokens

    def _seconds_to_draft(self, num_sequences: int) -> float:
        """Seconds to draft one token for each of `num_sequences`."""
        return self._draft_costs.of(num_sequences) + _SECONDS_PER_DRAFT * num_sequences

    def _probe(self, step: Step) -> None:
        """Draft one token for one sequence, if there is time for that, to see whether it would be right."""
        candidates = [s for _, s in islice(step.decode_rows(), _NUM_CANDIDATES) if self._room(s) > 0]
        if not candidates:
            return
        missing = {s.sequence_id: min(self._model.num_missing(s), CHUNK) for s in candidates}
        sequence = min(candidates, key=lambda s: missing[s.sequence_id])
        self._probe_seconds = _SECONDS_PER_ROUND + self._seconds_to_draft(missing[sequence.sequence_id])
        if self._allowance < self._probe_seconds:
            return
        self._allowance -= self._probe_seconds
        for ready in self._model.begin([sequence]):
            [found] = self._model.draw([ready])
            if found is not None:
                drafted = [(found.token_id, bisect_right(_LOGPROBS, found.logprob))]
                self._judged.append(_Judged(sequence, len(sequence.token_ids), drafted))

    def _judge(self) -> None:
        """Compare drafts with the tokens that were drawn since."""
        for sequence, start, drafted in self._judged:
            tokens = sequence.token_ids
            for place, (token_id, kind) in enumerate(drafted, start=start):
                if place >= len(tokens):
                    break
                is_right = tokens[place] == token_id
                self._rates.learn(kind, is_right)
                self._rates.learn(_ANY, is_right)
                if not is_right:
                    break
        self._judged.clear()
