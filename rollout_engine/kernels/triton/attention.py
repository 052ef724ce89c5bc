"""Attention over a work list: two kernels, which serve decode, chunks of prompts and shared prefixes alike.

    attention kernel    a fixed grid; each program walks through its share, item by item, one online softmax for each
    joining kernel      joins the parts of the items whose units were cut between programs, in order

A program writes an item that it has whole; of a cut one it leaves a part in the workspace, in slots of its own: slot 0
for the item that its share ends in, the others for the one that its share begins in.

A tiling that `is_ordered` makes the bits of a row depend on its position alone: each unit is one softmax of its own,
and units are joined from position 0 on, one after the other, in registers or by the joining kernel, in the same
arithmetic. Where a batch is cut then changes nothing. Otherwise a program's share of an item is one softmax.

Twin: `kernels.paged_attention.attend`.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from rollout_engine.kernels.scoring import Scoring
from rollout_engine.kernels.triton.attention_kernel import attention_kernel
from rollout_engine.kernels.triton.attention_shape import Lists, Numbers, Output, Parts, Pool, Queries, Shape
from rollout_engine.kernels.triton.joining_kernel import joining_kernel
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.softmax import LOG2_E
from rollout_engine.kernels.triton.tiling import Tiling
from rollout_engine.kernels.triton.work import WorkList


class Result(NamedTuple):
    """Where rows go. Rows of no item are left as they are."""

    out: Tensor
    """[T, H, Dv], any strides but the last."""
    lse: Tensor | None = None
    """float32 [T, H], contiguous: natural log-sum-exp of the scores."""
    parts: Parts | None = None
    """[T, H, Dv] and [T, H]: written in place of `out` and `lse`, for another call's `initial`."""


def empty_parts(*shape: int, dim_v: int, device: torch.device | str) -> Parts:
    """Memory for parts: as a workspace [programs, slots, rows], or of rows [T, H]."""
    rows = torch.empty(2, *shape, dtype=torch.float32, device=device)
    return Parts(torch.empty(*shape, dim_v, dtype=torch.float32, device=device), rows[0], rows[1])


def attend(
    q: Tensor,
    layer: KVLayer,
    block_tables: Tensor,
    work: WorkList,
    tiling: Tiling,
    scoring: Scoring,
    result: Result,
    workspace: Parts,
    *,
    sinks: Tensor | None = None,
    initial: Parts | None = None,
) -> None:
    """q [T, H, Dk] reads the contexts of its items in `block_tables` int32 [N, max_blocks].

    Launches two kernels, allocates nothing, waits for nothing. `sinks` [H] count as a first key with these scores and
    a value of zeros. Items whose first unit is not 0 go on from the `initial` parts of their rows. `workspace` has
    [programs, `Tiling.slots`, at least the rows of an item]; calls that share one must run in turn.
    """
    shape = _shape(q, layer, work, tiling, scoring, result, workspace, sinks, initial)
    lists = Lists(work.items, work.shares, work.line)
    parts = workspace if result.parts is None else result.parts
    lse = workspace.tops if result.lse is None else result.lse
    output = Output(result.out, result.out.stride(0), result.out.stride(1), lse, parts)
    tables, keys, values = block_tables, layer.keys, layer.values
    attention_kernel[(work.num_programs,)](
        Queries(q, q.stride(0), q.stride(1)),
        Pool(keys, values, keys.stride()[:3], values.stride()[:3], tables, tables.stride(0)),
        lists,
        workspace,
        output,
        workspace.tops if sinks is None else sinks,
        workspace if initial is None else initial,
        _numbers(scoring),
        shape,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=not tiling.is_ordered,
    )
    if not work.is_whole:
        rows = work.tokens_per_item * shape.group
        joining_kernel[(work.num_programs, rows)](
            lists, workspace, output, shape, num_warps=1, enable_fp_fusion=not tiling.is_ordered
        )


def _numbers(scoring: Scoring) -> Numbers:
    if scoring.softcap:
        return Numbers(scoring.scale / scoring.softcap, scoring.softcap * LOG2_E.value, scoring.sliding_window)
    return Numbers(scoring.scale * LOG2_E.value, 1.0, scoring.sliding_window)


def _shape(
    q: Tensor,
    layer: KVLayer,
    work: WorkList,
    tiling: Tiling,
    scoring: Scoring,
    result: Result,
    workspace: Parts,
    sinks: Tensor | None,
    initial: Parts | None,
) -> Shape:
    dim_k, dim_v = layer.keys.shape[3], layer.values.shape[3]
    group = q.shape[1] // layer.num_kv_heads
    _, slots, rows, _ = workspace.accs.shape
    assert work.tokens_per_item * group <= tiling.block_m, "items of more rows than a product has"
    assert work.is_whole or work.tokens_per_item * group <= rows, "items of more rows than the workspace has"
    assert work.unit == tiling.unit, "a work list in other units"
    return Shape(
        group=group,
        num_kv_heads=layer.num_kv_heads,
        dim_k=dim_k,
        dim_v=dim_v,
        block_k=triton.next_power_of_2(max(dim_k, 16)),
        block_v=triton.next_power_of_2(max(dim_v, 16)),
        block_size=layer.block_size,
        block_m=tiling.block_m,
        tile=tiling.tile,
        tiles_per_unit=tiling.unit // tiling.tile,
        rows=rows,
        slots=slots,
        is_ordered=tiling.is_ordered,
        skips_masks=tiling.skips_masks,
        has_window=scoring.sliding_window > 0,
        has_softcap=scoring.softcap > 0,
        has_sinks=sinks is not None,
        has_initial=initial is not None,
        writes_parts=result.parts is not None,
        writes_lse=result.lse is not None,
    )
