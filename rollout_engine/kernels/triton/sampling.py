"""Sampling of one token per row of logits by inverse CDF, and its log-prob.

    chunk kernel     (row, 32 chunks of 128 tokens)     largest logit ("top") of each chunk, and its mass under that
    row kernel       (row)                              masses under the row's maximum -> total -> chunk -> token

The logits are read once, in their own dtype; only two float32 per chunk are stored. A row's arithmetic is the same in
any batch, and for drawn, greedy and given tokens, which are branches of one binary.

Compared with the twins (`kernels.draw`, `kernels.token_logprobs`): uniforms and greedy tokens are equal. Weights are
float32 by another exp, ex2.approx of a rounded product: the weight of a token at depth a = (maximum - logit) /
temperature differs by relative 2^-19 + a 2^-21 at most. So masses, and the edges between tokens at which a uniform
falls, differ by relative 2^-19 + m 2^-21, where m is the mean depth of a drawn token, at most the logarithm of the
vocabulary; log-probs by as much, absolute or relative. A token of weight zero is never drawn. The bounds follow from
the roundings; on a device they have not been measured yet.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.row_stats import CHUNK, RowStats
from rollout_engine.kernels.triton.philox import uniform
from rollout_engine.kernels.triton.tiling import next_power_of_2

_CHUNKS = 32
"""Chunks per program. It is fixed, as another tile could sum in another order."""
_CHUNK = tl.constexpr(CHUNK)


class Choice(IntEnum):
    """How the token of a row is chosen."""

    DRAWN = 0
    GREEDY = 1
    """The most likely token, the first of several."""
    GIVEN = 2
    """The token already in `RowStats.tokens`."""


_GREEDY, _GIVEN = tl.constexpr(Choice.GREEDY.value), tl.constexpr(Choice.GIVEN.value)


class SamplingRows(NamedTuple):
    """Sampling parameters of N rows."""

    temperatures: Tensor
    """float32 [N], from `kernels.token_logprobs.row_temperatures`."""
    seeds: Tensor
    """int64 [N]: bit patterns of sequence seeds."""
    positions: Tensor
    """int64 [N]: positions in their sequences of the tokens to draw."""
    choices: Tensor
    """int32 [N]: values of `Choice`."""


class SamplingWorkspace(NamedTuple):
    """Memory for one call at a time with up to N rows of V logits; K >= V / 128."""

    tops: Tensor
    """float32 [N, K]: the largest logit of each chunk."""
    masses: Tensor
    """float32 [N, K]: sum of exp((logit - top) / temperature) of each chunk."""
    active: Tensor
    """int32 [N, K]: chunks that may hold tokens kept by truncation, ascending."""
    num_active: Tensor
    """int32 [N]."""
    bounds: Tensor
    """float32 [N]: no logit below is kept."""

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> "SamplingWorkspace":
        """Uninitialised memory for up to `num_rows` x `vocab_size` logits."""
        shape = num_rows, num_chunks_of(vocab_size)
        tops, masses = torch.empty(shape, device=device), torch.empty(shape, device=device)
        active = torch.empty(shape, dtype=torch.int32, device=device)
        num_active = torch.empty(num_rows, dtype=torch.int32, device=device)
        return cls(tops, masses, active, num_active, torch.empty(num_rows, device=device))


def num_chunks_of(vocab_size: int) -> int:
    """Chunks of a row, rounded up to 16 so that loads can be wide. Those past the vocabulary have weight 0."""
    return -(-vocab_size // (16 * CHUNK)) * 16


def sample(logits: Tensor, rows: SamplingRows, workspace: SamplingWorkspace, stats: RowStats) -> None:
    """Fill `stats` [N] from `logits` [N, V], bfloat16, float16 or float32, any stride between rows.

    A row with NaN or +inf, or nothing but -inf, gets NaN statistics and an arbitrary token of the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError(f"Rows of logits should be contiguous, got strides {logits.stride()}.")
    num_chunks = num_chunks_of(vocab_size)
    if num_rows == 0:
        return
    _chunk_kernel[(num_rows, triton.cdiv(num_chunks, _CHUNKS))](
        *(logits, rows.temperatures, workspace.tops, workspace.masses),
        *(logits.stride(0), workspace.tops.stride(0), vocab_size, num_chunks),
        CHUNKS=_CHUNKS,
        num_warps=4,
    )
    _row_kernel[(num_rows,)](
        *(logits, *rows, workspace.tops, workspace.masses, *stats),
        *(logits.stride(0), workspace.tops.stride(0), vocab_size, num_chunks),
        BLOCK=next_power_of_2(num_chunks),
        num_warps=8,
    )


def score(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> RowStats:
    """Statistics of every row, with the log-prob of its given token, int64 [N]. Twin: `token_logprobs.row_stats`."""
    stats = RowStats.empty(len(tokens), logits.device)
    stats.tokens.copy_(tokens)
    given = torch.full_like(tokens, Choice.GIVEN.value, dtype=torch.int32)
    rows = SamplingRows(temperatures, stats.tokens, stats.tokens, given)  # seeds and positions are not read
    sample(logits, rows, SamplingWorkspace.empty(len(logits), logits.shape[1], logits.device), stats)
    return stats


@triton.jit
def _chunk_kernel(
    logits_ptr,
    temperatures_ptr,
    tops_ptr,
    masses_ptr,
    stride,
    chunk_stride,
    vocab_size,
    num_chunks,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1) * CHUNKS + tl.arange(0, CHUNKS)
    token = chunk[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    x = tl.load(logits_ptr + row * stride + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)
    top = tl.max(x, axis=1)  # ignores NaN, which the mass shows
    mass = tl.sum(weights_of(x, top[:, None], inverse_of(tl.load(temperatures_ptr + row))), axis=1)
    place = row * chunk_stride + chunk
    tl.store(tops_ptr + place, top, mask=chunk < num_chunks)
    tl.store(masses_ptr + place, mass, mask=chunk < num_chunks)


@triton.jit
def _row_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    choices_ptr,
    tops_ptr,
    masses_ptr,
    maximum_ptr,
    log_total_ptr,
    tokens_ptr,
    logprobs_ptr,
    stride,
    chunk_stride,
    vocab_size,
    num_chunks,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    temperature = tl.load(temperatures_ptr + row)
    inverse = inverse_of(temperature)
    tops, weights = chunk_weights(tops_ptr, masses_ptr, row * chunk_stride, num_chunks, inverse, BLOCK)
    maximum = tl.max(tops)
    total = tl.sum(weights)
    usable = total > 0
    log_total = tl.where(usable, tl.log(total), float("nan"))
    choice = tl.load(choices_ptr + row)
    if choice == _GIVEN:
        token = tl.load(tokens_ptr + row)
    else:
        if choice == _GREEDY:
            chunk = tl.min(tl.where(tops == maximum, tl.arange(0, BLOCK), BLOCK))
            x = load_chunk(logits_ptr, chunk, vocab_size)
            inside = tl.min(tl.where(x == maximum, tl.arange(0, _CHUNK), _CHUNK))
        else:
            u = uniform(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            chunk, before, mass = pick(weights, u * total)
            x = load_chunk(logits_ptr, chunk, vocab_size)
            shares = weights_of(x, tl.max(x), inverse).to(tl.float64)
            inside, _, _ = pick(shares, (u * total - before) / mass * tl.sum(shares))
        token = tl.minimum(chunk * _CHUNK + inside, vocab_size - 1).to(tl.int64)
    x = tl.load(logits_ptr + token).to(tl.float32)
    maximum = tl.where(usable, maximum, float("nan"))
    tl.store(maximum_ptr + row, maximum)
    tl.store(log_total_ptr + row, log_total)
    tl.store(tokens_ptr + row, token)
    tl.store(logprobs_ptr + row, logprob_of(x, maximum, temperature, log_total))


@triton.jit
def inverse_of(temperature):
    """1 / temperature, rounded to nearest; the quotient of `/` may be off by two units."""
    return tl.div_rn(1.0, temperature)


@triton.jit
def weights_of(x, top, inverse_temperature):
    """exp((x - top) / temperature), float32; zero if `x` is -inf."""
    return tl.exp((x - tl.where(top == -float("inf"), 0.0, top)) * inverse_temperature)


@triton.jit
def chunk_weights(tops_ptr, masses_ptr, start, num_chunks, inverse_temperature, BLOCK: tl.constexpr):
    """Tops, float32, and masses under the largest top, float64, of one row: [BLOCK], -inf and 0 past its end."""
    chunk = tl.arange(0, BLOCK)
    tops = tl.load(tops_ptr + start + chunk, mask=chunk < num_chunks, other=-float("inf"))
    masses = tl.load(masses_ptr + start + chunk, mask=chunk < num_chunks, other=0.0)
    scale = weights_of(tops, tl.max(tops), inverse_temperature)
    return tops, masses.to(tl.float64) * scale.to(tl.float64)


@triton.jit
def load_chunk(logits_ptr, chunk, vocab_size):
    """float32 [CHUNK], -inf past the end of the row."""
    token = chunk * _CHUNK + tl.arange(0, _CHUNK)
    return tl.load(logits_ptr + token, mask=token < vocab_size, other=-float("inf")).to(tl.float32)


@triton.jit
def pick(weights, target):
    """(index, sum of the weights before it, its weight) of the first weight above 0 whose running sum exceeds `target`,
    else of the last above 0. Weights are float64. A parallel running sum may fall by an ulp; zeros are never picked."""
    size: tl.constexpr = weights.shape[0]
    lane = tl.arange(0, size)
    first = tl.min(tl.where((tl.cumsum(weights) > target) & (weights > 0), lane, size))
    index = tl.minimum(first, tl.max(tl.where(weights > 0, lane, 0)))
    before = tl.sum(tl.where(lane < index, weights, 0.0))
    return index, before, tl.sum(tl.where(lane == index, weights, 0.0))


@triton.jit
def logprob_of(x, maximum, temperature, log_total):
    """(x - maximum) / temperature - log_total as float32, with the subtraction in float64."""
    return (tl.div_rn(x - maximum, temperature).to(tl.float64) - log_total).to(tl.float32)
