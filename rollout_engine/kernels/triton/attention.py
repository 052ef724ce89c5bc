"""Attention over a work list: two kernels for decode, chunks of prompts and shared prefixes alike.

    attention kernel    a fixed grid; each program processes its share item by item, one online softmax for each
    merge kernel        merges the partial softmaxes of items that were split between programs, in order

A program writes the items that it has whole; of a split one it stores a part in its own slots of the workspace: slot 0
for the item that its share ends in, the others for the one that its share begins in.

With a `deterministic` tiling a row's bits depend on its position alone: each unit is a softmax of its own, and units
are merged one by one from position 0 on, in registers or by the merge kernel, with the same arithmetic. Splitting items
then changes nothing. Otherwise a program's share of an item is one softmax.

Twin: `kernels.paged_attention.attend`.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton.attention_kernel import attention_kernel
from rollout_engine.kernels.triton.attention_shape import Lists, Output, Parts, Pool, Queries, ScoreFactors, Shape
from rollout_engine.kernels.triton.launches import Launcher
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.merge_kernel import merge_kernel
from rollout_engine.kernels.triton.softmax import LOG2_E
from rollout_engine.kernels.triton.tiling import Tiling, next_power_of_2
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
    parts = workspace if result.parts is None else result.parts
    lse = workspace.tops if result.lse is None else result.lse
    first_scores = workspace.tops if sinks is None else sinks
    keys, values, out = layer.keys, layer.values, result.out
    reads = q, keys, values, block_tables, first_scores, *(workspace if initial is None else initial)
    lists, writes = (work.items, work.shares, work.line, *workspace), (out, lse, *parts)
    out_strides = out.stride()[:2]
    read_strides = q.stride()[:2], keys.stride()[:3], values.stride()[:3], block_tables.stride(0)
    is_fused = not tiling.deterministic
    _attention.launch(
        (work.num_programs,),
        (*reads, *lists, *writes),
        (),
        (read_strides, out_strides, _score_factors(params), shape),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.max_registers,
        enable_fp_fusion=is_fused,
    )
    if not work.is_whole:
        rows = work.tokens_per_item * shape.group
        _merge.launch((work.num_programs, rows), (*lists, *writes), (), (out_strides, shape), enable_fp_fusion=is_fused)


def _attention_arguments(pointers: Sequence[Any], free: tuple[int, ...], rest: tuple[Any, ...]) -> tuple[Any, ...]:
    q, keys, values, tables, sinks, accs, tops, totals = pointers[:8]
    (q_strides, key_strides, value_strides, table_stride), out_strides, factors, shape = rest
    lists, workspace, output = _lists_and_output(pointers[8:], out_strides)
    pool = Pool(keys, values, key_strides, value_strides, tables, table_stride)
    return Queries(q, *q_strides), pool, lists, workspace, output, sinks, Parts(accs, tops, totals), factors, shape


def _merge_arguments(pointers: Sequence[Any], free: tuple[int, ...], rest: tuple[Any, ...]) -> tuple[Any, ...]:
    out_strides, shape = rest
    return *_lists_and_output(pointers, out_strides), shape


def _lists_and_output(pointers: Sequence[Any], out_strides: tuple[int, ...]) -> tuple[Lists, Parts, Output]:
    token_stride, head_stride = out_strides
    output = Output(pointers[6], token_stride, head_stride, pointers[7], Parts(*pointers[8:]))
    return Lists(*pointers[:3]), Parts(*pointers[3:6]), output


_attention = Launcher(attention_kernel, _attention_arguments)
_merge = Launcher(merge_kernel, _merge_arguments, num_warps=1)


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
    heads, keys = q.shape[1], layer.keys.shape
    _, slots, rows, dim_v = workspace.accs.shape
    group = heads // keys[1]
    assert work.tokens_per_item * group <= tiling.block_m, "an item has more rows than a product"
    assert work.is_whole or work.tokens_per_item * group <= rows, "an item has more rows than the workspace"
    assert work.unit == tiling.unit, "the work list uses another unit"
    has = params.sliding_window > 0, params.softcap > 0, sinks is not None, initial is not None
    writes = result.parts is not None, result.lse is not None
    return _make_shape(group, keys[1:], dim_v, tiling, (rows, slots), has, writes, layer.has_latents)


@functools.cache
def _make_shape(
    group: int,
    keys: tuple[int, int, int],
    dim_v: int,
    tiling: Tiling,
    workspace: tuple[int, int],
    has: tuple[bool, bool, bool, bool],
    writes: tuple[bool, bool],
    has_latents: bool,
) -> Shape:
    """`keys`: KV heads, positions of a block, channels. `workspace`: rows and slots."""
    (num_kv_heads, block_size, dim_k), (writes_parts, writes_lse) = keys, writes
    has_window, has_softcap, has_sinks, has_initial = has
    return Shape(
        group=group,
        num_kv_heads=num_kv_heads,
        dim_k=dim_k,
        dim_v=dim_v,
        block_k=next_power_of_2(max(dim_k, 16)),
        block_v=next_power_of_2(max(dim_v, 16)),
        block_size=block_size,
        block_m=tiling.block_m,
        tile=tiling.tile,
        tiles_per_unit=tiling.unit // tiling.tile,
        rows=workspace[0],
        slots=workspace[1],
        deterministic=tiling.deterministic,
        skips_masks=tiling.skips_masks,
        has_window=has_window,
        has_softcap=has_softcap,
        has_sinks=has_sinks,
        has_initial=has_initial,
        writes_parts=writes_parts,
        writes_lse=writes_lse,
        has_latents=has_latents,
        block_r=next_power_of_2(max(dim_k - dim_v, 16)) if has_latents else 0,
    )
