"""Inputs of decoding sequences, completed on the device: last tokens and block tables."""

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def prepare(
    token_ids: Tensor,
    rows: Tensor,
    context_lens: Tensor,
    changes: tuple[Tensor, Tensor, int],
    last_tokens: Tensor,
    tables: Tensor,
    batch_tables: Tensor,
    block_size: int,
) -> None:
    """Fill negative `token_ids` int64 [N] from `last_tokens`, and `batch_tables` int32 [N, max_blocks] from `tables`.

    `last_tokens` int64 [R] and `tables` int32 [R, max_blocks] persist between steps; `rows` int64 [N] are the
    sequences' rows in them. `changes`: places int64 in the flattened `tables`, all of these sequences, new block ids
    int32, and their number; they are written to both tables. Tables are copied up to `context_lens` int32 [N].
    """
    _prepare_kernel[(len(token_ids),)](
        *(token_ids, rows, context_lens, *changes, last_tokens, tables, batch_tables, tables.shape[1], block_size),
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_changes"])
def _prepare_kernel(
    token_ids_ptr,
    rows_ptr,
    context_lens_ptr,
    places_ptr,
    blocks_ptr,
    num_changes,
    last_tokens_ptr,
    tables_ptr,
    batch_tables_ptr,
    width,
    block_size,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + i)
    token = tl.load(token_ids_ptr + i)
    tl.store(token_ids_ptr + i, tl.where(token < 0, tl.load(last_tokens_ptr + row), token))
    batch_tables_ptr += i * width
    num_blocks = (tl.load(context_lens_ptr + i) + block_size - 1) // block_size
    for start in range(0, num_blocks, BLOCK):
        index = start + tl.arange(0, BLOCK)
        blocks = tl.load(tables_ptr + row * width + index, mask=index < num_blocks, other=0)
        tl.store(batch_tables_ptr + index, blocks, mask=index < num_blocks)
    tl.debug_barrier()  # changes are written after the copy
    for start in range(0, num_changes, BLOCK):
        index = start + tl.arange(0, BLOCK)
        place = tl.load(places_ptr + index, mask=index < num_changes, other=-1)
        mine = (index < num_changes) & (place // width == row)
        blocks = tl.load(blocks_ptr + index, mask=mine, other=0)
        tl.store(tables_ptr + place, blocks, mask=mine)
        tl.store(batch_tables_ptr + place - row * width, blocks, mask=mine)
