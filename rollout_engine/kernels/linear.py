"""Batch-invariant matrix products on the CPU: each row has the same bits whatever else is in the batch.

A GEMM library chooses its blocking by the number of rows, so a token's activations can change in the last bit with the
batch around it. Our own kernel (`cpu/gemm.cpp`) always accumulates in one order, and is used if it is fastest.
oneDNN is made invariant in two ways: prepacked weights fix the blocking over a range of row counts, and calls with
blocks of fixed height fix it elsewhere. `plan_for` tests, once per shape, which `RowPlan` is the first that holds on
this CPU, for one thread and for many.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_engine.kernels.cpu import gemm, int8

OWN, ONEDNN, LIBRARY = "own", "onednn", "library"
"""Kernels: ours, oneDNN with packed weights, or whatever `F.linear` calls."""

_ANY = 1 << 40


class NotInvariant(RuntimeError):
    """No batch-invariant product was found on this machine."""


class RowPlan(NamedTuple):
    """How to compute one GEMM shape: in blocks of at most `max_rows` rows, the last one padded up to `min_rows`."""

    kernel: str
    min_rows: int
    max_rows: int
    float32_out: bool = False
    """The float32 sums of bfloat16 products are returned unrounded."""
    int8: bool = False
    """The weight is rounded to int8 codes (`cpu.int8`)."""

    @property
    def is_bounded(self) -> bool:
        """Whether a call with many rows is cut into blocks."""
        return self.max_rows < _ANY


Operand = Tensor | gemm.PackedWeight
"""A weight in the layout that a plan's kernel reads."""

PLAIN = RowPlan(LIBRARY, 1, _ANY)
"""Plain `F.linear`: rows may depend on their batch."""

_OWN = RowPlan(OWN, 0, _ANY)
_OWN_FLOAT32_OUT = RowPlan(OWN, 0, _ANY, float32_out=True)
_OWN_INT8 = RowPlan(OWN, 0, _ANY, int8=True)
_LIBRARY_PLANS = (
    RowPlan(ONEDNN, 2, 256),
    RowPlan(ONEDNN, 32, 32),
    RowPlan(ONEDNN, 16, 16),
    RowPlan(ONEDNN, 64, 64),
    RowPlan(LIBRARY, 16, 256),
    RowPlan(LIBRARY, 32, 32),
    RowPlan(LIBRARY, 64, 64),
)
_HEIGHTS = (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 64, 65, 128, 200, 256)
"""Row counts to test: around the blockings that libraries use."""
_OWN_HEIGHTS = (*range(1, 14), 15, 16, 17, 31, 32, 33, 48, 65, 200)
"""Every block height of our kernel, and row counts made of several blocks."""
_OWN_HEIGHTS_THREADED = (33, 200)
"""Threads divide the blocks that one thread has proven, so few heights suffice; on a busy machine each is slow."""


def pack(weight: Tensor, plan: RowPlan, panels: Tensor | None = None) -> Operand:
    """The operand for `matmul`: our panels, int8 codes or oneDNN's layout of `weight` [N, K], or the weight itself.

    A weight that is not contiguous is copied. `panels`: memory from `gemm.empty_panels` for ours, except codes.
    """
    if plan.int8:
        return int8.pack(weight)
    if plan.kernel == OWN:
        return gemm.pack(weight, panels)
    weight = weight.contiguous()
    return torch.ops.mkldnn._reorder_linear_weight(weight) if plan.kernel == ONEDNN else weight


def matmul(x: Tensor, operand: Operand, bias: Tensor | None, plan: RowPlan) -> Tensor:
    """x [R, K] @ weight.T + bias -> [R, N], in `x.dtype`, or float32 under a plan with `float32_out`.

    Under a plan of `plan_for` each row depends only on itself.
    """
    rows = x.shape[0]
    if plan.min_rows <= rows <= plan.max_rows:
        return _gemm(x, operand, bias, plan)
    blocks = [_gemm(_padded(block, plan.min_rows), operand, bias, plan) for block in x.split(plan.max_rows)]
    return blocks[0][:rows] if len(blocks) == 1 else torch.cat(blocks)[:rows]


def plan_for(weight: Tensor, *, float32_out: bool = False, as_int8: bool = False) -> RowPlan:
    """The first plan under which products with a weight of this shape [N, K] and dtype are batch-invariant, by test.

    `float32_out` asks for plans with float32 results; for bfloat16 only our own kernel has one. `as_int8` asks for the
    plan that rounds the weight to int8 codes. Raises `NotInvariant` if none holds. The result depends on the CPU,
    compiler and library alone, so a trainer and an engine on the same kind of machine find the same plan.
    """
    return _plan(*weight.shape, weight.dtype, float32_out and weight.dtype != torch.float32, as_int8)


def _gemm(x: Tensor, operand: Operand, bias: Tensor | None, plan: RowPlan) -> Tensor:
    if isinstance(operand, gemm.PackedWeight):
        return gemm.matmul(x, operand, bias, float32_out=plan.float32_out)
    if plan.kernel == ONEDNN:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, operand, bias, "none", [], "")
        return out
    return F.linear(x, operand, bias)


def _padded(block: Tensor, min_rows: int) -> Tensor:
    missing = min_rows - block.shape[0]
    return F.pad(block, (0, 0, 0, missing)) if missing > 0 else block


@cache
def _plan(out_features: int, in_features: int, dtype: torch.dtype, float32_out: bool, as_int8: bool = False) -> RowPlan:
    # Columns of our kernel are independent too: two panels, and one as narrow as the last, represent all.
    own_features = min(out_features, 2 * gemm.PANEL + out_features % gemm.PANEL)
    for plan in _candidates(dtype, float32_out, as_int8):
        if _proven(plan, own_features if plan.kernel == OWN else out_features, in_features, dtype):
            return plan
    raise NotInvariant(
        f"no way was found to make {dtype} products {'in float32 ' if float32_out else ''}with a weight of shape "
        f"[{out_features}, {in_features}] independent of the batch on this CPU"
    )


def _candidates(dtype: torch.dtype, float32_out: bool = False, as_int8: bool = False) -> tuple[RowPlan, ...]:
    """Plans in order of expected speed, by dtype and instruction set; never timed, so the choice is reproducible."""
    if float32_out or as_int8:
        return (_OWN_INT8 if as_int8 else _OWN_FLOAT32_OUT,) if gemm.supports(dtype) else ()
    if not gemm.supports(dtype):
        return _LIBRARY_PLANS
    return (_OWN, *_LIBRARY_PLANS) if gemm.is_fast(dtype) else (*_LIBRARY_PLANS, _OWN)


@cache
@torch.no_grad()
def _proven(plan: RowPlan, out_features: int, in_features: int, dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(320, in_features, generator=generator).to(dtype)
    # A few hundred distinct weight rows reveal different blockings, and are cheap to generate even for a vocabulary.
    seen = torch.randn(min(out_features, 256), in_features, generator=generator).to(dtype)
    weight = seen.repeat(-(-out_features // len(seen)), 1)[:out_features]
    threads = torch.get_num_threads()
    try:
        return _holds(plan, x, weight, sorted({1, 2, threads}))
    finally:
        torch.set_num_threads(threads)


def _holds(plan: RowPlan, x: Tensor, weight: Tensor, thread_counts: list[int]) -> bool:
    try:
        operand = pack(weight, plan)
        expected = matmul(x, operand, None, plan)
        for threads in thread_counts:
            torch.set_num_threads(threads)
            for start, rows in _trial_windows(plan, len(x), threads):
                if not torch.equal(
                    matmul(x[start : start + rows], operand, None, plan), expected[start : start + rows]
                ):
                    return False
    except RuntimeError:  # this dtype has no packed kernel here
        return False
    return True


def _trial_windows(plan: RowPlan, total: int, threads: int) -> list[tuple[int, int]]:
    """(start, rows) of the row ranges to compare: the kinds of height a plan may call, at different offsets."""
    if plan.kernel == OWN:
        heights = list(_OWN_HEIGHTS if threads == 1 else _OWN_HEIGHTS_THREADED)
    elif plan.min_rows == plan.max_rows:
        heights = [1, plan.min_rows, plan.min_rows + 3, 3 * plan.min_rows]
    else:
        heights = [1, *(height for height in _HEIGHTS if height >= plan.min_rows)]
    return [((7 * rows) % (total - rows + 1), rows) for rows in heights]
