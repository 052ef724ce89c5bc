"""The merge kernel: turns the parts of items that were split between programs into rows."""

import triton
import triton.language as tl

from rollout_engine.kernels.triton.output import write
from rollout_engine.kernels.triton.softmax import LOWEST, merge_factors
from rollout_engine.kernels.triton.work import COLUMNS

_COLUMNS = tl.constexpr(COLUMNS)
_AT_ONCE = tl.constexpr(8)
"""Parts loaded together, to overlap their memory latency."""


@triton.jit
def merge_kernel(work, parts, output, SHAPE: tl.constexpr):
    """Each program merges one row of the item that begins in one attention program's share and continues past it."""
    program = tl.program_id(0)
    row = tl.program_id(1)
    share_start = tl.load(work.shares + program * 2 + 1)
    index = tl.load(work.shares + program * 2 + 2)
    cut = tl.load(work.shares + program * 2 + 3)
    if cut < tl.load(work.line):
        item = work.items + index * _COLUMNS
        units = tl.load(item + 6) - tl.load(item + 5)
        before = tl.load(item + 7) * SHAPE.num_kv_heads
        head = (cut - before) // units
        begin = before + head * units
        is_row = row < tl.load(item + 2) * SHAPE.group
        if (begin < cut) & (begin >= share_start) & is_row:
            chunk = tl.load(work.line + 1)
            acc, top, total = _merge(program, row, cut, begin + units, chunk, parts, SHAPE)
            one = tl.zeros([1], tl.int32)
            token = (tl.load(item + 1) + row // SHAPE.group + one).to(tl.int64)
            q_head = head * SHAPE.group + row % SHAPE.group + one
            top += tl.zeros([1], tl.float32)
            total += tl.zeros([1], tl.float32)
            write(output, token, q_head, one == 0, acc[None, :], top, total, SHAPE)


@triton.jit
def _merge(program, row, cut, end, chunk, parts, SHAPE: tl.constexpr):
    """Merge the row's part in slot 0 of `program` with those of the units [cut, end), one after the other."""
    top, total, acc = _load_part(parts, program.to(tl.int64) * SHAPE.slots * SHAPE.rows + row, True, SHAPE)
    if SHAPE.deterministic:
        count = end - cut
    else:
        count = (end - 1) // chunk - program
    for base in range(0, count, _AT_ONCE):
        for ahead in tl.static_range(_AT_ONCE):
            step = base + ahead
            if SHAPE.deterministic:
                slot = ((cut + step) // chunk).to(tl.int64) * SHAPE.slots + 1 + (cut + step) % chunk
            else:
                slot = (program + 1 + step).to(tl.int64) * SHAPE.slots + 1
            other_top, other_total, other_acc = _load_part(parts, slot * SHAPE.rows + row, step < count, SHAPE)
            top, share, other_share = merge_factors(top, other_top)
            total = total * share + other_total * other_share
            acc = acc * share + other_acc * other_share
    return acc, top, total


@triton.jit
def _load_part(parts, place, there, SHAPE: tl.constexpr):
    """One row of a part; an empty part unless `there`."""
    column = tl.arange(0, SHAPE.block_v)
    kept = (column < SHAPE.dim_v) & there
    top = tl.load(parts.tops + place, mask=there, other=LOWEST)
    total = tl.load(parts.totals + place, mask=there, other=0.0)
    return top, total, tl.load(parts.accs + place * SHAPE.dim_v + column, mask=kept, other=0.0)
