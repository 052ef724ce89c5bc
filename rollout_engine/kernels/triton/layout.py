"""How KV lies in device memory.

    keys   [num_blocks, num_kv_heads, block_size, head_dim_k]
    values [num_blocks, num_kv_heads, block_size, head_dim_v]

The head comes before the position: a program of attention works for one KV head, and so reads one block of it as one
contiguous run (4 KiB of keys at 16 x 128 in bfloat16; with positions first it would be 16 runs of 256 bytes, each in
a memory page of its own once there are many heads). Keys lie as rows, not transposed: a token's key is one contiguous
write, and the tensor cores of Hopper read either order from shared memory. Keys and values are two tensors, because
heads of values may be narrower. Blocks come first in both, so that copies and transfers of blocks need not know more.

Slot `s` of a token is position `s % block_size` of block `s // block_size`.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class KVLayer(NamedTuple):
    """KV pool of one attention layer. Kernels take any strides but the last, which is 1."""

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
        """A pool in which every value is finite, as attention expects of all slots of a context."""
        shape = num_blocks, num_kv_heads, block_size
        keys = torch.zeros(*shape, head_dim_k, dtype=dtype, device=device)
        return cls(keys, torch.zeros(*shape, head_dim_v, dtype=dtype, device=device))

    @property
    def num_kv_heads(self) -> int:
        """KV heads of one block."""
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        """Positions of one block."""
        return self.keys.shape[2]
