"""The trainer's side on a device: whole sequences through the engine's ordered kernel, so both are the same bits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_engine.kernels.dense_attention import Apart
from rollout_engine.kernels.scoring import Scoring
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention

_BLOCK_SIZE = 64


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scoring: Scoring,
    sinks: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """q [B, H, T, Dk], k [B, Hk, T, Dk], v [B, Hk, T, Dv] -> [B, T, H, Dv], log-sum-exp float32 [B, T, H].

    The twin of `kernels.cpu.attention.attend_dense`.
    """
    batch, num_heads, length, _ = q.shape
    heads = Heads(num_heads, k.shape[1], k.shape[3], v.shape[3], q.dtype)
    apart = Apart.of(q, lengths, heads.num_kv_heads)
    tokens = batch * length
    attention = PagedAttention(heads, Limits(tokens, apart.num_sequences, apart.length), q.device, is_ordered=True)
    starts = torch.nn.functional.pad(apart.sizes.cumsum(0), (1, 0)).int()
    num_blocks = -(-apart.length // _BLOCK_SIZE)
    tables = apart.rank[:, None] * num_blocks + torch.arange(num_blocks, device=q.device)
    attention.plan(Batch(starts, apart.sizes.int(), tables.int(), num_decodes=0), {scoring.sliding_window})
    out = q.new_empty(tokens, num_heads, heads.dim_v)
    lse = q.new_empty(tokens, num_heads, dtype=torch.float32)
    flat = q.transpose(1, 2).reshape(tokens, num_heads, -1)
    layer = KVLayer(_blocks(apart.spread(k)), _blocks(apart.spread(v)))
    attention.attend(flat, layer, scoring, out, sinks=sinks, lse=lse)
    shape = batch, length, num_heads
    return out.view(*shape, -1), lse.view(shape)


def _blocks(x: Tensor) -> Tensor:
    """[B, Hk, T, D] -> [B * blocks, Hk, _BLOCK_SIZE, D], zeros past the end."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % _BLOCK_SIZE))
    return padded.unflatten(2, (-1, _BLOCK_SIZE)).transpose(1, 2).flatten(0, 1)
