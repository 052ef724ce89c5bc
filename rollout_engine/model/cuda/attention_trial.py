"""Decides at load whether others' attention may be used: refuses what it does not compute, compares it with ours."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits
from rollout_engine.model.cuda.attention_backends import Attention, attention_by
from rollout_engine.model.modules.geometry import LayerGeometry

_TOLERANCE = 0.02
"""Allowed root mean square of a token's difference, relative to that of its result; bfloat16 rounds to 2⁻⁹."""
_PAGE_SIZES = 16, 32, 64
"""Blocks that FlashInfer's kernels read."""


def check_attention(
    backend: str, geometry: Sequence[LayerGeometry], dtype: torch.dtype, device: torch.device, block_size: int
) -> None:
    """Raise `ConfigError` unless attention by `backend` suits the layers and agrees with ours on this device."""
    if backend == "ours":
        return
    reason = _unsupported_reason(backend, geometry, dtype, device, block_size)
    for layer in dict.fromkeys(geometry) if reason is None else ():
        heads = Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim_k, layer.head_dim_v, dtype)
        reason = reason or _disagreement(backend, heads, layer.attention_params, device, block_size)
    if reason is not None:
        raise ConfigError(
            f"attention_backend={backend!r} is not possible here: {reason}. Leave it out: our own kernels have no such "
            "limit."
        )


def _unsupported_reason(
    backend: str, geometry: Sequence[LayerGeometry], dtype: torch.dtype, device: torch.device, block_size: int
) -> str | None:
    for layer in geometry:
        dims = layer.head_dim_k, layer.head_dim_v
        if layer.softcap:
            return "it does not cap scores, and layers of this model do (softcap)"
        if layer.has_sinks:
            return "it knows no sinks, and layers of this model have them"
        if dims[0] != dims[1] or dims[0] % 16 or dims[0] > 256:
            return f"heads must have as many channels for keys as for values, a multiple of 16 up to 256, not {dims}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"it computes in bfloat16 or float16, and the model is in {dtype}"
    if backend == "torch" and (found := torch.cuda.get_device_capability(device)) != (9, 0):
        return f"FlashAttention 3 runs on compute capability 9.0, and this device has {found[0]}.{found[1]}"
    if backend == "flashinfer" and block_size not in _PAGE_SIZES:
        return f"it reads blocks of 16, 32 or 64 tokens, not block_size={block_size}"
    return None


@torch.inference_mode()
def _disagreement(
    backend: str, heads: Heads, params: AttentionParams, device: torch.device, block_size: int
) -> str | None:
    """How its results differ from ours over random KV; None where the difference is rounding."""
    size = block_size
    ends, counts = [1, size, size + 1, 0, 3 * size + 5, 2 * size + 7, 5], [1, 1, 1, 1, 1, 12, 5]
    num_decodes, padding = 5, 3
    generator = torch.Generator().manual_seed(0)
    width = -(-max(ends) // size)
    tables = 1 + torch.randperm(len(ends) * width, generator=generator, dtype=torch.int32).view(len(ends), width)
    for row, end in zip(tables, ends, strict=True):
        row[-(-end // size) :] = 0  # as in an engine's tables

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, heads.dtype)

    num_blocks = len(ends) * width + 1
    layer = KVLayer(*(normal(num_blocks, heads.num_kv_heads, size, dim) for dim in (heads.dim_k, heads.dim_v)))
    q = normal(sum(counts), heads.num_heads, heads.dim_k)
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    lens = torch.tensor(ends, dtype=torch.int32, device=device)
    batch = Batch(starts, lens, tables.to(device), num_decodes)
    limits = Limits(len(q), len(ends), width * size)

    def attended(attention: Attention) -> Tensor:
        out = torch.zeros(len(q), heads.num_heads, heads.dim_v, dtype=heads.dtype, device=device)
        attention.plan(batch, {params.sliding_window})
        attention.attend(q, layer, params, out)
        out[padding] = 0
        return out.float()

    ours = attended(attention_by("ours", heads, limits, device, block_size=size))
    try:
        theirs = attended(attention_by(backend, heads, limits, device, block_size=size))
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except Exception as problem:  # foreign code may fail in any way
        return f"it fails ({type(problem).__name__}: {problem})"
    differences, sizes = ((x.flatten(1).square().mean(1).sqrt()) for x in (theirs - ours, ours))
    difference = float((differences / sizes.clamp(min=1e-6)).max())
    return None if difference <= _TOLERANCE else f"its results differ from ours by {difference:.2g} of their size"
