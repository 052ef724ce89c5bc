"""Outcomes of draws, for the host to read, and the drawn tokens, for the next step.

outcome, float64 [N, 4]      token, log-prob, status, log of the mass that truncation kept
"""

from enum import IntEnum

import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.row_stats import CHUNK, KeptTokens, RowStats
from rollout_engine.kernels.triton.sampling import SamplingWorkspace, inverse_of, logprob_of, num_chunks_of, weights_of

_ROWS = 128
_CHUNKS = 16
"""Chunks read together."""
_CHUNK = tl.constexpr(CHUNK)


class Status(IntEnum):
    """Status of a row's draw."""

    NONE_LEFT = -1
    """The edits left no token with a finite logit."""
    UNUSABLE = 0
    """The model's logits cannot be sampled (NaN or +inf)."""
    DRAWN = 1


_NONE_LEFT, _UNUSABLE = tl.constexpr(float(Status.NONE_LEFT)), tl.constexpr(float(Status.UNUSABLE))
_DRAWN = tl.constexpr(float(Status.DRAWN))


def write_outcomes(
    stats: RowStats, kept: KeptTokens | None, truncates: Tensor, outcome: Tensor, last_tokens: Tensor, places: Tensor
) -> None:
    """Write `stats` [N] to the first rows of `outcome`, and tokens to `last_tokens` int64 at `places` int64 [N].

    Rows with a negative place are padding; their token is not stored. `truncates` bool [N]: rows with truncation rules.
    """
    num_rows = len(stats.tokens)
    _outcome_kernel[(triton.cdiv(num_rows, _ROWS),)](
        *(*stats, stats.log_total if kept is None else kept.log_total, truncates),
        *(outcome, last_tokens, places, num_rows),
        HAS_RULES=kept is not None,
        BLOCK=_ROWS,
        num_warps=4,
    )


def write_edited_outcomes(
    logits: Tensor,
    temperatures: Tensor,
    stats: RowStats,
    rows: Tensor,
    edited: Tensor,
    edited_stats: RowStats,
    workspace: SamplingWorkspace,
    kept: KeptTokens | None,
    truncates: Tensor,
    outcome: Tensor,
    last_tokens: Tensor,
    places: Tensor,
) -> None:
    """Overwrite the outcomes of `rows` int64 [E] of `logits` [N, V] with the draws from their `edited` logits [E, V].

    `edited_stats`, `workspace`, `kept`, `truncates` and `places` belong to the edited rows. Log-probs and masses are
    those of `logits` at `temperatures` float32 [N], with `stats` [N], whose tokens are overwritten too.
    """
    num_rows, vocab_size = edited.shape
    edges = (edited_stats.maximum, edited_stats.tokens) if kept is None else (kept.floor, kept.last_tie)
    _edited_outcome_kernel[(num_rows,)](
        *(logits, temperatures, stats.maximum, stats.log_total, stats.tokens, rows, edited),
        *(edited_stats.maximum, edited_stats.tokens, workspace.active, workspace.num_active, *edges, truncates),
        *(outcome, last_tokens, places),
        *(logits.stride(0), edited.stride(0), workspace.active.stride(0)),
        *(vocab_size, num_chunks_of(vocab_size)),
        HAS_RULES=kept is not None,
        CHUNKS=_CHUNKS,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["num_rows"])
def _outcome_kernel(
    maximum_ptr,
    log_total_ptr,
    tokens_ptr,
    logprobs_ptr,
    kept_log_total_ptr,
    truncates_ptr,
    outcome_ptr,
    last_tokens_ptr,
    places_ptr,
    num_rows,
    HAS_RULES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    token = tl.load(tokens_ptr + row, mask=inside, other=0)
    maximum = tl.load(maximum_ptr + row, mask=inside, other=0.0)
    outcome_ptr += row * 4
    tl.store(outcome_ptr, token.to(tl.float64), mask=inside)
    logprob = tl.load(logprobs_ptr + row, mask=inside, other=0.0)
    tl.store(outcome_ptr + 1, logprob.to(tl.float64), mask=inside)
    status = tl.where(maximum == maximum, _DRAWN, _UNUSABLE).to(tl.float64)
    tl.store(outcome_ptr + 2, status, mask=inside)
    mass = status * 0
    if HAS_RULES:
        log_total = tl.load(log_total_ptr + row, mask=inside, other=0.0)
        less = tl.load(kept_log_total_ptr + row, mask=inside, other=0.0) - log_total
        truncates = tl.load(truncates_ptr + row, mask=inside, other=0) != 0
        mass = tl.where(truncates & (less < 0), less, mass)
    tl.store(outcome_ptr + 3, mass, mask=inside)
    place = tl.load(places_ptr + row, mask=inside, other=-1)
    tl.store(last_tokens_ptr + place, token, mask=inside & (place >= 0))


@triton.jit
def _edited_outcome_kernel(
    logits_ptr,
    temperatures_ptr,
    maximum_ptr,
    log_total_ptr,
    tokens_ptr,
    rows_ptr,
    edited_ptr,
    edited_maximum_ptr,
    edited_tokens_ptr,
    active_ptr,
    num_active_ptr,
    floor_ptr,
    last_tie_ptr,
    truncates_ptr,
    outcome_ptr,
    last_tokens_ptr,
    places_ptr,
    stride,
    edited_stride,
    chunk_stride,
    vocab_size,
    num_chunks,
    HAS_RULES: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i)
    token, edited_maximum = tl.load(edited_tokens_ptr + i), tl.load(edited_maximum_ptr + i)
    temperature, maximum = tl.load(temperatures_ptr + row), tl.load(maximum_ptr + row)
    log_total = tl.load(log_total_ptr + row)
    logits_ptr += row * stride
    logprob = logprob_of(tl.load(logits_ptr + token).to(tl.float32), maximum, temperature, log_total)
    usable = maximum == maximum
    left = tl.where(edited_maximum == edited_maximum, _DRAWN, _NONE_LEFT)
    mass = log_total * 0
    if HAS_RULES and (tl.load(truncates_ptr + i) != 0) & usable & (edited_maximum == edited_maximum):
        lists = (active_ptr + i * chunk_stride, tl.load(num_active_ptr + i), num_chunks, vocab_size)
        edges = (tl.load(floor_ptr + i), tl.load(last_tie_ptr + i))
        edited_ptr += i * edited_stride
        top, total = _kept_mass(logits_ptr, edited_ptr, lists, edges, inverse_of(temperature), CHUNKS)
        mass = tl.div_rn(top - maximum, temperature).to(tl.float64) + tl.log(total) - log_total
    outcome_ptr += row * 4
    tl.store(outcome_ptr, token.to(tl.float64))
    tl.store(outcome_ptr + 1, logprob.to(tl.float64))
    tl.store(outcome_ptr + 2, tl.where(usable, left, _UNUSABLE).to(tl.float64))
    tl.store(outcome_ptr + 3, tl.where(mass < 0, mass, 0.0))
    tl.store(tokens_ptr + row, token)
    tl.store(last_tokens_ptr + tl.load(places_ptr + i), token)


@triton.jit
def _kept_mass(logits_ptr, edited_ptr, lists, edges, inverse, CHUNKS: tl.constexpr):
    """(largest logit, float64 sum of weights under it) of the tokens whose edited logits the edges keep."""
    num_active, num_chunks = lists[1], lists[2]
    count = tl.where(num_active > 0, num_active, num_chunks)
    top = float("-inf") + inverse * 0
    for start in range(0, count, CHUNKS):
        top = tl.maximum(top, tl.max(_kept_logits(logits_ptr, edited_ptr, lists, edges, start, count, CHUNKS)))
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, count, CHUNKS):
        x = _kept_logits(logits_ptr, edited_ptr, lists, edges, start, count, CHUNKS)
        total += tl.sum(weights_of(x, top, inverse).to(tl.float64))
    return top, total


@triton.jit
def _kept_logits(logits_ptr, edited_ptr, lists, edges, start, count, CHUNKS: tl.constexpr):
    """float32 [CHUNKS, CHUNK] logits of listed chunks, or of all if none is listed; -inf if a token is cut."""
    active_ptr, num_active, _, vocab_size = lists
    place = start + tl.arange(0, CHUNKS)
    listed = tl.load(active_ptr + place, mask=place < num_active, other=0)
    chunk = tl.where(num_active > 0, listed, place)
    token = chunk[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    inside = (place < count)[:, None] & (token < vocab_size)
    edited = tl.load(edited_ptr + token, mask=inside, other=-float("inf"))
    stays = (edited > edges[0]) | ((edited == edges[0]) & (token <= edges[1]) & (edited > -float("inf")))
    x = tl.load(logits_ptr + token, mask=inside, other=-float("inf")).to(tl.float32)
    return tl.where(stays, x, -float("inf"))
