"""Attention of a trainer on a device: whole sequences through the engine's deterministic kernel, so the bits agree."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu.attention import are_latents
from rollout_engine.kernels.dense_attention import UnpackedSequences
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention

_BLOCK_SIZE = 64


def attend_dense(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    params: AttentionParams,
    sinks: Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor]:
    """Device kernel of `kernels.dense_attention.DenseAttention`."""
    batch, num_heads, length, _ = q.shape
    has_latents = are_latents(k, v)
    heads = Heads.of(num_heads, k.shape[1], k.shape[3], v.shape[3], q.dtype, has_latents=has_latents)
    sequences = UnpackedSequences.of(q, lengths, k.shape[1])
    tokens = batch * length
    attention = PagedAttention(
        heads, Limits(tokens, sequences.num_sequences, sequences.length), q.device, deterministic=True
    )
    starts = torch.nn.functional.pad(sequences.sizes.cumsum(0), (1, 0)).int()
    num_blocks = -(-sequences.length // _BLOCK_SIZE)
    tables = sequences.rank[:, None] * num_blocks + torch.arange(num_blocks, device=q.device)
    attention.plan(Batch(starts, sequences.sizes.int(), tables.int(), num_decodes=0), {params.sliding_window})
    out = q.new_empty(tokens, num_heads, heads.dim_v)
    lse = q.new_empty(tokens, num_heads, dtype=torch.float32)
    flat = q.transpose(1, 2).reshape(tokens, num_heads, -1)
    keys = _blocks(sequences.unpack(k))
    layer = KVLayer(keys, keys[..., : heads.dim_v] if has_latents else _blocks(sequences.unpack(v)))
    attention.attend(flat, layer, params, out, sinks=sinks, lse=lse)
    shape = batch, length, num_heads
    return out.view(*shape, -1), lse.view(shape)


def _blocks(x: Tensor) -> Tensor:
    """[B, Hk, T, D] -> [B * blocks, Hk, _BLOCK_SIZE, D], zeros past the end."""
    padded = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % _BLOCK_SIZE))
    blocks: Tensor = padded.unflatten(2, (-1, _BLOCK_SIZE)).transpose(1, 2).flatten(0, 1)
    return blocks
