"""Draws on the device: everything that a request can ask for, except logits processors.

    all rows          sample ── truncate ── write ─────────────────────────> outcome, tokens for the next step
    edited rows       edit ── sample ── truncate ── write in their place ───> "
    other log-probs   raw, processed, those of top tokens ───────────────────> outcome

Log-probs differ from those of a draw on the host by the bounds of `kernels.triton.sampling`.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import ModelRunnerOutput
from rollout_engine.kernels.row_stats import KeptTokens, RowStats
from rollout_engine.kernels.token_logprobs import logprobs_at
from rollout_engine.kernels.triton.entropy import row_figures
from rollout_engine.kernels.triton.logit_edits import edit
from rollout_engine.kernels.triton.outcome import Status, write_edited_outcomes, write_outcomes
from rollout_engine.kernels.triton.sampling import SamplingWorkspace, sample, score
from rollout_engine.kernels.triton.top_tokens import top_tokens
from rollout_engine.kernels.triton.truncation import truncate
from rollout_engine.model.cuda.draws import CudaDraws, DrawColumns, Draws, SpecialColumns
from rollout_engine.model.sampling.logit_rows import aligned_rows
from rollout_engine.model.sampling.sampler import BAD_LOGITS, NONE_LEFT, ranks_of

_NUM_COLUMNS = 4
"""Columns of `kernels.triton.outcome`; after them ids and log-probs of the top tokens, the drawn token's rank, and the
entropy of the row, each if any row asks."""
_EDITED_NUMEL = 1 << 25
"""Logits that are copied to be edited at a time: 128 MiB."""
_ERRORS = {Status.UNUSABLE: BAD_LOGITS, Status.NONE_LEFT: NONE_LEFT}


class DrawMemory(NamedTuple):
    """Memory of a draw from up to N rows."""

    workspace: SamplingWorkspace
    stats: RowStats
    outcome: Tensor
    """float64 [N, 4], see `kernels.triton.outcome`."""

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device) -> "DrawMemory":
        """Memory for up to `num_rows` rows of `vocab_size` logits."""
        outcome = torch.empty(num_rows, _NUM_COLUMNS, dtype=torch.float64, device=device)
        return cls(SamplingWorkspace.empty(num_rows, vocab_size, device), RowStats.empty(num_rows, device), outcome)

    def rows(self, count: int) -> "DrawMemory":
        """The memory of the first `count` rows."""
        workspace = SamplingWorkspace(*(part[:count] for part in self.workspace))
        return DrawMemory(workspace, RowStats(*(part[:count] for part in self.stats)), self.outcome[:count])


def draw_plainly(logits: Tensor, columns: DrawColumns[Tensor], memory: DrawMemory, last_tokens: Tensor) -> None:
    """Draw a token for each row of `logits` [N, V], without truncation; a graph may capture it.

    Fills `memory` of N rows, and `last_tokens` at the places of `columns`.
    """
    sample(logits, columns.rows, memory.workspace, memory.stats)
    write_outcomes(memory.stats, None, columns.truncates, memory.outcome, last_tokens, columns.places)


class CudaSampler:
    """Draws tokens, in memory that grows with the largest draw."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._all, self._some = (DrawMemory.empty(0, vocab_size, device) for _ in range(2))
        self._edited = torch.empty(0, device=device)

    def draw(self, logits: Tensor, draws: CudaDraws, last_tokens: Tensor, drawn: DrawMemory | None = None) -> Tensor:
        """Draw from `logits` [N, V]; write the tokens to `last_tokens`, int64, at the places of `draws`.

        Returns the columns for `to_output`: float64 [N, 4], with 1 + 2 x top tokens more if any are asked for, and one
        more for entropies. `drawn`: the memory of `draw_plainly` for the same logits and draws, if it has run.
        """
        count, columns = len(logits), draws.columns
        memory = drawn
        if memory is None:
            memory = self._all = _at_least(self._all, count, self._vocab_size, self._device)
            memory = memory.rows(count)
            if not draws.has_rules:
                draw_plainly(logits, columns, memory, last_tokens)
            else:
                sample(logits, columns.rows, memory.workspace, memory.stats)
        kept = None
        if draws.has_rules:
            kept = KeptTokens.empty(count, self._device)
            truncate(logits, columns.rows, columns.rules, memory.workspace, memory.stats, kept)
            write_outcomes(memory.stats, kept, columns.truncates, memory.outcome, last_tokens, columns.places)
        width = min(draws.num_top, logits.shape[1])
        top = _empty_top(count, width, self._device)
        ranks = torch.empty(count, 1, device=self._device)
        if draws.special is not None:
            self._draw_special(logits, draws, draws.special, memory, kept, top, ranks, last_tokens)
        elif width:
            top_tokens(logits, columns.temperatures, memory.workspace, memory.stats, *top)
            ranks[:, 0] = _ranks_of(logits, memory.stats)
        more = [column.double() for column in (*top, ranks)] if width else []
        if draws.has_entropies:  # of all rows: there is no list of those that ask on the device
            rows = torch.arange(count, device=self._device)
            more.append(row_figures(logits, rows, columns.temperatures)[:, 2:])
        return torch.cat([memory.outcome, *more], 1) if more else memory.outcome

    def _draw_special(
        self,
        logits: Tensor,
        draws: CudaDraws,
        special: SpecialColumns[Tensor],
        memory: DrawMemory,
        kept: KeptTokens | None,
        top: tuple[Tensor, Tensor],
        ranks: Tensor,
        last_tokens: Tensor,
    ) -> None:
        logprobs, *tops = self._draw_edited(logits, draws, special, memory, last_tokens, top[0].shape[1])
        _report(logits, draws.columns.temperatures, special, memory, kept, top)
        if top[0].shape[1]:
            ranks[:, 0] = _ranks_of(logits, memory.stats)
        if len(special.processed_edits):
            rows = special.edited[special.processed_edits]
            memory.outcome[rows, 1] = logprobs[special.processed_edits].double()
            for column, values in zip((*top, ranks), tops, strict=True):
                column[rows] = values[special.processed_edits]

    def _draw_edited(
        self,
        logits: Tensor,
        draws: CudaDraws,
        special: SpecialColumns[Tensor],
        memory: DrawMemory,
        last_tokens: Tensor,
        width: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Draw the edited rows; returns processed log-probs float32 [E], and top tokens and ranks if any row asks."""
        columns, num_edits = draws.edited, len(special.edited)
        logprobs, tops = torch.empty(num_edits, device=self._device), _empty_top(num_edits, width, self._device)
        ranks = torch.empty(num_edits, 1, device=self._device)
        size = aligned_rows(_EDITED_NUMEL // self._vocab_size)
        for start in range(0, num_edits, size):
            assert columns is not None
            index = slice(start, min(start + size, num_edits))
            part, rows = columns.part(index), special.edited[index]
            count = index.stop - start
            self._some = _at_least(self._some, count, self._vocab_size, self._device)
            some = self._some.rows(count)
            edited = self._edited_memory(count)[:, : logits.shape[1]]
            edit(logits, rows, special.records[index], last_tokens, part.places, part.positions, edited)
            sample(edited, part.rows, some.workspace, some.stats)
            kept = None
            if draws.has_rules:
                kept = KeptTokens.empty(count, self._device)
                truncate(edited, part.rows, part.rules, some.workspace, some.stats, kept)
            before = (logits, draws.columns.temperatures, memory.stats, rows)
            after = (edited, some.stats, some.workspace, kept, part.truncates)
            written = (*before, *after, memory.outcome, last_tokens, part.places)
            write_edited_outcomes(*written)
            if len(special.processed_edits):
                logprobs[index] = _logprobs(edited, part.temperatures, some.stats, kept)
                if width:
                    ids, values = (column[index] for column in tops)
                    top_tokens(edited, part.temperatures, some.workspace, some.stats, ids, values, kept)
                    ranks[index, 0] = _ranks_of(edited, some.stats)
        return logprobs, *tops, ranks

    def _edited_memory(self, count: int) -> Tensor:
        if len(self._edited) < count:
            self._edited = torch.empty(0, device=self._device)
            self._edited = torch.empty(count, -(-self._vocab_size // 4) * 4, device=self._device)
        return self._edited[:count]


def _report(
    logits: Tensor,
    temperatures: Tensor,
    special: SpecialColumns[Tensor],
    memory: DrawMemory,
    kept: KeptTokens | None,
    top: tuple[Tensor, Tensor],
) -> None:
    """Fill in raw and processed log-probs by the model's own logits, and the top tokens of all rows."""
    stats, seen = memory.stats, None
    if len(special.processed) and kept is not None:
        processed = _logprobs(logits, temperatures, stats, kept)
        memory.outcome[special.processed, 1] = processed[special.processed].double()
        seen = _whole(stats)
        for column, values in zip(seen, kept, strict=True):
            column[special.processed] = values[special.processed]
    if len(special.raw):
        some = logits[special.raw]
        raw = score(some, torch.ones(len(some), device=logits.device), stats.tokens[special.raw])
        memory.outcome[special.raw, 1] = raw.logprobs.double()
        temperatures = temperatures.index_fill(0, special.raw, 1.0)
        stats = stats._replace(log_total=stats.log_total.index_copy(0, special.raw, raw.log_total))
        if seen is not None:
            seen.log_total[special.raw] = raw.log_total
    if top[0].shape[1]:
        top_tokens(logits, temperatures, memory.workspace, stats, *top, seen)


def to_output(draws: Draws, drawn: Tensor) -> ModelRunnerOutput:
    """The result of `CudaSampler.draw`, copied to the host as `drawn`, as the runner returns it."""
    tokens, logprobs, statuses, mass = drawn[:, :_NUM_COLUMNS].t().tolist()
    out = ModelRunnerOutput(
        token_ids=[int(token) for token in tokens],
        logprobs=logprobs if draws.batch.wants_logprobs else None,
        kept_logprob_mass=torch.tensor(mass).tolist() if draws.has_rules else None,
    )
    if draws.has_entropies:
        out.entropies = np.where(draws.batch.wants_entropy, drawn[:, -1].float().numpy(), 0).astype(np.float32)
        drawn = drawn[:, :-1]
    if draws.num_top:
        out.top_logprobs, out.sampled_ranks = _top_columns(draws.batch.num_top, drawn)
    if min(statuses) != Status.DRAWN:
        out.errors = {row: _ERRORS[Status(int(s))] for row, s in enumerate(statuses) if s != Status.DRAWN}
        for row in out.errors:
            out.token_ids[row] = -1
    return out


def _at_least(memory: DrawMemory, count: int, vocab_size: int, device: torch.device) -> DrawMemory:
    if len(memory.outcome) >= count:
        return memory
    return DrawMemory.empty(1 << (count - 1).bit_length(), vocab_size, device)


def _whole(stats: RowStats) -> KeptTokens:
    """The result of a truncation that cuts nothing."""
    every = torch.full_like(stats.tokens, torch.iinfo(torch.int64).max)
    return KeptTokens(stats.log_total.clone(), torch.full_like(stats.maximum, -torch.inf), every)


def _ranks_of(logits: Tensor, stats: RowStats) -> Tensor:
    """Ranks of the drawn tokens; arbitrary if a row cannot be sampled."""
    return ranks_of(logits, stats.tokens.clamp(0, logits.shape[1] - 1)).float()


def _empty_top(count: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.empty(count, width, dtype=torch.int32, device=device), torch.empty(count, width, device=device)


def _logprobs(logits: Tensor, temperatures: Tensor, stats: RowStats, kept: KeptTokens | None) -> Tensor:
    """Log-probs float32 [N] of the drawn tokens, among the tokens that truncation keeps."""
    chosen = logits.gather(1, stats.tokens[:, None])[:, 0]
    log_total = stats.log_total if kept is None else kept.log_total
    return logprobs_at(chosen, stats.maximum, temperatures, log_total)


def _top_columns(num_top: np.ndarray, drawn: Tensor) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """Ids int32 and log-probs float32 [N, k] of top tokens, and ranks int32 [N] of the drawn ones.

    Rows that cannot be sampled or did not ask have -1, -inf and 0.
    """
    asked = (drawn[:, 2].numpy() == Status.DRAWN) & (num_top > 0)
    ids, logprobs = (part.numpy() for part in drawn[:, _NUM_COLUMNS:-1].chunk(2, dim=1))
    top = np.where(asked[:, None], ids, -1).astype(np.int32)
    top_logprobs = np.where(asked[:, None], logprobs, -np.inf).astype(np.float32)
    return (top, top_logprobs), np.where(asked, drawn[:, -1].numpy(), 0).astype(np.int32)
