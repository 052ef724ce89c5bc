"""ctypes wrapper of `indexer.cpp`. Callers ask `kernels.cpu.attention.supports` first."""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import numpy as np
import torch
from torch import Tensor

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.cpu.arguments import address, argument_error, array_address, check_floats
from rollout_engine.kernels.cpu.attention import ChunkColumns

_INT32, _INT64 = np.dtype(np.int32), np.dtype(np.int64)


def choose(
    q: Tensor, weights: Tensor, keys: Tensor, columns: ChunkColumns, *, topk: int, scale: float, width: int
) -> Tensor:
    """C++ side of `kernels.indexed_attention.choose_slots`: int32 [T, width], which holds every query's slots.

    Raises `ValueError` for tensors that it cannot read, and for a block table that does not cover its chunk.
    """
    for name, x in (("q", q), ("keys", keys)):
        check_floats(name, x, num_dims=3)
    num_tokens, num_heads, dim = q.shape
    num_blocks, block_size, _ = keys.shape
    num_sequences = len(columns.first_positions)
    if num_blocks * block_size >= 1 << 31:
        raise argument_error("keys", keys, "of less than 2^31 positions")
    slots = torch.empty(num_tokens, width, dtype=torch.int32)
    call = _Call(width=width, num_sequences=num_sequences, block_size=block_size, num_heads=num_heads, dim=dim)
    call.q = address("q", q, keys.dtype, (num_tokens, num_heads, dim))
    call.weights = address("weights", weights, torch.float32, (num_tokens, num_heads))
    call.keys = address("keys", keys, keys.dtype, (num_blocks, block_size, dim))
    call.blocks = array_address("blocks", columns.blocks, _INT32)
    call.block_starts = array_address("block_starts", columns.block_starts, _INT64, (num_sequences,))
    call.token_starts = array_address("token_starts", columns.token_starts, _INT64, (num_sequences + 1,))
    call.first_position = array_address("first_positions", columns.first_positions, _INT64, (num_sequences,))
    call.slots, call.topk, call.scale = slots.data_ptr(), topk, scale
    call.half, call.num_threads = keys.dtype == torch.bfloat16, torch.get_num_threads()
    call.num_blocks, call.num_entries = num_blocks, columns.blocks.size
    if (wrong := _library().indexer_choose(ctypes.addressof(call))) >= 0:
        raise ValueError(
            f"blocks should name a block in [0, {num_blocks}) for every {block_size} tokens of each sequence, and do "
            f"not for chunk {wrong}."
        )
    return slots


class _Call(ctypes.Structure):
    """Mirror of `IndexerCall`."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "weights", "keys", "blocks", "block_starts", "token_starts")),
        *((name, c_void_p) for name in ("first_position", "slots")),
        *((name, c_int64) for name in ("width", "num_blocks", "num_entries")),
        *((name, c_int32) for name in ("num_sequences", "block_size", "num_heads", "dim", "topk", "half")),
        ("num_threads", c_int32),
        ("scale", c_float),
    ]


@cache
def _library() -> ctypes.CDLL:
    return build.declared(indexer_choose=(c_int32, c_void_p))
