"""Draws one token per row of logits, and says how likely it was.

    every row         weights -> chunk sums -> one uniform finds the chunk, then the token     (`kernels.draw`)
    restricted rows   cut tokens get -inf (`sampling_masks`), then the same draw again
    greedy rows       argmax, lowest id on ties; log-probs as at temperature 1

The uniform depends on (sequence seed, position) and every row is computed alone, so a token does not depend on what
else is in the batch. The weights are those of `kernels.token_logprobs`: the log-prob comes for free, with its bits.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.draw import Figures, draw
from rollout_engine.kernels.rng import uniforms
from rollout_engine.kernels.token_logprobs import figures_of, logprobs_at, row_temperatures
from rollout_engine.messages import ModelRunnerOutput
from rollout_engine.model.sampling_masks import Truncation, cut_tail, most_likely
from rollout_engine.sampling_params import SamplingParams

_RAW, _PROCESSED = 1, 2
_MODE_CODES = {"tempered": 0, "raw": _RAW, "processed": _PROCESSED}
_BAD_LOGITS = (
    "the logits of this sequence hold NaN or +inf, or nothing but -inf; the model's weights or inputs are broken."
)
_ALL_BANNED = "no token is left to sample: every token with a finite logit is a stop id, banned before min_tokens."


class SamplingBatch(NamedTuple):
    """Sampling settings of N tasks as columns."""

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
    wants_logprobs: bool
    """Whether any task asked for log-probs."""
    banned: list[tuple[int, list[int]]]
    """(row, token ids that must not be drawn): stop ids before `min_tokens`."""

    @classmethod
    def from_tasks(
        cls,
        params: list[SamplingParams],
        seeds: list[int],
        positions: list[int],
        num_sampled: list[int],
        eos: list[list[int]],
    ) -> "SamplingBatch":
        """Columns of N tasks; `num_sampled` counts the tokens a sequence has sampled so far, `eos` are its end ids."""
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
            num_top=column(np.int64, (p.logprobs or 0 for p in kinds)),
            wants_logprobs=any(p.logprobs is not None for p in kinds),
            banned=_banned(params, num_sampled, eos) if any(p.min_tokens for p in kinds) else [],
        )

    @property
    def truncates(self) -> np.ndarray:
        """bool [N]: rows from which top-k, top-p or min-p may cut tokens."""
        return (self.temperature > 0) & ((self.top_k > 0) | (self.top_p < 1) | (self.min_p > 0))

    @property
    def is_plain(self) -> bool:
        """Whether every row draws from its whole tempered distribution, and nobody asks for more than the token."""
        special = self.truncates | (self.num_top > 0) | ((self.modes == _RAW) & (self.temperature != 1))
        return not (self.banned or special.any())


def sample(logits: Tensor, batch: SamplingBatch) -> ModelRunnerOutput:
    """Draw one token for each row of `logits` [N, V], any floating dtype; `batch` has N rows.

    A row that cannot be sampled (NaN, +inf, nothing but -inf) gets token -1 and an entry in `errors`.
    """
    temperatures = row_temperatures(torch.from_numpy(batch.temperature), logits)
    greedy = torch.from_numpy(batch.temperature == 0)
    u = uniforms(torch.from_numpy(batch.seeds), torch.from_numpy(batch.positions))
    drawn = draw(logits, temperatures, u, greedy)
    usable = drawn.maximum.isfinite()
    if batch.is_plain and usable.all():
        logprobs = drawn.logprobs.tolist() if batch.wants_logprobs else None
        return ModelRunnerOutput(token_ids=drawn.tokens.tolist(), logprobs=logprobs)

    tokens, tempered = drawn.tokens, _Distribution.of(logits, temperatures, drawn)
    errors = dict.fromkeys((~usable).nonzero()[:, 0].tolist(), _BAD_LOGITS)
    rows, kept = _restricted_rows(batch, usable), None
    if len(rows):
        cut = _restrict(logits, rows, batch)
        drawn = draw(cut, temperatures[rows], u[rows], greedy[rows])
        tokens[rows], kept = drawn.tokens, _Distribution.of(cut, temperatures[rows], drawn)
        all_banned = rows[~kept.maximum.isfinite()]
        usable[all_banned] = False
        errors |= dict.fromkeys(all_banned.tolist(), _ALL_BANNED)

    views = _views(batch, tempered, kept, rows)
    tokens = tokens.where(usable, 0)
    return ModelRunnerOutput(
        token_ids=tokens.where(usable, -1).tolist(),
        logprobs=_chosen_logprobs(views, tokens).tolist() if batch.wants_logprobs else None,
        kept_logprob_mass=_kept_mass(batch, tempered, kept, rows).tolist() if batch.truncates.any() else None,
        top_logprobs=_top_logprobs(views, batch, usable) if batch.num_top.any() else None,
        errors=errors,
    )


class _Distribution(NamedTuple):
    """Normalised rows: token t of row i has log-prob (logits[i, t] - maximum[i]) / temperatures[i] - log_total[i]."""

    logits: Tensor  # [n, V]
    temperatures: Tensor  # float32 [n]
    maximum: Tensor  # float32 [n]
    log_total: Tensor  # float64 [n]

    @classmethod
    def of(cls, logits: Tensor, temperatures: Tensor, figures: Figures) -> "_Distribution":
        return cls(logits, temperatures, figures.maximum, figures.log_total)

    def logprobs(self, rows: Tensor, token_ids: Tensor) -> Tensor:
        """float32 [r, k] of `token_ids` [r, k] in `rows` [r]."""
        row = rows[:, None]
        return logprobs_at(self.logits[row, token_ids], self.maximum[row], self.temperatures[row], self.log_total[row])


class _View(NamedTuple):
    """Rows of the batch whose log-probs come from `rows_inside` of `distribution`."""

    rows: Tensor
    rows_inside: Tensor
    distribution: _Distribution


def _banned(params: list[SamplingParams], num_sampled: list[int], eos: list[list[int]]) -> list[tuple[int, list[int]]]:
    return [
        (row, [*eos[row], *(p.stop_token_ids or [])]) for row, p in enumerate(params) if num_sampled[row] < p.min_tokens
    ]


def _restricted_rows(batch: SamplingBatch, usable: Tensor) -> Tensor:
    """Rows that may not draw from all tokens, ascending."""
    restricted = torch.from_numpy(batch.truncates)
    restricted[[row for row, _ in batch.banned]] = True
    return (restricted & usable).nonzero()[:, 0]


def _restrict(logits: Tensor, rows: Tensor, batch: SamplingBatch) -> Tensor:
    """float32 copy of the restricted `rows` of `logits`, -inf at banned tokens and where truncation cuts."""
    logits = logits.index_select(0, rows).float()
    place = {row: i for i, row in enumerate(rows.tolist())}
    for row, ids in batch.banned:
        if row in place:
            logits[place[row], [token for token in ids if token < logits.shape[1]]] = -torch.inf
    truncation = Truncation(*map(torch.from_numpy, (batch.temperature, batch.top_k, batch.top_p, batch.min_p)))
    cut = torch.from_numpy(batch.truncates)[rows].nonzero()[:, 0]
    if len(cut) == len(rows):
        cut_tail(logits, truncation.rows(rows))
    elif len(cut):
        some = logits.index_select(0, cut)
        cut_tail(some, truncation.rows(rows[cut]))
        logits.index_copy_(0, cut, some)
    return logits


def _views(batch: SamplingBatch, tempered: _Distribution, kept: _Distribution | None, rows: Tensor) -> list[_View]:
    """Every row of the batch once, with the distribution that its log-prob mode asks for."""
    modes = torch.from_numpy(batch.modes)
    raw = ((modes == _RAW) & (tempered.temperatures != 1)).nonzero()[:, 0]
    inside = (modes[rows] == _PROCESSED).nonzero()[:, 0]
    rest = torch.ones(len(modes), dtype=torch.bool)
    rest[raw] = rest[rows[inside]] = False
    others = rest.nonzero()[:, 0]
    views = [_View(others, others, tempered)]
    if len(raw) and batch.wants_logprobs:
        logits, ones = tempered.logits[raw], torch.ones(len(raw))
        figures = figures_of(logits, ones, torch.zeros(len(raw), dtype=torch.int64))
        views.append(_View(raw, torch.arange(len(raw)), _Distribution.of(logits, ones, figures)))
    if kept is not None:
        views.append(_View(rows[inside], inside, kept))
    return views


def _chosen_logprobs(views: list[_View], tokens: Tensor) -> Tensor:
    """float32 [N] of the tokens drawn."""
    logprobs = torch.empty(len(tokens))
    for view in views:
        logprobs[view.rows] = view.distribution.logprobs(view.rows_inside, tokens[view.rows, None])[:, 0]
    return logprobs


def _kept_mass(batch: SamplingBatch, whole: _Distribution, kept: _Distribution | None, rows: Tensor) -> Tensor:
    """Log of the share of the tempered distribution that stayed, float32 [N]; 0 in rows that do not truncate."""
    result = torch.zeros(len(batch.modes))
    if kept is not None:
        shift = (kept.maximum - whole.maximum[rows]) / kept.temperatures  # not 0 where the most likely token is banned
        share = (shift + kept.log_total - whole.log_total[rows]).clamp(max=0)
        result[rows] = torch.where(torch.from_numpy(batch.truncates)[rows], share, 0.0).float()
    return result


def _top_logprobs(views: list[_View], batch: SamplingBatch, usable: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(int32 [N, K], float32 [N, K]) with K the largest number asked; id -1 and log-prob -inf where there is none."""
    asked = torch.from_numpy(batch.num_top > 0) & usable
    ids = torch.full((len(asked), int(batch.num_top.max())), -1)
    logprobs = torch.full(ids.shape, -torch.inf)
    for view in views:
        wanted = asked[view.rows].nonzero()[:, 0]
        if len(wanted):
            inside, width = view.rows_inside[wanted], min(ids.shape[1], view.distribution.logits.shape[1])
            top = most_likely(view.distribution.logits[inside], width)
            ids[view.rows[wanted], :width] = top
            logprobs[view.rows[wanted], :width] = view.distribution.logprobs(inside, top)
    return ids.int().numpy(), logprobs.numpy()
