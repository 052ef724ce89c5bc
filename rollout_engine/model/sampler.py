"""Draws one token per row of logits, and says how likely it was.

    every row         weights -> chunk sums -> one uniform finds the chunk, then the token     (`kernels.draw`)
    truncated rows    the same with no weight for cut tokens                                  (`kernels.truncation`)
    banned tokens     the same from a copy of the row with -inf at stop ids that come too early
    greedy rows       argmax, lowest id on ties; log-probs as at temperature 1

The uniform depends on (sequence seed, position) and every row is computed alone, so a token does not depend on what
else is in the batch. The weights are those of `kernels.token_logprobs`: the log-prob comes for free, with its bits.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.draw import Truncation, draw
from rollout_engine.kernels.rng import uniforms
from rollout_engine.kernels.token_logprobs import figures_of, logprobs_at, row_temperatures
from rollout_engine.kernels.truncation import most_likely, stays
from rollout_engine.messages import ModelRunnerOutput
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
        """Whether all that is asked of each row is a token and its tempered log-prob."""
        special = (self.num_top > 0) | (self.modes == _PROCESSED) | ((self.modes == _RAW) & (self.temperature != 1))
        return not (self.banned or special.any())

    def rules(self) -> Truncation | None:
        """What each row's truncation asks; None where no row has any."""
        truncates = self.truncates
        if not truncates.any():
            return None
        columns = ((self.temperature, 1.0), (self.top_k, 0), (self.top_p, 1.0), (self.min_p, 0.0))
        return Truncation(*(torch.from_numpy(np.where(truncates, column, idle)) for column, idle in columns))


def sample(logits: Tensor, batch: SamplingBatch) -> ModelRunnerOutput:
    """Draw one token for each row of `logits` [N, V], any floating dtype; `batch` has N rows.

    A row that cannot be sampled (NaN, +inf, nothing but -inf) gets token -1 and an entry in `errors`.
    """
    temperatures = row_temperatures(torch.from_numpy(batch.temperature), logits)
    greedy = torch.from_numpy(batch.temperature == 0)
    u = uniforms(torch.from_numpy(batch.seeds), torch.from_numpy(batch.positions))
    rules = batch.rules()
    tempered, processed, tokens, logprobs = _draw(logits, temperatures, u, greedy, rules)
    usable = tempered.maximum.isfinite()
    if batch.is_plain and usable.all():
        return ModelRunnerOutput(
            token_ids=tokens.tolist(),
            logprobs=logprobs.tolist() if batch.wants_logprobs else None,
            kept_logprob_mass=None if rules is None else _kept_mass(batch, tempered, processed).tolist(),
        )

    errors = dict.fromkeys((~usable).nonzero()[:, 0].tolist(), _BAD_LOGITS)
    rows = torch.tensor([row for row, _ in batch.banned if usable[row]], dtype=torch.int64)
    allowed = None
    if len(rows):
        inside = None if rules is None else rules.rows(rows)
        some = _without_banned(logits, rows, batch.banned)
        _, allowed, tokens[rows], _ = _draw(some, temperatures[rows], u[rows], greedy[rows], inside)
        all_banned = rows[~allowed.maximum.isfinite()]
        usable[all_banned] = False
        errors |= dict.fromkeys(all_banned.tolist(), _ALL_BANNED)

    views = _views(batch, tempered, processed, allowed, rows)
    tokens = tokens.where(usable, 0)
    return ModelRunnerOutput(
        token_ids=tokens.where(usable, -1).tolist(),
        logprobs=_chosen_logprobs(views, tokens).tolist() if batch.wants_logprobs else None,
        kept_logprob_mass=None if rules is None else _kept_mass(batch, tempered, processed, allowed, rows).tolist(),
        top_logprobs=_top_logprobs(views, batch, usable) if batch.num_top.any() else None,
        errors=errors,
    )


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
        return result.where(stays(logits.float(), token_ids, *(edge[rows] for edge in self.edges)), -torch.inf)


class _View(NamedTuple):
    """Rows of the batch whose log-probs come from `rows_inside` of `distribution`."""

    rows: Tensor
    rows_inside: Tensor
    distribution: _Distribution


def _banned(params: list[SamplingParams], num_sampled: list[int], eos: list[list[int]]) -> list[tuple[int, list[int]]]:
    return [
        (row, [*eos[row], *(p.stop_token_ids or [])]) for row, p in enumerate(params) if num_sampled[row] < p.min_tokens
    ]


def _draw(
    logits: Tensor, temperatures: Tensor, u: Tensor, greedy: Tensor, rules: Truncation | None
) -> tuple[_Distribution, _Distribution, Tensor, Tensor]:
    """(whole rows, what truncation leaves of them, tokens int64 [N], their log-probs in whole rows float32 [N])."""
    figures, kept = draw(logits, temperatures, u, greedy, rules)
    whole = _Distribution(logits, temperatures, figures.maximum, figures.log_total, None)
    left = whole if kept is None else whole._replace(log_total=kept.log_total, edges=(kept.floor, kept.last_tie))
    return whole, left, figures.tokens, figures.logprobs


def _without_banned(logits: Tensor, rows: Tensor, banned: list[tuple[int, list[int]]]) -> Tensor:
    """A copy of the banned `rows` of `logits`, -inf at the tokens they must not draw."""
    logits = logits.index_select(0, rows)
    ids_of = dict(banned)
    for place, row in enumerate(rows.tolist()):
        logits[place, [token for token in ids_of[row] if token < logits.shape[1]]] = -torch.inf
    return logits


def _views(
    batch: SamplingBatch,
    tempered: _Distribution,
    processed: _Distribution,
    allowed: _Distribution | None,
    banned_rows: Tensor,
) -> list[_View]:
    """Every row of the batch once, with the distribution that its log-prob mode asks for."""
    modes = torch.from_numpy(batch.modes)
    is_banned = torch.zeros(len(modes), dtype=torch.bool).index_fill_(0, banned_rows, True)
    is_raw = (modes == _RAW) & (tempered.temperatures != 1)
    is_processed = modes == _PROCESSED
    plain, raw, kept = (
        which.nonzero()[:, 0] for which in (~(is_raw | is_processed), is_raw, is_processed & ~is_banned)
    )
    views = [_View(plain, plain, tempered), _View(kept, kept, processed)]
    if len(raw):
        logits, ones = tempered.logits[raw], torch.ones(len(raw))
        figures = figures_of(logits, ones, torch.zeros(len(raw), dtype=torch.int64))
        distribution = _Distribution(logits, ones, figures.maximum, figures.log_total, None)
        views.append(_View(raw, torch.arange(len(raw)), distribution))
    if allowed is not None:
        inside = is_processed[banned_rows].nonzero()[:, 0]
        views.append(_View(banned_rows[inside], inside, allowed))
    return views


def _chosen_logprobs(views: list[_View], tokens: Tensor) -> Tensor:
    """float32 [N] of the tokens drawn."""
    logprobs = torch.empty(len(tokens))
    for view in views:
        logprobs[view.rows] = view.distribution.logprobs(view.rows_inside, tokens[view.rows, None])[:, 0]
    return logprobs


def _kept_mass(
    batch: SamplingBatch,
    whole: _Distribution,
    processed: _Distribution,
    allowed: _Distribution | None = None,
    banned_rows: Tensor | None = None,
) -> Tensor:
    """Log of the share of the tempered distribution that stayed, float32 [N]; 0 in rows that do not truncate."""
    share = processed.log_total - whole.log_total
    if allowed is not None:  # their most likely token may be banned
        shift = (allowed.maximum - whole.maximum[banned_rows]) / allowed.temperatures
        share[banned_rows] = shift + allowed.log_total - whole.log_total[banned_rows]
    return torch.where(torch.from_numpy(batch.truncates), share.clamp(max=0), 0.0).float()


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
