"""The trainer's side on a device: whole sequences through the engine's ordered kernel, so both are the same bits."""

import torch
from torch import Tensor

from rollout_engine.kernels.scoring import Scoring
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention

_BLOCK_SIZE = 64


def attend_dense(
    q: Tensor, k: Tensor, v: Tensor, scoring: Scoring, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """q [B, H, T, Dk], k [B, Hk, T, Dk], v [B, Hk, T, Dv] at positions 0..T-1 -> [B, T, H, Dv], lse [B, T, H].

    The twin of `kernels.cpu.attention.attend_dense`.
    """
    num_sequences, num_heads, length, _ = q.shape
    heads = Heads(num_heads, k.shape[1], k.shape[3], v.shape[3], q.dtype)
    tokens, device = num_sequences * length, q.device
    limits = Limits(tokens, num_sequences, length)
    attention = PagedAttention(heads, limits, device, is_ordered=True)
    lens = torch.full((num_sequences,), length, dtype=torch.int32, device=device)
    starts = torch.arange(num_sequences + 1, dtype=torch.int32, device=device) * length
    num_blocks = -(-length // _BLOCK_SIZE)
    tables = torch.arange(num_sequences * num_blocks, dtype=torch.int32, device=device).view(num_sequences, -1)
    attention.plan(Batch(starts, lens, tables, num_decodes=0), {scoring.sliding_window})
    out = q.new_empty(tokens, num_heads, v.shape[3])
    lse = q.new_empty(tokens, num_heads, dtype=torch.float32)
    flat = q.transpose(1, 2).reshape(tokens, num_heads, -1)
    attention.attend(flat, KVLayer(_blocks(k), _blocks(v)), scoring, out, sinks=sinks, lse=lse)
    shape = num_sequences, length, num_heads
    return out.view(*shape, -1), lse.view(shape)


def _blocks(x: Tensor) -> Tensor:
    """[B, Hk, T, D] -> [B * blocks, Hk, _BLOCK_SIZE, D], zeros past the end."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % _BLOCK_SIZE))
    return padded.unflatten(2, (-1, _BLOCK_SIZE)).transpose(1, 2).flatten(0, 1)
