"""One token per row of logits by inverse CDF, and how likely it is. Twins: `kernels.draw`, `kernels.token_logprobs`.

    chunk kernel     (row, 32 chunks of 128 tokens)     top and mass of each chunk, the mass under its own top
    row kernel       (row)                              masses under the row's maximum -> total -> chunk -> token

The logits are read once, in their own dtype; nothing of a row's size is stored but two float32 per chunk. A row's
arithmetic is the same in any batch, and for drawn, greedy and given tokens: those are branches of one binary.

Contract beside the twins. Uniforms and greedy tokens are equal. Weights are float32 with another exp, so masses differ
by relative 2^-20 at most: a drawn token differs only if its uniform lies within 2^-20 of an edge between two tokens.
Log-probs differ by 2^-20 absolute and relative. A token of weight zero is never drawn.
"""

from enum import IntEnum
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.cpu.sampling import CHUNK, Figures
from rollout_engine.kernels.triton.philox import uniform

_CHUNKS = 32
"""Chunks per program. Fixed: another tile could sum in another order."""
_CHUNK = tl.constexpr(CHUNK)


class Choice(IntEnum):
    """How a row comes by its token."""

    DRAWN = 0
    GREEDY = 1
    """The most likely, the first where several are."""
    GIVEN = 2
    """Stays as it is in `Figures.tokens`."""


_GREEDY, _GIVEN = tl.constexpr(Choice.GREEDY.value), tl.constexpr(Choice.GIVEN.value)


class SamplingRows(NamedTuple):
    """What is asked of N rows."""

    temperatures: Tensor
    """float32 [N], of `kernels.token_logprobs.row_temperatures`."""
    seeds: Tensor
    """int64 [N], bit patterns of sequence seeds."""
    positions: Tensor
    """int64 [N], of the tokens to draw in their sequences."""
    choices: Tensor
    """int32 [N] of `Choice`."""


class SamplingWorkspace(NamedTuple):
    """Memory of calls with up to N rows of V logits, K >= V / 128; one call at a time."""

    tops: Tensor
    """float32 [N, K]: the largest logit of each chunk."""
    masses: Tensor
    """float32 [N, K]: sum of exp((logit - top) / temperature) of each chunk."""
    active: Tensor
    """int32 [N, K]: chunks that may hold tokens which truncation leaves, ascending."""
    num_active: Tensor
    """int32 [N]."""
    bounds: Tensor
    """float32 [N]: no logit below stays."""

    @classmethod
    def empty(cls, num_rows: int, vocab_size: int, device: torch.device | str) -> "SamplingWorkspace":
        """For `num_rows` x `vocab_size` logits at most."""
        shape = num_rows, num_chunks_of(vocab_size)
        return cls(
            torch.empty(shape, device=device),
            torch.empty(shape, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(num_rows, dtype=torch.int32, device=device),
            torch.empty(num_rows, device=device),
        )


def num_chunks_of(vocab_size: int) -> int:
    """Chunks of a row, in sixteens: masks and strides allow wide loads. Those past the vocabulary weigh nothing."""
    return triton.cdiv(vocab_size, 16 * CHUNK) * 16


def empty_figures(num_rows: int, device: torch.device | str) -> Figures:
    """Where `sample` puts what it finds."""
    dtypes = torch.float32, torch.float64, torch.int64, torch.float32
    return Figures(*(torch.empty(num_rows, dtype=dtype, device=device) for dtype in dtypes))


def sample(logits: Tensor, rows: SamplingRows, workspace: SamplingWorkspace, figures: Figures) -> None:
    """Fill `figures` [N] of `logits` [N, V], bfloat16, float16 or float32, any stride between rows.

    A row with NaN or +inf, or nothing but -inf, gets figures NaN, and a token of no meaning within the vocabulary.
    """
    num_rows, vocab_size = logits.shape
    if logits.stride(1) != 1:
        raise ValueError("expected rows whose logits lie side by side")
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
        *(logits, *rows, workspace.tops, workspace.masses, *figures),
        *(logits.stride(0), workspace.tops.stride(0), vocab_size, num_chunks),
        BLOCK=triton.next_power_of_2(num_chunks),
        num_warps=8,
    )


def score(logits: Tensor, temperatures: Tensor, tokens: Tensor) -> Figures:
    """Figures of given `tokens`, int64 [N]. The twin of `kernels.cpu.sampling.score`."""
    figures = empty_figures(len(tokens), logits.device)
    figures.tokens.copy_(tokens)
    given = torch.full_like(tokens, Choice.GIVEN.value, dtype=torch.int32)
    rows = SamplingRows(temperatures, tokens, tokens, given)  # seeds and positions are not looked at
    sample(logits, rows, SamplingWorkspace.empty(*logits.shape, logits.device), figures)
    return figures


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
    top = tl.max(x, axis=1)  # passes over NaN; the mass shows it
    mass = tl.sum(weights_of(x, top[:, None], 1.0 / tl.load(temperatures_ptr + row)), axis=1)
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
    tops, weights = chunk_weights(tops_ptr, masses_ptr, row * chunk_stride, num_chunks, 1.0 / temperature, BLOCK)
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
            shares = weights_of(x, tl.max(x), 1.0 / temperature).to(tl.float64)
            inside, _, _ = pick(shares, (u * total - before) / mass * tl.sum(shares))
        token = tl.minimum(chunk * _CHUNK + inside, vocab_size - 1).to(tl.int64)
    x = tl.load(logits_ptr + token).to(tl.float32)
    maximum = tl.where(usable, maximum, float("nan"))
    tl.store(maximum_ptr + row, maximum)
    tl.store(log_total_ptr + row, log_total)
    tl.store(tokens_ptr + row, token)
    tl.store(logprobs_ptr + row, logprob_of(x, maximum, temperature, log_total))


@triton.jit
def weights_of(x, top, inverse_temperature):
    """exp((x - top) / temperature), float32; zero where `x` is -inf."""
    return tl.exp((x - tl.where(top == -float("inf"), 0.0, top)) * inverse_temperature)


@triton.jit
def chunk_weights(tops_ptr, masses_ptr, start, num_chunks, inverse_temperature, BLOCK: tl.constexpr):
    """Tops, float32, and masses under the largest of them, float64: [BLOCK] of one row, -inf and 0 past its end."""
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
    """(index, sum of the weights before it, its weight): the first float64 weight above 0 whose running sum exceeds
    `target`, else the last above 0. A running sum taken in parallel may fall by an ulp; zeros are still passed over."""
    size: tl.constexpr = weights.shape[0]
    lane = tl.arange(0, size)
    first = tl.min(tl.where((tl.cumsum(weights) > target) & (weights > 0), lane, size))
    index = tl.minimum(first, tl.max(tl.where(weights > 0, lane, 0)))
    before = tl.sum(tl.where(lane < index, weights, 0.0))
    return index, before, tl.sum(tl.where(lane == index, weights, 0.0))


@triton.jit
def logprob_of(x, maximum, temperature, log_total):
    """float32 of (x - maximum) / temperature - log_total, the last step in float64."""
    return (tl.div_rn(x - maximum, temperature).to(tl.float64) - log_total).to(tl.float32)
