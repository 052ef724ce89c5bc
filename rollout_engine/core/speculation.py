"""Speculative decoding: which tokens are drafted for which sequence, and whether that pays.

    decode row              [last token]                    one token drawn
    decode row with drafts  [last token, draft, draft, ..]  one token drawn behind each, up to the first that differs

A draw depends on the sequence's seed and the position alone, and no kernel's row depends on the others. So a token
drawn behind right drafts is the one that would have been drawn without them, with the same log-prob to the bit;
all that stands behind a wrong draft is dropped, and its KV overwritten.

Drafts are added if they shorten the work. A step of R rows takes the time of `CoreConfig.step_seconds`, measured
at load; on a device a step with drafts has no graph, and takes the time of `drafted_step_seconds`. A draft is right
as often as others were that had as many agreeing tokens before them. The draft that is likeliest to be right is added
first, and as many are added as give the most tokens a second. If not even drafts that are always right would give a
fifth more, no sequence is looked at; and if drafts are right too seldom, four at most are, in so few steps that it
takes no more than a four-hundredth of the time. That is decided once for sixteen steps, unless the batch becomes half
or twice as large; a step in which no sequence is looked at takes no time for drafts.
"""

import math

from rollout_engine.base.messages import ScheduledSequence
from rollout_engine.base.speculation_config import SpeculationConfig
from rollout_engine.core.block_tables import BlockTables
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.draft_choice import (
    LEAST_EXPECTED_GAIN,
    SECONDS_PER_TOKEN,
    Proposal,
    RightRates,
    StepCosts,
    choose,
)
from rollout_engine.core.draft_index import DraftIndex
from rollout_engine.core.draft_model import DraftModel
from rollout_engine.core.drafts import MAX_MATCH, Draft
from rollout_engine.core.executor import Executor
from rollout_engine.core.model_drafts import ModelDrafts
from rollout_engine.core.request import Sequence
from rollout_engine.core.step import Step

_LEAST_POSSIBLE_GAIN = 1.2
"""Tokens a second by drafts that are always right, over those without, below which sequences are not followed."""
_SECONDS_TO_FOLLOW = 10e-6
"""Host time for each sequence that is followed in a step."""
_SHARE_TO_PROBE = 0.0025
"""Share of the time that is spent on following sequences while drafts do not pay."""
_MAX_PROBED = 4
"""Sequences that are followed at once while drafts do not pay: enough to learn in one run of steps that they would."""
_STEPS_PER_CHOICE = 16
"""Steps of about the same size for which that is decided at once."""
_CHOICES_PER_LOOK = 8
"""While drafts do not pay, sequences are followed in one such run in that many: a step without costs nothing."""
_NUM_REMEMBERED = 64
"""Tokens over which the rate of all followed sequences is a mean."""
_MAX_MISSES = 4
"""Wrong tokens in a row after which a run is not followed any more."""


class Speculator:
    """Adds drafts to the decode rows of a scheduled step."""

    def __init__(
        self,
        config: CoreConfig,
        speculation: SpeculationConfig,
        tables: BlockTables,
        model: ModelDrafts | None = None,
    ) -> None:
        self._costs = StepCosts(config.step_seconds, config.drafted_step_seconds)
        self._tables = tables
        self._max_num_tokens = config.max_num_batched_tokens
        self._max_draft_tokens = speculation.max_draft_tokens
        self._shares = "rollouts" in speculation.sources
        self._uses_own = "ngram" in speculation.sources
        self.index = DraftIndex(speculation.max_rollout_tokens if self._shares else 0)
        self._uses_index = bool(speculation.sources)
        self._rates = _FollowedRates()
        self.model = model
        """Drafts of a small model, if there is one."""
        self._every = self._num_steps_left = 0
        """Which sequences are followed, and for how many more steps of about these sizes."""
        self._sizes = (0, 0)
        self._num_choices = 0
        """Since sequences were followed, while drafts do not pay."""
        self._weighed: tuple[int, int, float] | None = None
        self._pays, self._one_in = False, 0
        """The answer of `_weigh` for these sizes and this rate."""

    def add_drafts(self, step: Step, num_rows: int) -> None:
        """Extend decode rows by drafts, if that gives more tokens a second. No step may be in flight.

        `num_rows`: tokens that the step computes.
        """
        num_samples = len(step.work.samples)
        if not num_samples:
            return
        rows, samples = self._sizes
        is_near = rows < 2 * num_rows < 4 * rows and samples < 2 * num_samples < 4 * samples
        if not is_near or not self._num_steps_left:
            self._sizes, self._num_steps_left = (num_rows, num_samples), _STEPS_PER_CHOICE
            self._every = self._which_to_follow(num_rows, num_samples)
        self._num_steps_left -= 1
        if not self._every and self.model is None:
            return
        proposals = self._follow_rows(step) if self._every else []
        if self.model is not None:
            proposals = self.model.improve(proposals, step)
        for proposal, count in zip(proposals, self._choose(proposals, num_rows, num_samples), strict=True):
            step.draft_sources[proposal.sequence.sequence_id] = proposal.source
            self._extend(proposal.row, proposal.sequence, proposal.token_ids[:count])

    def _follow_rows(self, step: Step) -> list[Proposal]:
        """Drafts for the rows of the sequences that are followed."""
        proposals = []
        for row, sequence in step.decode_rows(self._every):
            if draft := self._draft(sequence):
                chances, source = self._chances(sequence, draft), source_of(sequence)
                proposals.append(Proposal(row, sequence, draft, chances, source))
        return proposals

    def end(self, sequence: Sequence) -> None:
        """Keep the tokens of a sequence that has ended, to draft from."""
        if sequence.draft is not None:
            if sequence.draft.prompt.key:
                self.index.close(sequence.draft.prompt)
            sequence.draft = None
        if self._shares and sequence.request.source.params.speculation:
            self.index.keep(sequence)
        if self.model is not None:
            self.model.end(sequence)

    def _which_to_follow(self, num_rows: int, num_samples: int) -> int:
        """1: every sequence; k: one in k; 0: none.

        If drafts do not pay, some sequences are followed now and then, to see whether they would be right.
        """
        if not self._uses_index:
            return 0
        weighed = (num_rows, num_samples, self._rates.mean)
        if weighed != self._weighed:
            self._weighed, (self._pays, self._one_in) = weighed, self._weigh(num_rows, num_samples)
        if self._pays or not self._one_in:
            return int(self._pays)
        num_choices = min(self._one_in, _CHOICES_PER_LOOK)
        self._num_choices = (self._num_choices + 1) % num_choices
        if self._num_choices:
            return 0
        return math.ceil(max(self._one_in / num_choices, num_samples / _MAX_PROBED))

    def _weigh(self, num_rows: int, num_samples: int) -> tuple[bool, int]:
        """Whether drafts pay; and k if one sequence in k may be followed all the time to see that, 0 for none."""
        if self._gain(1.0, num_rows, num_samples) < _LEAST_POSSIBLE_GAIN:
            return False, 0
        pays = self._gain(self._rates.mean, num_rows, num_samples) >= LEAST_EXPECTED_GAIN
        seconds = self._costs.of(num_rows) + SECONDS_PER_TOKEN * num_samples
        return pays, math.ceil(num_samples * _SECONDS_TO_FOLLOW / (_SHARE_TO_PROBE * seconds))

    def _gain(self, rate: float, num_rows: int, num_samples: int) -> float:
        """Tokens a second with drafts that are right at this rate, over those without."""
        most = min(self._max_draft_tokens, (self._max_num_tokens - num_rows) // num_samples)
        best = 0.0
        for num in (1, 2, 4, 8):
            if num <= most:
                gained = num_samples * (num + 1 if rate == 1 else (1 - rate ** (num + 1)) / (1 - rate))
                seconds = self._costs.with_drafts(num_rows + num * num_samples) + SECONDS_PER_TOKEN * gained
                best = max(best, gained / (seconds + _SECONDS_TO_FOLLOW * num_samples))
        return best * (self._costs.of(num_rows) + SECONDS_PER_TOKEN * num_samples) / num_samples

    def _draft(self, sequence: Sequence) -> list[int]:
        """The tokens that may follow, as far as the sequence may go."""
        draft = sequence.draft or self._start(sequence)
        if draft is None:
            return []
        if draft.num_seen < len(sequence.token_ids):
            self._follow(draft, sequence.token_ids)
        if draft.run < 0:
            return []
        room = min(self._max_draft_tokens, sequence.max_num_tokens - len(sequence.token_ids) - 1)
        return draft.prompt.runs[draft.run][draft.at : draft.at + room]

    def _start(self, sequence: Sequence) -> Draft | None:
        prompt = self.index.open(sequence.request, shared=self._shares)
        if prompt is None:
            return None
        own_run = prompt.add(sequence.token_ids)
        sequence.draft = Draft(prompt, own_run, num_seen=sequence.num_prompt_tokens)
        self._find(sequence.draft, sequence.token_ids)
        return sequence.draft

    def _follow(self, draft: Draft, tokens: list[int]) -> None:
        """Compare the sequence's new tokens with the run it follows, and find a better one behind a wrong token."""
        prompt, rates = draft.prompt, self._rates
        start, draft.num_seen = draft.num_seen, len(tokens)
        is_late = len(tokens) - start > self._max_draft_tokens + 1  # not looked at for a while
        if is_late:
            draft.run = -1
        run = prompt.runs[draft.run] if draft.run >= 0 else []
        for token in tokens[start:]:
            if draft.at >= len(run):
                if not is_late:
                    rates.miss()
                draft.run = -1
                break
            is_right = run[draft.at] == token
            rates.learn(draft.num_matched.bit_length(), is_right)
            draft.num_matched = min(draft.num_matched + 1, MAX_MATCH) if is_right else 0
            draft.num_misses = 0 if is_right else draft.num_misses + 1
            draft.at += 1
        prompt.runs[draft.own_run] = tokens  # another list, if these are its first
        if draft.run < 0 or not draft.num_matched:
            self._find(draft, tokens)
        prompt.index(draft.own_run, start)

    def _find(self, draft: Draft, tokens: list[int]) -> None:
        """Follow the best run behind `tokens`; without one, the run that was followed, one token on."""
        place = draft.prompt.find(tokens, () if self._uses_own else (0, draft.own_run))
        if place is not None:
            draft.run, draft.at, draft.num_matched = place
            draft.num_misses = 0
        elif draft.num_misses > _MAX_MISSES:
            draft.run = -1

    def _chances(self, sequence: Sequence, draft: list[int]) -> list[float]:
        """Return the probability, for each token of a draft, that it is right and so are all before it."""
        chances: list[float] = []
        chance, num_matched = 1.0, 0 if sequence.draft is None else sequence.draft.num_matched
        for _ in draft:
            chance *= self._rates.of(num_matched.bit_length())
            num_matched = min(num_matched + 1, MAX_MATCH)
            chances.append(chance)
        return chances

    def _choose(self, proposals: list[Proposal], num_rows: int, num_samples: int) -> list[int]:
        return choose(proposals, self._costs, num_rows, num_samples, self._max_num_tokens - num_rows)

    def _extend(self, row: ScheduledSequence, sequence: Sequence, draft: list[int]) -> None:
        """Add drafts to a row, with blocks for them; if blocks are short, as many as its own have room for.

        If slots of states are short, as many as there are.
        """
        tables, num_tokens = self._tables, len(sequence.token_ids)
        draft = draft[: tables.max_drafts]
        if not tables.fits(sequence, num_tokens + len(draft)):
            draft = draft[: max(sequence.num_writable_tokens - num_tokens, 0)]
        if not draft:
            return
        end = num_tokens + len(draft)
        if end > sequence.num_writable_tokens:
            copies, move = tables.extend(sequence, end)
            assert not copies and move is None, "its last block and its slot are its own by now"
            row.block_ids = sequence.block_ids[row.first_block :]
            sequence.num_sent_blocks = len(sequence.block_ids)
        row.draft_token_ids = draft
        row.num_scheduled_tokens += len(draft)
        tables.add_drafts(row, sequence)


def source_of(sequence: Sequence) -> str:
    """The source of the run that a sequence follows: its prompt and its own tokens are the n-grams."""
    draft = sequence.draft
    return "ngram" if draft is not None and draft.run in (0, draft.own_run) else "rollouts"


def speculator_of(config: CoreConfig, tables: BlockTables, executor: Executor) -> Speculator | None:
    """The speculator that `config` asks for; None if no token is drafted."""
    if config.speculation is None:
        return None
    model = None
    if config.draft is not None:
        model = ModelDrafts(
            DraftModel(executor.draft, num_blocks=config.draft.num_blocks, block_size=config.block_size),
            StepCosts(config.step_seconds),
            StepCosts(config.draft.step_seconds),
            max_model_len=config.draft.max_model_len,
            max_draft_tokens=config.speculation.max_draft_tokens,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )
    return Speculator(config, config.speculation, tables, model)


class _FollowedRates(RightRates):
    """Rates by the number of tokens before one that agree: 0, 1, 2-3, 4-7, 8-15, more."""

    def __init__(self) -> None:
        super().__init__(MAX_MATCH.bit_length() + 1)
        self.mean = 0.5
        """Rate of all tokens of sequences that are followed; if none was drafted, that counts as wrong."""

    def learn(self, kind: int, is_right: bool) -> None:
        super().learn(kind, is_right)
        self.mean += (is_right - self.mean) / _NUM_REMEMBERED

    def miss(self) -> None:
        """Count a token for which there was no draft."""
        self.mean -= self.mean / _NUM_REMEMBERED
