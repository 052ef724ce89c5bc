"""Layout of KV in device memory.

    keys   [num_blocks, num_kv_heads, block_size, head_dim_k]
    values [num_blocks, num_kv_heads, block_size, head_dim_v]

The head precedes the position: an attention program works on one KV head, and so reads one block of it as one
contiguous run (4 KiB of keys at 16 x 128 in bfloat16; with positions first it would be 16 runs of 256 bytes, each in
a memory page of its own once there are many heads). Keys are not transposed: a token's key is one contiguous write, and
Hopper's tensor cores read either order from shared memory. Keys and values are two tensors, because value heads may be
narrower. Blocks are first in both, so that copying a block needs no other dimension.

Slot `s` of a token is position `s % block_size` of block `s // block_size`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class KVLayer(NamedTuple):
    """KV pool of one attention layer. The last stride is 1, the others are free."""

    keys: Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim_k]."""
    values: Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim_v]."""

    @classmethod
    def zeros(
        cls,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim_k: int,
        head_dim_v: int,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVLayer":
        """A pool of zeros: attention expects finite values in all slots of a context."""
        shape = num_blocks, num_kv_heads, block_size
        keys = torch.zeros(*shape, head_dim_k, dtype=dtype, device=device)
        return cls(keys, torch.zeros(*shape, head_dim_v, dtype=dtype, device=device))

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        """Positions per block."""
        return self.keys.shape[2]
