"""Attention over a work list: two kernels for decode, chunks of prompts and shared prefixes alike.

    attention kernel    a fixed grid; each program processes its share item by item, one online softmax for each
    merge kernel        merges the partial softmaxes of items that were split between programs, in order

A program writes the items that it has whole; of a split one it stores a part in its own slots of the workspace: slot 0
for the item that its share ends in, the others for the one that its share begins in.

With a `deterministic` tiling a row's bits depend on its position alone: each unit is a softmax of its own, and units
are merged one by one from position 0 on, in registers or by the merge kernel, with the same arithmetic. Where items are
split then changes nothing. Otherwise a program's share of an item is one softmax.

Twin: `kernels.paged_attention.attend`.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton.attention_kernel import attention_kernel
from rollout_engine.kernels.triton.attention_shape import Lists, Output, Parts, Pool, Queries, ScoreFactors, Shape
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.merge_kernel import merge_kernel
from rollout_engine.kernels.triton.softmax import LOG2_E
from rollout_engine.kernels.triton.tiling import Tiling
from rollout_engine.kernels.triton.work import WorkList


class Result(NamedTuple):
    """Output tensors. Rows that belong to no item are left unchanged."""

    out: Tensor
    """[T, H, Dv], any strides but the last."""
    lse: Tensor | None = None
    """float32 [T, H], contiguous: natural log-sum-exp of the scores."""
    parts: Parts | None = None
    """[T, H, Dv] and [T, H]: written instead of `out` and `lse`, as `initial` of another call."""


def empty_parts(*shape: int, dim_v: int, device: torch.device | str) -> Parts:
    """Uninitialised parts: a workspace [programs, slots, rows], or one part per row [T, H]."""
    rows = torch.empty(2, *shape, dtype=torch.float32, device=device)
    return Parts(torch.empty(*shape, dim_v, dtype=torch.float32, device=device), rows[0], rows[1])


def attend(
    q: Tensor,
    layer: KVLayer,
    block_tables: Tensor,
    work: WorkList,
    tiling: Tiling,
    params: AttentionParams,
    result: Result,
    workspace: Parts,
    *,
    sinks: Tensor | None = None,
    initial: Parts | None = None,
) -> None:
    """Attend with q [T, H, Dk] to the contexts of the work list's items in `block_tables` int32 [N, max_blocks].

    Launches two kernels, without allocation or synchronisation. `sinks` [H] act as a first key with these scores and a
    value of zeros. Items whose first unit is not 0 continue from the `initial` parts of their rows. `workspace` is
    [programs, `Tiling.slots`, at least the rows of an item]; calls that share one must run one after the other.
    """
    shape = _shape(q, layer, work, tiling, params, result, workspace, sinks, initial)
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
        _score_factors(params),
        shape,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        enable_fp_fusion=not tiling.deterministic,
    )
    if not work.is_whole:
        rows = work.tokens_per_item * shape.group
        merge_kernel[(work.num_programs, rows)](
            lists, workspace, output, shape, num_warps=1, enable_fp_fusion=not tiling.deterministic
        )


def _score_factors(params: AttentionParams) -> ScoreFactors:
    if params.softcap:
        return ScoreFactors(params.scale / params.softcap, params.softcap * LOG2_E.value, params.sliding_window)
    return ScoreFactors(params.scale * LOG2_E.value, 1.0, params.sliding_window)


def _shape(
    q: Tensor,
    layer: KVLayer,
    work: WorkList,
    tiling: Tiling,
    params: AttentionParams,
    result: Result,
    workspace: Parts,
    sinks: Tensor | None,
    initial: Parts | None,
) -> Shape:
    dim_k, dim_v = layer.keys.shape[3], layer.values.shape[3]
    group = q.shape[1] // layer.num_kv_heads
    _, slots, rows, _ = workspace.accs.shape
    assert work.tokens_per_item * group <= tiling.block_m, "an item has more rows than a product"
    assert work.is_whole or work.tokens_per_item * group <= rows, "an item has more rows than the workspace"
    assert work.unit == tiling.unit, "the work list uses another unit"
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
        deterministic=tiling.deterministic,
        skips_masks=tiling.skips_masks,
        has_window=params.sliding_window > 0,
        has_softcap=params.softcap > 0,
        has_sinks=sinks is not None,
        has_initial=initial is not None,
        writes_parts=result.parts is not None,
        writes_lse=result.lse is not None,
    )
