"""Draws one token per row of logits on the host, and computes its log-prob.

    every row         weights -> chunk sums -> one uniform finds the chunk, then the token     (`kernels.draw`)
    truncated rows    the same without weight for truncated tokens                            (`kernels.truncation`)
    masked rows       the same without weight for tokens that a grammar forbids                (`grammars.masks`)
    edited rows       the same from a float32 copy of the row, after penalties, bias, masks    (`row_edits`)
    greedy rows       argmax, lowest id on ties; log-probs as at temperature 1

The uniform depends on (sequence seed, position) and every row is computed alone, so a token does not depend on the rest
of the batch. Weights are those of `kernels.token_logprobs`, so the log-prob has the same bits at no extra cost.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.draw import Truncation, draw
from rollout_engine.kernels.rng import uniforms
from rollout_engine.kernels.row_stats import TokenMasks
from rollout_engine.kernels.token_logprobs import logprobs_at, row_blocks, row_stats, row_temperatures
from rollout_engine.kernels.truncation import is_kept, most_likely
from rollout_engine.messages import ModelRunnerOutput
from rollout_engine.model.sampling.row_edits import MaskedRows, RowEdits, edit
from rollout_engine.sampling_params import SamplingParams

_RAW, _PROCESSED = 1, 2
_MODE_CODES = {"tempered": 0, "raw": _RAW, "processed": _PROCESSED}
BAD_LOGITS = (
    "the logits of this sequence hold NaN or +inf, or nothing but -inf; the model's weights or inputs are broken."
)
NONE_LEFT = (
    "no token is left to sample: penalties, logit_bias, logits processors, allowed_token_ids, bad_words, "
    "structured_outputs and the stop ids held back before min_tokens leave none with a finite logit."
)
_EDITED_NUMEL = 1 << 23
"""Logits that are copied to be edited at a time."""
_NO_EDITS = RowEdits()


@dataclass(eq=False)
class SamplingBatch:
    """Sampling settings of N tasks as columns. What is derived from them is computed once, whatever the positions."""

    temperature: np.ndarray
    """float64 [N]; 0 is greedy."""
    top_k: np.ndarray
    """int64 [N]; 0 keeps all. Greedy rows ignore top_k, top_p and min_p."""
    top_p: np.ndarray
    """float64 [N]."""
    min_p: np.ndarray
    """float64 [N]."""
    seeds: np.ndarray
    """int64 [N], the bit patterns of the unsigned sequence seeds."""
    positions: np.ndarray
    """int64 [N], index of the token to draw in its sequence, prompt included."""
    modes: np.ndarray
    """int8 [N], codes of `SamplingParams.logprobs_mode`."""
    num_top: np.ndarray
    """int64 [N], how many most likely tokens to report."""
    wants_rank: np.ndarray
    """bool [N], whether to report the sampled token's rank."""
    wants_logprobs: bool
    """Whether any task asked for log-probs."""
    asked_ids: Mapping[int, list[int] | None] = field(default_factory=dict)
    """Row -> token ids whose log-probs to report, None for all; rows that did not ask are absent."""

    @classmethod
    def from_tasks(cls, params: list[SamplingParams], seeds: list[int], positions: list[int]) -> "SamplingBatch":
        """Columns of N tasks."""
        distinct = {id(p): p for p in params}  # requests of one call share theirs
        place = {key: i for i, key in enumerate(distinct)}
        row = np.array([place[id(p)] for p in params], np.intp)

        def column(dtype: type, values: Iterable[object]) -> np.ndarray:
            return np.array(list(values), dtype)[row]

        kinds = distinct.values()
        return cls(
            temperature=column(np.float64, (p.temperature for p in kinds)),
            top_k=column(np.int64, (p.top_k for p in kinds)),
            top_p=column(np.float64, (p.top_p for p in kinds)),
            min_p=column(np.float64, (p.min_p for p in kinds)),
            seeds=np.array(seeds, np.uint64).view(np.int64),
            positions=np.array(positions, np.int64),
            modes=column(np.int8, (_MODE_CODES[p.logprobs_mode] for p in kinds)),
            num_top=column(np.int64, (p.num_top_logprobs for p in kinds)),
            wants_rank=column(np.bool_, (p.wants_ranks for p in kinds)),
            wants_logprobs=any(p.logprobs is not None for p in kinds),
            asked_ids=_asked_ids(params) if any(p.asks_for_ids for p in kinds) else {},
        )

    @cached_property
    def truncates(self) -> np.ndarray:
        """bool [N]: rows that top-k, top-p or min-p may truncate."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    @cached_property
    def is_raw(self) -> np.ndarray:
        """bool [N]: rows whose log-probs are raw and differ from tempered ones."""
        return (self.modes == _RAW) & (self.temperature != 0) & (self.temperature != 1)

    @cached_property
    def is_processed(self) -> np.ndarray:
        """bool [N]: rows whose log-probs are of the distribution they are drawn from."""
        return self.modes == _PROCESSED

    @cached_property
    def is_plain(self) -> bool:
        """Whether each row asks for nothing but a token and its tempered log-prob."""
        return not (self.wants_rank | self.is_processed | self.is_raw).any() and not self.asked_ids

    @cached_property
    def greedy(self) -> Tensor:
        """bool [N]: rows that take the most likely token."""
        return torch.from_numpy(self.temperature == 0)

    @cached_property
    def row_temperatures(self) -> Tensor:
        """float32 [N], of the log-probs."""
        given = torch.from_numpy(self.temperature)
        return row_temperatures(given, given[:, None])

    @cached_property
    def rules(self) -> Truncation | None:
        """The truncation of each row; None where no row is truncated."""
        truncates = self.truncates
        if not truncates.any():
            return None
        columns = ((self.temperature, 1.0), (self.top_k, 0), (self.top_p, 1.0), (self.min_p, 0.0))
        return Truncation(*(torch.from_numpy(np.where(truncates, column, idle)) for column, idle in columns))

    def rows(self, index: np.ndarray) -> "SamplingBatch":
        """The settings of rows `index`, int64 [n]."""
        columns = (getattr(self, each.name)[index] for each in fields(self)[:-2])
        asked = {place: self.asked_ids[row] for place, row in enumerate(index.tolist()) if row in self.asked_ids}
        return SamplingBatch(*columns, self.wants_logprobs, asked)

    def at(self, positions: np.ndarray) -> "SamplingBatch":
        """The same tasks at other `positions`, int64 [N]."""
        moved = copy(self)
        moved.positions = positions
        return moved


def sample(logits: Tensor, batch: SamplingBatch, edits: RowEdits = _NO_EDITS) -> ModelRunnerOutput:
    """Draw one token for each row of `logits` [N, V], any floating dtype; `batch` has N rows, `edits` some of them.

    A row that cannot be sampled (NaN, +inf, nothing but -inf) gets token -1 and an entry in `errors`.
    """
    temperatures, greedy, rules = batch.row_temperatures, batch.greedy, batch.rules
    u = uniforms(torch.from_numpy(batch.seeds), torch.from_numpy(batch.positions))
    masks, failed = (None, {}) if edits.masked is None else _token_masks(edits.masked, len(u))
    tempered, processed, tokens, logprobs = _draw(logits, temperatures, u, greedy, rules, masks)
    usable = np.isfinite(tempered.maximum.numpy())
    if masks is not None:
        failed |= dict.fromkeys((~np.isfinite(processed.log_total.numpy())).nonzero()[0].tolist(), NONE_LEFT)
    is_simple = batch.is_plain and not edits.copied and not failed and usable.all()
    if is_simple and rules is None:
        return ModelRunnerOutput(tokens.tolist(), logprobs.tolist() if batch.wants_logprobs else None)
    truncates = torch.from_numpy(batch.truncates)
    kept_mass = torch.where(truncates, (processed.log_total - tempered.log_total).clamp(max=0), 0.0).float()
    if is_simple:
        return ModelRunnerOutput(
            token_ids=tokens.tolist(),
            logprobs=logprobs.tolist() if batch.wants_logprobs else None,
            kept_logprob_mass=kept_mass.tolist(),
        )

    errors = failed | dict.fromkeys((~usable).nonzero()[0].tolist(), BAD_LOGITS)
    out = _Columns(batch, tokens, kept_mass, errors)
    for rows in _slices([row for row in edits.copied if usable[row]], logits.shape[1]):
        changed = logits.index_select(0, rows).float()
        failures = edit(changed, [edits[row] for row in rows.tolist()])
        inside = None if rules is None else rules.rows(rows)
        _, left, out.tokens[rows], _ = _draw(changed, temperatures[rows], u[rows], greedy[rows], inside)
        out.fail(rows, left, failures)
        if left.edges is not None:
            cut = truncates[rows].nonzero()[:, 0]
            edges = left.edges[0][cut], left.edges[1][cut]
            out.kept_mass[rows[cut]] = _mass_left(changed[cut], edges, tempered, rows[cut])
        out.fill_processed(rows, left)
    if batch.is_plain and not out.errors:
        out.fill_tempered(tempered)
    else:
        for view in _views(batch, tempered, processed, list(edits.copied)):
            out.fill(view)
    return out.finish(rules is not None)


class _Distribution(NamedTuple):
    """Normalised rows: token t of row i has log-prob (logits[i, t] - maximum[i]) / temperatures[i] - log_total[i]."""

    logits: Tensor  # [n, V]
    temperatures: Tensor  # float32 [n]
    maximum: Tensor  # float32 [n]
    log_total: Tensor  # float64 [n]
    edges: tuple[Tensor, Tensor] | None  # (floor, last tie) [n]: tokens beyond have log-prob -inf

    def logprobs(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """float32 [r, k] of `token_ids` [r, k] in `rows` [r]."""
        row = rows[:, None]
        logits = self.logits[row, token_ids]
        result = logprobs_at(logits, self.maximum[row], self.temperatures[row], self.log_total[row])
        if self.edges is None:
            return result
        return result.where(is_kept(logits.float(), token_ids, *(edge[rows] for edge in self.edges)), -torch.inf)


class _View(NamedTuple):
    """Rows of the batch whose log-probs come from `rows_inside` of `distribution`."""

    rows: Tensor
    rows_inside: Tensor
    distribution: _Distribution


def _token_masks(masked: MaskedRows, num_rows: int) -> tuple[TokenMasks, dict[int, str]]:
    """The masks of N rows, and row -> why it cannot be sampled."""
    masks, failures = masked.fill()
    places = np.full(num_rows, -1)
    places[masked.rows] = masked.places
    return TokenMasks(torch.from_numpy(masks.view(np.int32)), torch.from_numpy(places)), failures


def _draw(
    logits: Tensor,
    temperatures: Tensor,
    u: Tensor,
    greedy: Tensor,
    rules: Truncation | None,
    masks: TokenMasks | None = None,
) -> tuple[_Distribution, _Distribution, Tensor, Tensor]:
    """(whole rows, what may be drawn of them, tokens int64 [N], their log-probs in whole rows float32 [N])."""
    stats, kept = draw(logits, temperatures, u, greedy, rules, masks)
    whole = _Distribution(logits, temperatures, stats.maximum, stats.log_total, None)
    left = whole if kept is None else whole._replace(log_total=kept.log_total, edges=(kept.floor, kept.last_tie))
    return whole, left, stats.tokens, stats.logprobs


class _Columns:
    """Results of the N rows, filled view by view."""

    def __init__(self, batch: SamplingBatch, tokens: Tensor, kept_mass: Tensor, errors: dict[int, str]) -> None:
        self._batch = batch
        self.tokens = tokens
        self.kept_mass = kept_mass
        self.errors = errors
        self._logprobs = torch.zeros(len(tokens))
        self._num_top = torch.from_numpy(batch.num_top)
        self._wants_rank = torch.from_numpy(batch.wants_rank)
        self._ranks = torch.zeros(len(tokens), dtype=torch.int32)
        self._id_logprobs: dict[int, np.ndarray] = {}
        shape = len(tokens), int(batch.num_top.max())
        self._top_ids, self._top_logprobs = torch.full(shape, -1), torch.full(shape, -torch.inf)

    def fail(self, rows: Tensor, left: _Distribution, failures: dict[int, str]) -> None:
        """Record edited `rows` that cannot be sampled: `failures` by index, and rows with nothing `left`."""
        dead = (~left.maximum.isfinite()).nonzero()[:, 0].tolist()
        found = dict.fromkeys(dead, NONE_LEFT) | failures
        self.errors |= {int(rows[place]): message for place, message in found.items()}

    def fill_processed(self, rows: Tensor, left: _Distribution) -> None:
        """Fill the edited `rows` whose log-probs are of the distribution they were drawn from."""
        places = torch.from_numpy(self._batch.is_processed)[rows].nonzero()[:, 0]
        self.fill(_View(rows[places], places, left))

    def fill_tempered(self, whole: _Distribution) -> None:
        """Fill tempered log-probs of the drawn tokens in all rows, which ask for nothing else."""
        self._logprobs = whole.logprobs(torch.arange(len(self.tokens)), self.tokens[:, None])[:, 0]

    def fill(self, view: _View) -> None:
        """Fill log-probs and ranks of the drawn tokens, and log-probs of top and requested tokens, in the rows of
        `view` that can be sampled."""
        sound = torch.tensor([row not in self.errors for row in view.rows.tolist()], dtype=torch.bool)
        rows, inside = view.rows[sound], view.rows_inside[sound]
        self._logprobs[rows] = view.distribution.logprobs(inside, self.tokens[rows, None])[:, 0]
        self._fill_asked(rows, inside, view.distribution)
        wanted = self._wants_rank[rows]
        rows, inside = rows[wanted], inside[wanted]
        for block in row_blocks(view.distribution.logits) if len(rows) else ():
            self._ranks[rows[block]] = ranks_of(view.distribution.logits[inside[block]], self.tokens[rows[block]])
        wanted = self._num_top[rows] > 0
        rows, inside = rows[wanted], inside[wanted]
        if len(rows):
            width = min(self._top_ids.shape[1], view.distribution.logits.shape[1])
            top = most_likely(view.distribution.logits[inside], width)
            self._top_ids[rows, :width] = top
            self._top_logprobs[rows, :width] = view.distribution.logprobs(inside, top)

    def _fill_asked(self, rows: Tensor, inside: Tensor, distribution: _Distribution) -> None:
        asked = self._batch.asked_ids
        for row, place in zip(rows.tolist(), inside, strict=True) if asked else ():
            if row in asked:
                ids = asked[row]
                chosen = torch.arange(distribution.logits.shape[1]) if ids is None else torch.tensor(ids)
                self._id_logprobs[row] = distribution.logprobs(place[None], chosen[None])[0].numpy()

    def finish(self, truncated: bool) -> ModelRunnerOutput:
        """The result, with the columns that any row asks for."""
        self.tokens[list(self.errors)] = -1
        return ModelRunnerOutput(
            token_ids=self.tokens.tolist(),
            logprobs=self._logprobs.tolist() if self._batch.wants_logprobs else None,
            kept_logprob_mass=self.kept_mass.tolist() if truncated else None,
            top_logprobs=(self._top_ids.int().numpy(), self._top_logprobs.numpy()) if self._num_top.any() else None,
            errors=self.errors,
            sampled_ranks=self._ranks.numpy() if self._wants_rank.any() else None,
            id_logprobs=self._id_logprobs,
        )


def ranks_of(logits: Tensor, token_ids: Tensor) -> Tensor:
    """int32 [n]: rank of `token_ids` [n] among `logits` [n, V]; 1 is the largest, ties go to the lowest id."""
    own = logits.gather(1, token_ids[:, None])
    ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    before = (logits > own) | ((logits == own) & (ids < token_ids[:, None].int()))
    return before.sum(1, dtype=torch.int32) + 1


def _asked_ids(params: list[SamplingParams]) -> dict[int, list[int] | None]:
    asked = ((row, None if p.logprobs == -1 else p.logprob_token_ids) for row, p in enumerate(params) if p.asks_for_ids)
    return dict(asked)


def _slices(rows: list[int], vocab_size: int) -> Iterator[Tensor]:
    """Split `rows` so that a bounded number of logits is edited at a time."""
    size = max(1, _EDITED_NUMEL // vocab_size)
    return (torch.tensor(rows[start : start + size]) for start in range(0, len(rows), size))


def _mass_left(logits: Tensor, edges: tuple[Tensor, Tensor], whole: _Distribution, rows: Tensor) -> Tensor:
    """Log of the mass, float32 [n], that `rows` of `whole` give to the edited `logits` [n, V] within `edges`."""
    floor, last_tie = edges
    place, ids = ((logits >= floor[:, None]) & (logits > -torch.inf)).nonzero(as_tuple=True)
    kept = (logits[place, ids] > floor[place]) | (ids <= last_tie[place])
    place, ids = place[kept], ids[kept]
    logprobs = whole.logprobs(rows[place], ids[:, None])[:, 0].double().numpy()
    counts = np.bincount(place.numpy(), minlength=len(rows))
    some = counts > 0  # none where the row cannot be sampled
    starts = (np.cumsum(counts) - counts)[some]
    masses = np.zeros(len(rows))
    if len(starts):
        top = np.maximum.reduceat(logprobs, starts)
        masses[some] = top + np.log(np.add.reduceat(np.exp(logprobs - np.repeat(top, counts[some])), starts))
    return torch.from_numpy(masses).clamp(max=0).float()


def _views(
    batch: SamplingBatch, tempered: _Distribution, processed: _Distribution, edited_rows: list[int]
) -> Iterator[_View]:
    """The distribution that each row's log-prob mode asks for, except for edited rows in mode "processed"."""
    is_raw, is_processed = torch.from_numpy(batch.is_raw), torch.from_numpy(batch.is_processed)
    is_edited = torch.zeros_like(is_raw)
    is_edited[edited_rows] = True
    plain, raw, kept = (
        which.nonzero()[:, 0] for which in (~(is_raw | is_processed), is_raw, is_processed & ~is_edited)
    )
    yield _View(plain, plain, tempered)
    yield _View(kept, kept, processed)
    if len(raw):
        logits, ones = tempered.logits[raw], torch.ones(len(raw))
        stats = row_stats(logits, ones, torch.zeros_like(raw))
        yield _View(raw, torch.arange(len(raw)), _Distribution(logits, ones, stats.maximum, stats.log_total, None))
