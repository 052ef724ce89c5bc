"""The attention kernel: each program processes its share of a work list. `attention` describes both kernels.

A row is one token and one of the query heads that read the KV head; `rows` is (token, query head, position, whether the
row exists).
"""

import triton
import triton.language as tl

from rollout_engine.kernels.triton.output import store_parts, write
from rollout_engine.kernels.triton.rounding import narrow
from rollout_engine.kernels.triton.softmax import LOG2_E, LOWEST, dot, merge_factors, tanh
from rollout_engine.kernels.triton.work import COLUMNS

_COLUMNS = tl.constexpr(COLUMNS)


@triton.jit
def attention_kernel(q, pool, work, parts, output, sinks, initial, numbers, SHAPE: tl.constexpr):
    """The types of the arguments are in `attention_shape`."""
    program = tl.program_id(0)
    index = tl.load(work.shares + program * 2)
    start = tl.load(work.shares + program * 2 + 1)
    stop = tl.load(work.shares + program * 2 + 3)
    slot = program.to(tl.int64) * SHAPE.slots
    while start < stop:
        item = work.items + index * _COLUMNS
        first_unit = tl.load(item + 5)
        end_unit = tl.load(item + 6)
        units = end_unit - first_unit
        place = start - tl.load(item + 7) * SHAPE.num_kv_heads
        head = place // units
        first = first_unit + place - head * units
        last = tl.minimum(end_unit, first + stop - start)
        begins = first == first_unit

        rows = _rows_of(item, head, SHAPE)
        token, q_head, position, real = rows
        query = _load_query(q, rows, SHAPE)
        context = _context_of(item, head, pool)
        acc, top, total = _initial_state(item, rows, begins, first_unit, sinks, initial, SHAPE)
        if SHAPE.deterministic:
            own_parts = (parts, slot + 1)
            acc, top, total = _attend_units(
                query, acc, top, total, rows, first, last, begins, context, numbers, own_parts, SHAPE
            )
        else:
            acc, top, total = _attend_share(query, acc, top, total, rows, first, last, item, context, numbers, SHAPE)

        if begins & (last == end_unit):
            write(output, token, q_head, real, acc, top, total, SHAPE)
        else:
            part = (slot + tl.where(begins, 0, 1)) * SHAPE.rows + tl.arange(0, SHAPE.block_m)
            stored = real & begins if SHAPE.deterministic else real
            store_parts(parts, part, stored, acc, top, total, SHAPE)
        start += last - first
        index += tl.where((last == end_unit) & (head == SHAPE.num_kv_heads - 1), 1, 0)


@triton.jit
def _rows_of(item, head, SHAPE: tl.constexpr):
    row = tl.arange(0, SHAPE.block_m)
    token = (tl.load(item + 1) + row // SHAPE.group).to(tl.int64)
    position = tl.load(item + 3) + row // SHAPE.group
    return token, head * SHAPE.group + row % SHAPE.group, position, row < tl.load(item + 2) * SHAPE.group


@triton.jit
def _load_query(q, rows, SHAPE: tl.constexpr):
    """[BLOCK_M, BLOCK_K]; with latents two: the channels that are values of keys, and those behind them."""
    token, q_head, position, real = rows
    row = (token * q.token_stride + q_head * q.head_stride)[:, None]
    if SHAPE.has_latents:
        column = tl.arange(0, SHAPE.block_v)
        first = tl.load(q.data + row + column[None, :], mask=real[:, None] & (column < SHAPE.dim_v)[None, :], other=0.0)
        column = tl.arange(0, SHAPE.block_r)
        kept = real[:, None] & (column < SHAPE.dim_k - SHAPE.dim_v)[None, :]
        query = (first, tl.load(q.data + row + (SHAPE.dim_v + column)[None, :], mask=kept, other=0.0))
    else:
        column = tl.arange(0, SHAPE.block_k)
        kept = real[:, None] & (column < SHAPE.dim_k)[None, :]
        query = tl.load(q.data + row + column[None, :], mask=kept, other=0.0)
    return query


@triton.jit
def _context_of(item, head, pool):
    """Block table, keys and values of the head, their strides, and the end of the context."""
    table = pool.tables + tl.load(item).to(tl.int64) * pool.table_stride
    keys = pool.key_data + head.to(tl.int64) * pool.key_strides[1]
    values = pool.value_data + head.to(tl.int64) * pool.value_strides[1]
    steps = (pool.key_strides[0], pool.key_strides[2], pool.value_strides[0], pool.value_strides[2])
    return table, keys, values, steps, tl.load(item + 4)


@triton.jit
def _initial_state(item, rows, begins, first_unit, sinks, initial, SHAPE: tl.constexpr):
    """The rows' softmax before the first key of this share: empty, sinks, or a prefix."""
    token, q_head, position, real = rows
    top = tl.full([SHAPE.block_m], LOWEST, tl.float32)
    total = tl.full([SHAPE.block_m], 0.0, tl.float32)
    acc = tl.full([SHAPE.block_m, SHAPE.block_v], 0.0, tl.float32)
    if SHAPE.has_sinks:
        first = real & begins
        sink = tl.load(sinks + q_head, mask=first, other=0.0).to(tl.float32) * LOG2_E
        top = tl.where(first, sink, top)
        total = tl.where(first, 1.0, total)
    if SHAPE.has_initial:
        going_on = real & begins & (first_unit > 0)
        place = token * (SHAPE.num_kv_heads * SHAPE.group) + q_head
        top = tl.where(going_on, tl.load(initial.tops + place, mask=going_on, other=0.0), top)
        total = tl.where(going_on, tl.load(initial.totals + place, mask=going_on, other=0.0), total)
        column = tl.arange(0, SHAPE.block_v)
        kept = going_on[:, None] & (column < SHAPE.dim_v)[None, :]
        acc = tl.load(initial.accs + place[:, None] * SHAPE.dim_v + column[None, :], mask=kept, other=0.0)
    return acc, top, total


@triton.jit
def _attend_units(
    query, acc, top, total, rows, first, last, begins, context, numbers, own_parts, SHAPE: tl.constexpr
):  # fmt: skip
    """Attend units one by one: merge from the item's first on, or store as parts if another program has the first."""
    token, q_head, position, real = rows
    table, keys, values, steps, limit = context
    parts, slot = own_parts
    for unit in range(first, last):
        unit_top = tl.full([SHAPE.block_m], LOWEST, tl.float32)
        unit_total = tl.full([SHAPE.block_m], 0.0, tl.float32)
        unit_acc = tl.full([SHAPE.block_m, SHAPE.block_v], 0.0, tl.float32)
        tile = unit * SHAPE.tiles_per_unit
        end_tile = tl.minimum(tile + SHAPE.tiles_per_unit, tl.cdiv(limit, SHAPE.tile))
        unit_acc, unit_top, unit_total = _attend_tiles(
            query, unit_acc, unit_top, unit_total, position, tile, end_tile, context, numbers, True, SHAPE
        )
        if begins:
            top, share, unit_share = merge_factors(top, unit_top)
            total = total * share + unit_total * unit_share
            acc = acc * share[:, None] + unit_acc * unit_share[:, None]
        else:
            place = (slot + unit - first) * SHAPE.rows + tl.arange(0, SHAPE.block_m)
            store_parts(parts, place, real, unit_acc, unit_top, unit_total, SHAPE)
    return acc, top, total


@triton.jit
def _attend_share(
    query, acc, top, total, rows, first, last, item, context, numbers, SHAPE: tl.constexpr
):  # fmt: skip
    """All units, which are single tiles here, as one softmax."""
    token, q_head, position, real = rows
    masked_from = first
    if SHAPE.skips_masks:
        first_position = tl.load(item + 3)
        masked_from = tl.maximum(first, tl.minimum(last, (first_position + 1) // SHAPE.tile))
        seen_from = first
        if SHAPE.has_window:
            lowest = tl.maximum(first_position + tl.load(item + 2) - numbers.sliding_window, 0)
            seen_from = tl.minimum(masked_from, tl.maximum(first, tl.cdiv(lowest, SHAPE.tile)))
            acc, top, total = _attend_tiles(
                query, acc, top, total, position, first, seen_from, context, numbers, True, SHAPE
            )
        acc, top, total = _attend_tiles(
            query, acc, top, total, position, seen_from, masked_from, context, numbers, False, SHAPE
        )
    return _attend_tiles(query, acc, top, total, position, masked_from, last, context, numbers, True, SHAPE)


@triton.jit
def _attend_tiles(
    query, acc, top, total, position, first, last, context, numbers, IS_MASKED: tl.constexpr, SHAPE: tl.constexpr
):  # fmt: skip
    """The softmax continued over tiles [first, last); unless `IS_MASKED`, every row sees all of them."""
    limit = context[4]
    for tile in tl.range(first, last):
        key = tile * SHAPE.tile + tl.arange(0, SHAPE.tile)
        k, v = _load_tile(tile, key, context, IS_MASKED, SHAPE)
        scores = _products(query, k, v, SHAPE) * numbers.inner
        if SHAPE.has_softcap:
            scores = tanh(scores) * numbers.outer
        if IS_MASKED:
            visible = (key[None, :] <= position[:, None]) & (key < limit)[None, :]
            if SHAPE.has_window:
                visible = visible & (key[None, :] > position[:, None] - numbers.sliding_window)
            scores = tl.where(visible, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        share = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * share + tl.sum(weights, 1)
        acc = dot(narrow(weights, v.dtype), v, acc * share[:, None])
        top = new_top
    return acc, top, total


@triton.jit
def _products(query, k, v, SHAPE: tl.constexpr):
    """Products [BLOCK_M, TILE] of queries and keys."""
    products = tl.full([SHAPE.block_m, SHAPE.tile], 0.0, tl.float32)
    if SHAPE.has_latents:
        of_values, of_others = query
        products = dot(of_others, tl.trans(k), dot(of_values, tl.trans(v), products))
    else:
        products = dot(query, tl.trans(k), products)
    return products


@triton.jit
def _load_tile(tile, key, context, IS_MASKED: tl.constexpr, SHAPE: tl.constexpr):
    """K [TILE, BLOCK_K] and V [TILE, BLOCK_V]; V is zero past the end, as memory there may hold NaN.

    With latents K is [TILE, BLOCK_R]: the channels of the keys behind those that are V.
    """
    table, keys, values, steps, limit = context
    if SHAPE.block_size % SHAPE.tile == 0:
        block = tl.load(table + tile * SHAPE.tile // SHAPE.block_size).to(tl.int64)
    elif IS_MASKED:
        block = tl.load(table + key // SHAPE.block_size, mask=key < limit, other=0).to(tl.int64)
    else:
        block = tl.load(table + key // SHAPE.block_size).to(tl.int64)
    offset = key % SHAPE.block_size
    column = tl.arange(0, SHAPE.block_r if SHAPE.has_latents else SHAPE.block_k)
    if SHAPE.has_latents:
        column += SHAPE.dim_v
    key_places = (keys + (block * steps[0] + offset * steps[1]))[:, None] + column[None, :]
    value_column = tl.arange(0, SHAPE.block_v)
    value_places = (values + (block * steps[2] + offset * steps[3]))[:, None] + value_column[None, :]
    if SHAPE.dim_k == (SHAPE.dim_v + SHAPE.block_r if SHAPE.has_latents else SHAPE.block_k):
        k = tl.load(key_places)
    else:
        k = tl.load(key_places, mask=(column < SHAPE.dim_k)[None, :], other=0.0)
    if IS_MASKED:
        kept = (key < limit)[:, None] & (value_column < SHAPE.dim_v)[None, :]
        v = tl.load(value_places, mask=kept, other=0.0)
    elif SHAPE.dim_v == SHAPE.block_v:
        v = tl.load(value_places)
    else:
        v = tl.load(value_places, mask=(value_column < SHAPE.dim_v)[None, :], other=0.0)
    return k, v
