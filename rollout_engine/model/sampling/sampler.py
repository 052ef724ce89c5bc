"""Draws one token per row of logits on the host, and computes its log-prob.

    every row         weights -> chunk sums -> one uniform finds the chunk, then the token     (`kernels.draw`)
    truncated rows    the same without weight for truncated tokens                            (`kernels.truncation`)
    restricted rows   the same; again, by another uniform and without weight for tokens that the grammar forbids, if
                      it refuses the token; only so if the row is truncated too               (`grammars.masks`)
    edited rows       the same from a float32 copy of the row, after penalties, bias, masks    (`row_edits`)
    greedy rows       argmax, lowest id on ties; log-probs as at temperature 1
    supports          the tokens inside the edges that a draw has found, of rows that ask                  (`supports`)

The uniforms depend on (sequence seed, position) and every row is computed alone, so a token does not depend on the rest
of the batch. Weights are those of `kernels.token_logprobs`, so the log-prob has the same bits at no extra cost.

A token that is drawn from the whole row and kept if it is allowed, or else drawn from the allowed tokens, has the
probability p + (1 - a) p / a = p / a, a being the total probability of allowed tokens: that of a draw from them alone.
So the grammar is asked for one token, and for a mask only if it refuses that.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import ModelRunnerOutput
from rollout_engine.kernels.draw import draw, prepare, redraw
from rollout_engine.kernels.row_stats import KeptTokens, RowStats, TokenMasks, Truncation, UniformsOf
from rollout_engine.kernels.token_logprobs import logprobs_at, row_blocks, row_stats
from rollout_engine.kernels.truncation import is_kept, most_likely
from rollout_engine.model.sampling.row_edits import MaskedRows, RowEdits, edit
from rollout_engine.model.sampling.sampling_batch import SamplingBatch
from rollout_engine.model.sampling.supports import Supports

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
_SECOND_DRAW = 1 << 62
"""Added to a position for the uniform of a second draw, as in sampling.cpp."""


def sample(
    logits: Tensor, batch: SamplingBatch, edits: RowEdits = _NO_EDITS, drawn: Tensor | None = None
) -> ModelRunnerOutput:
    """Draw one token for each row of `logits` [N, V], any floating dtype; `batch` has N rows, `edits` some of them.

    A row that cannot be sampled (NaN, +inf, nothing but -inf) gets token -1 and an entry in `errors`. `drawn`: the
    tokens int64 [N] that a device has drawn from whole rows, for those of `edits` that grammars restrict.
    """
    if not batch.wants_any_support:
        return _sample(logits, batch, edits, drawn, None)
    supports = Supports(batch.wants_support)
    out = _sample(logits, batch, edits, drawn, supports)
    out.supports = supports.finish(out.errors)
    return out


def _sample(
    logits: Tensor, batch: SamplingBatch, edits: RowEdits, drawn: Tensor | None, supports: Supports | None
) -> ModelRunnerOutput:
    """`sample`, which adds to `supports` the tokens that were left of truncated and of edited rows."""
    if drawn is None and (whole := _sample_whole_rows(logits, batch, edits)) is not None:
        return whole
    first = rows = _Rows(logits, batch.row_temperatures, batch.uniforms, batch.greedy, batch.rules)
    tries_first = edits.tries_first(batch.truncates)
    if rows.rules is not None and edits.restricted:
        first = rows._replace(rules=batch.rules_of(batch.truncates & ~edits.is_restricted(len(tries_first))))
    stats, kept = draw(*first)
    if drawn is not None:
        stats.tokens[tries_first] = drawn[tries_first]
    failed = {} if edits.masked is None else _restrict(rows, edits.masked, tries_first, stats, kept)
    tempered, processed = _distributions(rows, stats, kept)
    tokens = stats.tokens
    usable = np.isfinite(stats.maximum.numpy())
    is_simple = batch.is_plain and not edits.copied and not failed and usable.all()
    if supports is not None and kept is not None:
        _add_truncated(supports, logits, batch, edits, kept)
    if is_simple and kept is None:
        return ModelRunnerOutput(tokens.tolist(), stats.logprobs.tolist() if batch.wants_logprobs else None)
    truncates = torch.from_numpy(batch.truncates)
    kept_mass = torch.where(truncates, (processed.log_total - tempered.log_total).clamp(max=0), 0.0).float()
    if is_simple:
        return ModelRunnerOutput(
            token_ids=tokens.tolist(),
            logprobs=stats.logprobs.tolist() if batch.wants_logprobs else None,
            kept_logprob_mass=kept_mass.tolist(),
        )

    errors = failed | dict.fromkeys((~usable).nonzero()[0].tolist(), BAD_LOGITS)
    out = _Columns(batch, tokens, kept_mass, errors)
    if edits.copied:
        rows = rows.for_second_draws(tries_first)
    for index in _slices([row for row in edits.copied if usable[row]], logits.shape[1]):
        some = rows.at(index)
        failures = edit(some.logits, [edits[row] for row in index.tolist()])
        found, edges = draw(*some)
        _, left = _distributions(some, found, edges)
        is_allowed = some.logits.gather(-1, tokens[index, None])[:, 0] > -torch.inf
        out.tokens[index] = tokens[index].where(torch.from_numpy(tries_first)[index] & is_allowed, found.tokens)
        out.fail(index, left, failures)
        if supports is not None:
            supports.add(index.numpy(), some.logits, torch.arange(len(index)), left.edges)
        if left.edges is not None:
            cut = truncates[index].nonzero()[:, 0]
            floor, last_tie = left.edges
            out.kept_mass[index[cut]] = _mass_left(some.logits[cut], (floor[cut], last_tie[cut]), tempered, index[cut])
        out.fill_processed(index, left)
    if batch.is_plain and not out.errors:
        out.fill_tempered(tempered)
    else:
        for view in _views(batch, tempered, processed, list(edits.copied)):
            out.fill(view)
    return out.finish(kept is not None)


class _Rows(NamedTuple):
    """N rows to draw from, as the arguments of `kernels.draw.draw`."""

    logits: Tensor
    temperatures: Tensor
    uniforms: UniformsOf
    greedy: Tensor
    rules: Truncation | None

    def at(self, index: Tensor) -> "_Rows":
        """Some of the rows, int64 [n], their logits as a float32 copy."""
        rules = None if self.rules is None else self.rules.rows(index)
        logits = self.logits.index_select(0, index).float()
        uniforms = UniformsOf(*(column[index] for column in self.uniforms))
        return _Rows(logits, self.temperatures[index], uniforms, self.greedy[index], rules)

    def for_second_draws(self, tries_first: np.ndarray) -> "_Rows":
        """The rows with other uniforms if a token has been drawn first, bool [N]."""
        positions = self.uniforms.positions + torch.from_numpy(tries_first) * _SECOND_DRAW
        return self._replace(uniforms=self.uniforms._replace(positions=positions))


def _sample_whole_rows(logits: Tensor, batch: SamplingBatch, edits: RowEdits) -> ModelRunnerOutput | None:
    """The result of `sample` by rows that are prepared once for all steps; None if a row needs more, or without C++.

    A row needs more if it is truncated, edited by more than a grammar, asks for more than a token and its tempered
    log-prob, or cannot be sampled.
    """
    if not batch.is_plain or batch.rules is not None or edits.copied:
        return None
    if (rows := batch.whole_rows(logits)) is None:
        return None
    stats, _ = rows.draw()
    can_be_sampled = not rows.num_unusable
    if can_be_sampled and (masked := edits.masked) is not None:
        can_be_sampled = masked.batch.restrict(rows, masked.row_at, None) and not masked.batch.has_failed
    rows.release()
    tokens = stats.tokens.tolist()
    if not can_be_sampled or (edits.masked is not None and min(tokens) < 0):
        return None
    return ModelRunnerOutput(tokens, stats.logprobs.tolist() if batch.wants_logprobs else None)


def _add_truncated(supports: Supports, logits: Tensor, batch: SamplingBatch, edits: RowEdits, kept: KeptTokens) -> None:
    """Add the tokens that rules kept of the rows that are drawn from no edited copy."""
    is_cut = batch.truncates.copy()
    is_cut[list(edits.copied)] = False
    rows = is_cut.nonzero()[0]
    index = torch.from_numpy(rows)
    supports.add(rows, logits, index, (kept.floor[index], kept.last_tie[index]))


def _restrict(
    rows: _Rows, masked: MaskedRows, tries_first: np.ndarray, stats: RowStats, kept: KeptTokens | None
) -> dict[int, str]:
    """Draw the rows again whose tokens their grammars refuse. Returns row -> why it cannot be sampled.

    Rows that do not try a token first, bool [N], are drawn from the allowed tokens in any case.
    """
    prepared = prepare(*rows, (stats, kept))
    if prepared is None or not masked.batch.restrict(prepared, masked.row_at, tries_first):
        tried = np.where(tries_first, stats.tokens.numpy(), -1)[masked.rows]
        masks, is_refused = masked.masks(tried)
        if is_refused.any():
            places = np.full(len(tries_first), -1)
            places[masked.rows[is_refused]] = masked.places[is_refused]
            found = TokenMasks(torch.from_numpy(masks.view(np.int32)), torch.from_numpy(places))
            redraw(*rows.for_second_draws(tries_first), found, stats, kept)
    failed = masked.failures()
    if stats.tokens.min() < 0:
        failed = dict.fromkeys((stats.tokens < 0).nonzero()[:, 0].tolist(), NONE_LEFT) | failed
    return failed


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
    """Rows of the batch whose log-probs are those of `rows_inside` of `distribution`."""

    rows: Tensor
    rows_inside: Tensor
    distribution: _Distribution


def _distributions(rows: _Rows, stats: RowStats, kept: KeptTokens | None) -> tuple[_Distribution, _Distribution]:
    """The whole rows, and the tokens that rules keep of them."""
    whole = _Distribution(rows.logits, rows.temperatures, stats.maximum, stats.log_total, None)
    return whole, whole if kept is None else whole._replace(log_total=kept.log_total, edges=(kept.floor, kept.last_tie))


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
    some = counts > 0  # none if the row cannot be sampled
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
