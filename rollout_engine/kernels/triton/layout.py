"""Layout of KV in device memory.

    keys   [num_blocks, num_kv_heads, block_size, head_dim_k]
    values [num_blocks, num_kv_heads, block_size, head_dim_v]

The head precedes the position: an attention program works on one KV head, and so reads one block of it as one
contiguous run (4 KiB of keys at 16 x 128 in bfloat16; with positions first it would be 16 runs of 256 bytes, each in
a memory page of its own once there are many heads). Keys are not transposed: a token's key is one contiguous write, and
Hopper's tensor cores read either order from shared memory. Keys and values are two tensors, because value heads may be
narrower. Blocks are first in both, so that copying a block needs no other dimension.

Of latents, which are one key head, values are a view of the first channels of the keys.

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
        has_latents: bool = False,
    ) -> "KVLayer":
        """A pool of zeros: attention expects finite values in all slots of a context."""
        shape = num_blocks, num_kv_heads, block_size
        keys = torch.zeros(*shape, head_dim_k, dtype=dtype, device=device)
        if has_latents:
            return cls(keys, keys[..., :head_dim_v])
        return cls(keys, torch.zeros(*shape, head_dim_v, dtype=dtype, device=device))

    def read_by_parts(self, num_parts: int) -> "KVLayer":
        """A view in which each of `num_parts` parts of the query heads has this one key head to itself."""
        keys, values = (x.expand(-1, num_parts, -1, -1) for x in self)
        return KVLayer(keys, values)

    @property
    def has_latents(self) -> bool:
        """Whether values are the first channels of the keys."""
        keys, values = self
        is_view = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
        return is_view and values.shape[-1] < keys.shape[-1]

    @property
    def own_tensors(self) -> tuple[Tensor, ...]:
        """Those with memory of their own."""
        return (self.keys,) if self.has_latents else (self.keys, self.values)

    @property
    def num_kv_heads(self) -> int:
        """Number of KV heads."""
        return self.keys.shape[1]

    @property
    def block_size(self) -> int:
        """Positions per block."""
        return self.keys.shape[2]
