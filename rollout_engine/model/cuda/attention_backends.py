"""Attention of the fast mode by our kernels, torch's or FlashInfer's: `EngineConfig.attention_backend`.

All read the pool as it lies (`kernels.triton.layout`) and take lengths and block tables from the device, so that CUDA
graphs may capture them. FlashInfer's planned wrappers do neither: they want lengths on the host before every step.

    ours          any structure; reads a prefix that sequences share once for all; the only one with bits to keep
    torch         `varlen_attn_out` over blocks, which only FlashAttention 3 computes, on compute capability 9.0
    flashinfer    `trtllm_batch_decode_with_kv_cache` for sequences that decode; chunks of prompts are ours

**Unproven**: no device has run the others here. `attention_trial` compares them with ours at load.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention

_WORKSPACE_BYTES = 128 << 20
"""FlashInfer's own recommendation."""


class Attention(Protocol):
    """Attention of the layers that have the same heads."""

    @property
    def prefix_shape(self) -> tuple[int, int] | None:
        """(KV positions per unit, tokens per item) of prefixes that sequences share; None where they are not shared."""
        ...

    def plan(self, batch: Batch, sliding_windows: set[int]) -> None:
        """Prepare `batch` for `attend`, for all the layers' `sliding_windows`, 0 for none."""
        ...

    def attend(
        self, q: Tensor, layer: KVLayer, params: AttentionParams, out: Tensor, *, sinks: Tensor | None = None
    ) -> None:
        """Attend with q [T, H, Dk] -> out [T, H, Dv]; KV is already written."""
        ...


def attention_by(
    backend: str,
    heads: Heads,
    limits: Limits,
    device: torch.device | str,
    *,
    block_size: int,
    deterministic: bool = False,
) -> Attention:
    """Attention by "ours", "torch" or "flashinfer". Raises `ConfigError` where its package is missing."""
    if backend == "ours":
        return PagedAttention(heads, limits, device, deterministic=deterministic, block_size=block_size)
    assert not deterministic, "EngineConfig refuses this"
    if backend == "torch":
        return TorchAttention(heads, block_size)
    return FlashInferAttention(heads, limits, device, block_size)


class TorchAttention:
    """Calls torch's attention once for sequences that decode and once for chunks."""

    prefix_shape = None

    def __init__(self, heads: Heads, block_size: int) -> None:
        self._attend = _torch_attention()
        self._is_grouped, self._block_size = heads.group > 1, block_size
        self._parts: list[_Part] = []

    def plan(self, batch: Batch, sliding_windows: set[int]) -> None:
        starts, lens, tables, count = batch.token_starts, batch.context_lens, batch.block_tables, batch.num_decodes
        self._parts = []
        if count:
            self._parts.append(_Part(slice(count), starts[: count + 1], lens[:count], tables[:count], is_decode=True))
        if count < len(lens):
            part = slice(count, None)
            self._parts.append(_Part(part, starts[count:] - count, lens[part], tables[part], is_decode=False))

    def attend(
        self, q: Tensor, layer: KVLayer, params: AttentionParams, out: Tensor, *, sinks: Tensor | None = None
    ) -> None:
        assert sinks is None and not params.softcap, "attention_trial refuses them"
        keys, values = (pool.transpose(1, 2) for pool in layer)
        # A query and the `sliding_window - 1` keys before it; nothing after it.
        window = (params.sliding_window - 1, 0)
        for part in self._parts:
            tokens = q[part.rows]
            self._attend(
                *(out[part.rows], tokens, keys, values, part.starts, None),
                max_q=1 if part.is_decode else len(tokens),
                max_k=part.tables.shape[1] * self._block_size,
                scale=params.scale,
                window_size=window,
                enable_gqa=self._is_grouped,
                seqused_k=part.lens,
                block_table=part.tables,
            )


class _Part(NamedTuple):
    """Sequences of one call."""

    rows: slice
    """Their tokens in the batch. One that decodes has one, so these are also their rows in columns of sequences."""
    starts: Tensor
    """int32 [N + 1], of the call's own tokens."""
    lens: Tensor
    tables: Tensor
    is_decode: bool


class FlashInferAttention:
    """Calls FlashInfer for sequences that decode, and our kernels for chunks."""

    prefix_shape = None

    def __init__(self, heads: Heads, limits: Limits, device: torch.device | str, block_size: int) -> None:
        self._decode = _flashinfer_decode()
        self._ours = PagedAttention(heads, limits, device, block_size=block_size)
        self._block_size = block_size
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._count, self._has_chunks = 0, False
        self._lens = self._tables = torch.empty(0, dtype=torch.int32, device=device)

    def plan(self, batch: Batch, sliding_windows: set[int]) -> None:
        lens, tables, count = batch.context_lens, batch.block_tables, batch.num_decodes
        self._count, self._has_chunks = count, count < len(lens)
        self._lens = lens[:count].clamp(min=1)  # padding reads one key of block 0: nobody promises anything for none
        self._tables = tables[:count].contiguous()
        if self._has_chunks:
            chunks = Batch(batch.token_starts[count:], lens[count:], tables[count:], num_decodes=0)
            self._ours.plan(chunks, sliding_windows)

    def attend(
        self, q: Tensor, layer: KVLayer, params: AttentionParams, out: Tensor, *, sinks: Tensor | None = None
    ) -> None:
        assert sinks is None and not params.softcap, "attention_trial refuses them"
        count = self._count
        if count:
            self._decode(
                query=q[:count].contiguous(),
                kv_cache=(layer.keys, layer.values),
                workspace_buffer=self._workspace,
                block_tables=self._tables,
                seq_lens=self._lens,
                max_seq_len=self._tables.shape[1] * self._block_size,
                bmm1_scale=params.scale,
                bmm2_scale=1.0,
                window_left=params.sliding_window - 1,
                out=out[:count],
                kv_layout="HND",
            )
        if self._has_chunks:
            self._ours.attend(q, layer, params, out)


def _torch_attention() -> Callable[..., Any]:
    """torch's `varlen_attn_out`, computed by FlashAttention 3 from now on, as all of torch's flash attention here."""
    try:
        from torch.nn.attention import activate_flash_attention_impl, current_flash_attention_impl
        from torch.nn.attention.varlen import varlen_attn_out
    except ImportError:
        raise _torch_is_too_old() from None
    if "block_table" not in inspect.signature(varlen_attn_out).parameters:
        raise _torch_is_too_old()
    if current_flash_attention_impl() != "FA3":
        try:
            activate_flash_attention_impl("FA3")
        except (ImportError, RuntimeError) as problem:
            index = f"https://download.pytorch.org/whl/cu{(torch.version.cuda or '13.0').replace('.', '')}"
            raise ConfigError(
                f'attention_backend="torch" needs FlashAttention 3 ({type(problem).__name__}: {problem}). '
                f"`pip install flash-attn-3 --index-url {index}`, or leave attention_backend out."
            ) from None
    return varlen_attn_out  # type: ignore[no-any-return]


def _torch_is_too_old() -> ConfigError:
    return ConfigError(
        'attention_backend="torch" needs torch 2.13 or newer, whose attention reads blocks; this is '
        f'{torch.__version__}. `pip install "torch>=2.13"`, or leave attention_backend out.'
    )


def _flashinfer_decode() -> Callable[..., Any]:
    try:
        from flashinfer.decode import trtllm_batch_decode_with_kv_cache
    except ImportError as problem:
        raise ConfigError(
            f'attention_backend="flashinfer" needs FlashInfer ({problem}). '
            '`pip install "rollout-engine[flashinfer]"`, or leave attention_backend out.'
        ) from None
    return trtllm_batch_decode_with_kv_cache  # type: ignore[no-any-return]
