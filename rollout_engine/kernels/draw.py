"""Sampling of one token per row of logits by inverse CDF, with the weights of `token_logprobs`."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels import rng
from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.sampling import PreparedRows
from rollout_engine.kernels.row_stats import CHUNK, KeptTokens, RowStats, TokenMasks, Truncation, UniformsOf
from rollout_engine.kernels.token_logprobs import cumulative_mass, logprobs_at, row_blocks, row_weights
from rollout_engine.kernels.truncation import edges_of, is_kept


def prepare(*arguments: Any) -> PreparedRows | None:
    """`PreparedRows` of these arguments; None without C++."""
    return None if build.load_kernels() is None else PreparedRows(*arguments)


def draw(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor | UniformsOf,
    greedy: Tensor,
    rules: Truncation | None = None,
) -> tuple[RowStats, KeptTokens | None]:
    """Draw a token per row of `logits` [N, V], any floating dtype -> statistics of whole rows, tokens that are kept.

    `temperatures` float32 [N] from `row_temperatures`, `uniforms` float64 [N] in [0, 1), or their `UniformsOf`.
    Rows of `greedy`, bool [N], take the most likely token, the first of several; `rules` must not truncate these rows.
    Log-probs are those of the whole row. A row whose statistics are NaN gets an arbitrary token.
    """
    if (prepared := prepare(logits, temperatures, uniforms, greedy, rules)) is not None:
        return prepared.draw()
    uniforms = numbers(uniforms)
    tokens = torch.empty(len(logits), dtype=torch.int64)
    maximum, total, kept_total = torch.empty_like(temperatures), torch.empty_like(uniforms), torch.empty_like(uniforms)
    floor, last_tie = torch.empty_like(temperatures), torch.empty_like(tokens)
    for block in row_blocks(logits):
        weights, maximum[block] = row_weights(logits[block], temperatures[block])
        mass = cumulative_mass(weights)
        total[block] = mass[:, -1]
        if rules is not None:
            floor[block], last_tie[block] = _cut(weights, logits[block], total[block] > 0, rules.rows(block))
            mass = cumulative_mass(weights)
        kept_total[block] = mass[:, -1]
        tokens[block] = _locate(weights, mass, uniforms[block])
    if greedy.any():
        tokens[greedy] = torch.from_numpy(logits[greedy].float().numpy().argmax(-1))  # the first maximum
    maximum = maximum.where(total > 0, torch.nan)
    tokens = tokens.clamp(max=logits.shape[1] - 1)
    chosen, log_total = logits.gather(-1, tokens[:, None])[:, 0], total.log()
    stats = RowStats(maximum, log_total, tokens, logprobs_at(chosen, maximum, temperatures, log_total))
    return stats, None if rules is None else KeptTokens(kept_total.log(), floor, last_tie)


def redraw(
    logits: Tensor,
    temperatures: Tensor,
    uniforms: Tensor | UniformsOf,
    greedy: Tensor,
    rules: Truncation | None,
    masks: TokenMasks,
    stats: RowStats,
    kept: KeptTokens | None,
) -> None:
    """Draw the rows with a mask again, and put their tokens and log-probs into `stats`, those of `draw`.

    A row draws the token that it would with -inf at the tokens that are not allowed, which `rules` do not see; -1, and
    an arbitrary log-prob, if nothing is left. `kept`, given with rules, receives the tokens they keep. Other arguments
    are as for `draw`; log-probs stay those of the whole row.
    """
    if (prepared := prepare(logits, temperatures, uniforms, greedy, rules, (stats, kept))) is not None:
        prepared.redraw(masks)
        return
    uniforms = numbers(uniforms)
    rows = ((masks.places >= 0) & ~stats.maximum.isnan()).nonzero()[:, 0]
    allowed = allowed_tokens(masks.bits, logits.shape[1])[masks.places[rows]]
    changed = logits[rows].float().masked_fill(~allowed, -torch.inf)
    inside, left = draw(
        changed, temperatures[rows], uniforms[rows], greedy[rows], None if rules is None else rules.rows(rows)
    )
    tokens = inside.tokens.where(~inside.maximum.isnan(), -1)
    chosen = logits[rows].gather(-1, tokens.clamp(min=0)[:, None])[:, 0]
    stats.tokens[rows] = tokens
    whole = stats.maximum[rows]
    stats.logprobs[rows] = logprobs_at(chosen, whole, temperatures[rows], stats.log_total[rows])
    if kept is not None and left is not None:
        shift = (inside.maximum.double() - whole) / temperatures[rows]  # NaN when nothing is left
        kept.log_total[rows], kept.floor[rows], kept.last_tie[rows] = left.log_total + shift, left.floor, left.last_tie


def numbers(uniforms: Tensor | UniformsOf) -> Tensor:
    """The uniform numbers, float64 [N] in [0, 1)."""
    return rng.uniforms(*uniforms) if isinstance(uniforms, UniformsOf) else uniforms


def allowed_tokens(bits: Tensor, vocab_size: int) -> Tensor:
    """Masks of `TokenMasks.bits` -> bool [M, V]."""
    found = np.unpackbits(bits.numpy().view(np.uint8), axis=1, count=vocab_size, bitorder="little")
    return torch.from_numpy(found.view(np.bool_))


def _cut(weights: Tensor, logits: Tensor, usable: Tensor, rules: Truncation) -> tuple[Tensor, Tensor]:
    """Zero the `weights` [n, K, CHUNK] of tokens that `rules` cut; returns the edges, arbitrary in unusable rows."""
    sound = logits.float().where(usable[:, None], 0.0)
    edges = edges_of(sound, rules)
    ids = torch.arange(logits.shape[1]).expand_as(sound)
    weights.flatten(1)[:, : logits.shape[1]].masked_fill_(~is_kept(sound, ids, *edges), 0.0)
    return edges


def _locate(weights: Tensor, mass: Tensor, u: Tensor) -> Tensor:
    """Inverse CDF at `u` [n]: first the chunk, by `mass` [n, K], then the token among its `weights` [n, K, CHUNK].

    u < 1 keeps u * total below the total, so the chunk found has weight, and so has the token. NaN rows get any token.
    """
    rows = torch.arange(len(u))
    target = u * mass[:, -1]
    chunk = torch.searchsorted(mass, target[:, None], right=True)[:, 0].clamp(max=mass.shape[1] - 1)
    before = torch.where(chunk > 0, mass[rows, chunk - 1], 0.0)
    share = (target - before) / (mass[rows, chunk] - before)
    inside = weights[rows, chunk].double().cumsum(-1)
    end = inside[:, -1:]
    token = (inside <= share[:, None] * end).sum(-1)
    last_with_weight = (inside < end).sum(-1)  # rounding may carry share * end up to the end
    return chunk * CHUNK + torch.minimum(token, last_with_weight)
