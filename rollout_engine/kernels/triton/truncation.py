"""Top-k, top-p and min-p without sorting, and a new draw from the kept tokens. Twin: `kernels.truncation`.

In the order (logit, then id) each rule keeps a prefix, so a row needs only its edges: the logit and the id at which the
shortest prefix ends.

    active kernel    (row)   the k-th largest top of a chunk bounds the k-th largest logit from below, so chunks with a
                             smaller top are dropped. Masses give a bound likewise. Lists the few chunks left.
    edge kernel      (row)   bisects the float32 keys between that bound and the maximum, counting and weighing the
                             tokens of listed chunks above the middle, until one logit is left; then draws.

It reads the chunk tops and masses that `sampling.sample` has written. A flat row lists all chunks, which is slow.

Compared with the twin: counts are exact and ties are ordered by id, so top-k is equal. Masses are sums of float32
weights, so top-p and min-p differ only if the share of mass, or the ratio to the most likely token, lies within the
bounds of `kernels.triton.sampling` of the limit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.row_stats import CHUNK, KeptTokens, RowStats, Truncation
from rollout_engine.kernels.triton.philox import uniform
from rollout_engine.kernels.triton.sampling import (
    Choice,
    SamplingRows,
    SamplingWorkspace,
    chunk_weights,
    inverse_of,
    load_chunk,
    logprob_of,
    num_chunks_of,
    pick,
    weights_of,
)
from rollout_engine.kernels.triton.tiling import next_power_of_2

_CHUNKS = 32
"""Chunks read together."""
_CHUNK = tl.constexpr(CHUNK)
_DRAWN = tl.constexpr(Choice.DRAWN.value)
_NO_TIE = tl.constexpr(2**63 - 1)


def truncate(
    logits: Tensor,
    rows: SamplingRows,
    rules: Truncation,
    workspace: SamplingWorkspace,
    stats: RowStats,
    kept: KeptTokens,
) -> None:
    """Fill `kept` [N], and redraw tokens (and log-probs) in `stats` for rows that `rules` truncate.

    Call it after `sampling.sample` of the same logits, rows, workspace and stats. `rules.temperature` is not read but
    `rows.temperatures`. Greedy and given tokens are left as they are; rows without a rule keep all tokens.
    """
    num_rows, vocab_size = logits.shape
    if num_rows == 0:
        return
    num_chunks = num_chunks_of(vocab_size)
    limits = rules.top_k, rules.top_p, rules.min_p
    shift = 16 if logits.dtype == torch.bfloat16 else 0
    _active_kernel[(num_rows,)](
        *(rows.temperatures, *limits, stats.maximum, *workspace),
        *(workspace.tops.stride(0), vocab_size, num_chunks),
        SHIFT=shift,
        BLOCK=next_power_of_2(num_chunks),
        num_warps=8,
    )
    _edge_kernel[(num_rows,)](
        *(logits, *rows, *limits, workspace.active, workspace.num_active, workspace.bounds, *stats, *kept),
        *(logits.stride(0), workspace.active.stride(0), vocab_size),
        SHIFT=shift,
        CHUNKS=_CHUNKS,
        num_warps=8,
    )


@triton.jit
def _active_kernel(
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    maximum_ptr,
    tops_ptr,
    masses_ptr,
    active_ptr,
    num_active_ptr,
    bounds_ptr,
    chunk_stride,
    vocab_size,
    num_chunks,
    SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    top_k, top_p, min_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(min_p_ptr + row)
    by_count, by_mass = (top_k > 0) & (top_k < vocab_size), top_p < 1
    maximum = tl.load(maximum_ptr + row)
    num_active = 0
    if (by_count | by_mass | (min_p > 0)) & (maximum == maximum):
        inverse = inverse_of(tl.load(temperatures_ptr + row))
        tops, weights = chunk_weights(tops_ptr, masses_ptr, row * chunk_stride, num_chunks, inverse, BLOCK)
        shares = weights_of(tops, maximum, inverse).to(tl.float64)
        keys = _key(tops, SHIFT)
        max_count = tl.where(by_count, top_k, vocab_size)
        max_mass = tl.where(by_count | (top_p >= 1), float("inf"), top_p * tl.sum(weights))
        low, high = _key(float("-inf") + maximum * 0, SHIFT), _key(maximum, SHIFT) + 1
        middle = _middle(low, high)
        while middle > low:
            above = keys >= middle
            mass = tl.sum(tl.where(above, shares, 0.0))
            reached = (tl.sum(above.to(tl.int32)) >= max_count) | (mass >= max_mass)
            low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
            middle = _middle(low, high)
        chunk = tl.arange(0, BLOCK)
        active = (keys >= low) & (chunk < num_chunks) & (by_count | by_mass | (shares >= min_p))
        place = row * chunk_stride + tl.cumsum(active.to(tl.int32)) - 1
        tl.store(active_ptr + place, chunk, mask=active)
        tl.store(bounds_ptr + row, _logit(low, SHIFT))
        num_active = tl.sum(active.to(tl.int32))
    tl.store(num_active_ptr + row, num_active)


@triton.jit
def _edge_kernel(
    logits_ptr,
    temperatures_ptr,
    seeds_ptr,
    positions_ptr,
    choices_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    active_ptr,
    num_active_ptr,
    bounds_ptr,
    maximum_ptr,
    log_total_ptr,
    tokens_ptr,
    logprobs_ptr,
    kept_log_total_ptr,
    floor_ptr,
    last_tie_ptr,
    stride,
    chunk_stride,
    vocab_size,
    SHIFT: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    temperature, maximum = tl.load(temperatures_ptr + i), tl.load(maximum_ptr + i)
    log_total = tl.load(log_total_ptr + i)
    kept_log_total, floor, last_tie = log_total, float("-inf") + temperature * 0, _NO_TIE + i * 0
    num_active = tl.load(num_active_ptr + i)
    if num_active > 0:
        row = (
            logits_ptr + i * stride,
            active_ptr + i * chunk_stride,
            num_active,
            vocab_size,
            maximum,
            inverse_of(temperature),
        )
        limits = (tl.load(top_k_ptr + i), tl.load(top_p_ptr + i), tl.load(min_p_ptr + i))
        floor, last_tie = _edge(row, limits, tl.load(bounds_ptr + i), tl.exp(log_total), SHIFT, CHUNKS)
        total = _kept_total(row, floor, last_tie, CHUNKS)
        kept_log_total = tl.log(total)
        if tl.load(choices_ptr + i) == _DRAWN:
            u = uniform(tl.load(seeds_ptr + i), tl.load(positions_ptr + i))
            token = _draw(row, floor, last_tie, u * total, CHUNKS)
            x = tl.load(logits_ptr + i * stride + token).to(tl.float32)
            tl.store(tokens_ptr + i, token.to(tl.int64))
            tl.store(logprobs_ptr + i, logprob_of(x, maximum, temperature, log_total))
    tl.store(kept_log_total_ptr + i, kept_log_total)
    tl.store(floor_ptr + i, floor)
    tl.store(last_tie_ptr + i, last_tie)


@triton.jit
def _edge(row, limits, bound, total, SHIFT: tl.constexpr, CHUNKS: tl.constexpr):
    """Edges (floor, last tie) of a row, see `KeptTokens`; only min-p's may lie below `bound`."""
    top_k, top_p, min_p = limits
    vocab_size, maximum, inverse = row[3], row[4], row[5]
    by_count, by_mass = (top_k > 0) & (top_k < vocab_size), top_p < 1
    max_count = tl.where(by_count, top_k, vocab_size)
    max_mass = tl.where(by_count, float("inf"), top_p * total)
    low, num_ties = _key(bound, SHIFT), max_count * 0
    num_walks = by_count.to(tl.int32) + by_mass.to(tl.int32)
    for _ in range(0, num_walks):  # top-p applies to the mass that top-k keeps
        low, above, mass = _walk(row, low, max_count, max_mass, SHIFT, CHUNKS)
        each = weights_of(_logit(low, SHIFT), maximum, inverse).to(tl.float64)
        missing = tl.where(each > 0, tl.ceil((max_mass - mass) / tl.where(each > 0, each, 1.0)), float("inf"))
        num_ties = tl.minimum(tl.maximum(missing, 1.0), (max_count - above).to(tl.float64)).to(tl.int64)
        max_mass = top_p * (mass + num_ties.to(tl.float64) * each)
    floor, last_tie = float("-inf") + maximum * 0, _NO_TIE + num_ties * 0
    if num_walks > 0:
        floor = _logit(low, SHIFT)
        last_tie = _last_tie(row, low, num_ties, SHIFT, CHUNKS)
    if min_p > 0:
        likely = _lowest_likely(row, min_p, CHUNKS)
        last_tie = tl.where(likely > floor, _NO_TIE, last_tie)
        floor = tl.maximum(likely, floor)
    return floor, last_tie


@triton.jit
def _walk(row, low, max_count, max_mass, SHIFT: tl.constexpr, CHUNKS: tl.constexpr):
    """(key, count, mass): the highest key that reaches a limit with all above it; count and mass strictly above it.

    `low` is a key that reaches a limit.
    """
    high = _key(row[4], SHIFT) + 1
    count, mass = max_count * 0, max_mass * 0.0
    mass = tl.where(mass == mass, mass, 0.0)
    middle = _middle(low, high)
    while middle > low:
        count_here, mass_here = max_count * 0, mass * 0.0
        for start in range(0, row[2], CHUNKS):
            x, _ = _candidates(row, start, CHUNKS)
            above = _key(x, SHIFT) >= middle
            count_here += tl.sum(above.to(tl.int32))
            mass_here += tl.sum(tl.where(above, weights_of(x, row[4], row[5]), 0.0).to(tl.float64))
        reached = (count_here >= max_count) | (mass_here >= max_mass)
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
        count, mass = tl.where(reached, count, count_here), tl.where(reached, mass, mass_here)
        middle = _middle(low, high)
    return low, count, mass


@triton.jit
def _last_tie(row, key, num_ties, SHIFT: tl.constexpr, CHUNKS: tl.constexpr):
    """Id of tie number `num_ties`, from 1, among tokens whose key is `key`; no limit if there are not more."""
    seen, last = num_ties * 0, _NO_TIE + num_ties * 0
    for start in range(0, row[2], CHUNKS):
        x, token = _candidates(row, start, CHUNKS)
        tie = ((_key(x, SHIFT) == key) & (token < row[3])).to(tl.int32)
        counts = tl.sum(tie, axis=1)
        rank = seen + (tl.cumsum(counts) - counts)[:, None] + tl.cumsum(tie, axis=1)
        found = tl.min(tl.where((tie > 0) & (rank == num_ties), token.to(tl.int64), _NO_TIE))
        last = tl.minimum(last, found)
        seen += tl.sum(counts)
    return tl.where(seen <= num_ties, _NO_TIE, last)


@triton.jit
def _lowest_likely(row, min_p, CHUNKS: tl.constexpr):
    """The lowest logit that is at least `min_p` times as likely as the largest."""
    lowest = row[4]
    for start in range(0, row[2], CHUNKS):
        x, _ = _candidates(row, start, CHUNKS)
        likely = weights_of(x, row[4], row[5]).to(tl.float64) >= min_p
        lowest = tl.minimum(lowest, tl.min(tl.where(likely, x, float("inf"))))
    return lowest


@triton.jit
def _kept_total(row, floor, last_tie, CHUNKS: tl.constexpr):
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, row[2], CHUNKS):
        x, token = _candidates(row, start, CHUNKS)
        total += tl.sum(_kept_weights(row, x, token, floor, last_tie))
    return total


@triton.jit
def _draw(row, floor, last_tie, target, CHUNKS: tl.constexpr):
    """The token at which the running sum of kept weights exceeds `target`, else the last with a weight."""
    running, before = target * 0.0, target * 0.0
    place, found = row[2] * 0, row[2] * 0
    for start in range(0, row[2], CHUNKS):
        x, token = _candidates(row, start, CHUNKS)
        mass = tl.sum(_kept_weights(row, x, token, floor, last_tie))
        here = (found == 0) & (mass > 0)
        place, before = tl.where(here, start, place), tl.where(here, running, before)
        running += mass
        found = tl.where(running > target, 1, found)
    x, token = _candidates(row, place, CHUNKS)
    masses = tl.sum(_kept_weights(row, x, token, floor, last_tie), axis=1)
    index, inside, _ = pick(masses, target - before)
    chunk = tl.load(row[1] + place + index)
    x = load_chunk(row[0], chunk, row[3])
    token = chunk * _CHUNK + tl.arange(0, _CHUNK)
    index, _, _ = pick(_kept_weights(row, x, token, floor, last_tie), target - before - inside)
    return chunk * _CHUNK + index


@triton.jit
def _kept_weights(row, x, token, floor, last_tie):
    stays = (x > floor) | ((x == floor) & (token <= last_tie))
    return tl.where(stays, weights_of(x, row[4], row[5]), 0.0).to(tl.float64)


@triton.jit
def _candidates(row, start, CHUNKS: tl.constexpr):
    """Logits (float32) and ids [CHUNKS, CHUNK] of listed chunks from `start`, in order; -inf and V past their end.

    A row is (its logits, its listed chunks, how many, V, its maximum, 1 / its temperature).
    """
    logits_ptr, active_ptr, num_active, vocab_size, _, _ = row
    place = start + tl.arange(0, CHUNKS)
    chunk = tl.load(active_ptr + place, mask=place < num_active, other=0)
    token = chunk[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    inside = (place < num_active)[:, None] & (token < vocab_size)
    x = tl.load(logits_ptr + token, mask=inside, other=-float("inf")).to(tl.float32)
    return x, tl.where(inside, token, vocab_size)


@triton.jit
def _key(x, SHIFT: tl.constexpr):
    """int32 in the order of the float32 `x`, equal for 0.0 and -0.0, without the lowest SHIFT bits, which are zero."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True) >> SHIFT
    return bits ^ ((bits >> 31) & (0x7FFFFFFF >> SHIFT))


@triton.jit
def _logit(key, SHIFT: tl.constexpr):
    """The float32 with this key."""
    return ((key ^ ((key >> 31) & (0x7FFFFFFF >> SHIFT))) << SHIFT).to(tl.float32, bitcast=True)


@triton.jit
def _middle(low, high):
    """Mean of two keys, rounded down, without overflow."""
    return (low >> 1) + (high >> 1) + (low & high & 1)
