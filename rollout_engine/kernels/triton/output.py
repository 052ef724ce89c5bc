"""Output of the attention kernels: rows as partial softmaxes, or finished."""

import triton
import triton.language as tl

from rollout_engine.kernels.triton.rounding import narrow
from rollout_engine.kernels.triton.softmax import LN_2


@triton.jit
def store_parts(parts, place, keep, acc, top, total, SHAPE: tl.constexpr):
    """Store one part per row at row `place` (int64) of `parts`."""
    column = tl.arange(0, SHAPE.block_v)
    kept = keep[:, None] & (column < SHAPE.dim_v)[None, :]
    tl.store(parts.accs + place[:, None] * SHAPE.dim_v + column[None, :], acc, mask=kept)
    tl.store(parts.tops + place, top, mask=keep)
    tl.store(parts.totals + place, total, mask=keep)


@triton.jit
def write(output, token, q_head, keep, acc, top, total, SHAPE: tl.constexpr):
    """Store the rows of (token, query head), whose whole context has been read."""
    row = token * (SHAPE.num_kv_heads * SHAPE.group) + q_head
    if SHAPE.writes_parts:
        store_parts(output.parts, row, keep, acc, top, total, SHAPE)
    else:
        total = tl.where(total == 0.0, 1.0, total)  # padding rows may have seen no key
        column = tl.arange(0, SHAPE.block_v)
        kept = keep[:, None] & (column < SHAPE.dim_v)[None, :]
        place = token * output.token_stride + q_head * output.head_stride
        result = narrow(acc / total[:, None], output.data.dtype.element_ty)
        tl.store(output.data + place[:, None] + column[None, :], result, mask=kept)
        if SHAPE.writes_lse:
            tl.store(output.lse + row, (top + tl.log2(total)) * LN_2, mask=keep)
