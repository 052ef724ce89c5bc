"""The most likely tokens of each row, sorted, without sorting the rest. Twin: `kernels.truncation.most_likely`.

A tournament: the chunk with the largest top yields its first such token, and its top becomes the largest of its tokens
that are later in the order (logit, then id). It reads the chunk tops that `sampling.sample` has written.
"""

import triton
import triton.language as tl
from torch import Tensor

from rollout_engine.kernels.row_stats import CHUNK, KeptTokens, RowStats
from rollout_engine.kernels.triton.sampling import SamplingWorkspace, load_chunk, logprob_of, num_chunks_of
from rollout_engine.kernels.triton.tiling import next_power_of_2

_CHUNK = tl.constexpr(CHUNK)


def top_tokens(
    logits: Tensor,
    temperatures: Tensor,
    workspace: SamplingWorkspace,
    stats: RowStats,
    ids: Tensor,
    logprobs: Tensor,
    kept: KeptTokens | None = None,
) -> None:
    """Fill `ids` int32 [N, k] and `logprobs` float32 [N, k], k <= V. Call it after `sampling.sample` of the same rows.

    Equal to the twin, ties by id. With `kept` the log-probs are those after truncation, -inf for tokens it cuts. A row
    that cannot be sampled gets ids -1 and log-probs NaN.
    """
    (num_rows, vocab_size), width = logits.shape, ids.shape[1]
    if not 0 < width <= vocab_size or ids.shape != logprobs.shape:
        raise ValueError(
            f"ids and logprobs should be [{num_rows}, k] with k in [1, {vocab_size}], got {list(ids.shape)} and "
            f"{list(logprobs.shape)}."
        )
    if num_rows == 0:
        return
    num_chunks = num_chunks_of(vocab_size)
    log_totals = stats.log_total if kept is None else kept.log_total
    edges = (stats.maximum, stats.tokens) if kept is None else (kept.floor, kept.last_tie)
    _top_kernel[(num_rows,)](
        *(logits, temperatures, workspace.tops, stats.maximum, log_totals, *edges, ids, logprobs),
        *(logits.stride(0), workspace.tops.stride(0), ids.stride(0), logprobs.stride(0), vocab_size, num_chunks, width),
        HAS_EDGES=kept is not None,
        BLOCK=next_power_of_2(num_chunks),
        num_warps=4,
    )


@triton.jit(do_not_specialize=["ids_stride", "logprobs_stride", "width"])
def _top_kernel(
    logits_ptr,
    temperatures_ptr,
    tops_ptr,
    maximum_ptr,
    log_total_ptr,
    floor_ptr,
    last_tie_ptr,
    ids_ptr,
    logprobs_ptr,
    stride,
    chunk_stride,
    ids_stride,
    logprobs_stride,
    vocab_size,
    num_chunks,
    width,
    HAS_EDGES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    temperature, maximum = tl.load(temperatures_ptr + row), tl.load(maximum_ptr + row)
    log_total = tl.load(log_total_ptr + row)
    chunk, lane = tl.arange(0, BLOCK), tl.arange(0, _CHUNK)
    tops = tl.load(tops_ptr + row * chunk_stride + chunk, mask=chunk < num_chunks, other=-float("inf"))
    last_of_chunk = tl.full((BLOCK,), -1, tl.int32)  # last taken of the tokens equal to its top; CHUNK: all
    for i in range(0, width):
        top = tl.max(tops)
        first = tl.min(tl.where((tops == top) & (last_of_chunk < _CHUNK), chunk, BLOCK - 1))
        x = load_chunk(logits_ptr, first, vocab_size)
        taken = tl.max(tl.where(chunk == first, last_of_chunk, -1))
        real = first * _CHUNK + lane < vocab_size
        tie = real & (x == top)
        inside = tl.min(tl.where(tie & (lane > taken), lane, _CHUNK - 1))
        has_ties = tl.sum((tie & (lane > inside)).to(tl.int32)) > 0
        has_more = tl.sum((real & (x < top)).to(tl.int32)) > 0
        below = tl.max(tl.where(x < top, x, -float("inf")))
        tops = tl.where((chunk == first) & (has_ties == 0), below, tops)
        taken = tl.where(has_ties, inside, tl.where(has_more, -1, _CHUNK))
        last_of_chunk = tl.where(chunk == first, taken, last_of_chunk)
        token = first * _CHUNK + inside
        logprob = logprob_of(top, maximum, temperature, log_total)
        if HAS_EDGES:
            floor, last_tie = tl.load(floor_ptr + row), tl.load(last_tie_ptr + row)
            logprob = tl.where((top > floor) | ((top == floor) & (token <= last_tie)), logprob, -float("inf"))
        usable = maximum == maximum
        tl.store(ids_ptr + row * ids_stride + i, tl.where(usable, token, -1))
        tl.store(logprobs_ptr + row * logprobs_stride + i, tl.where(usable, logprob, float("nan")))
