"""Attention of whole batches on a device over one paged cache: decoding sequences first, then chunks of prompts.

    plan      once per step: a work list for each sliding window, made on the device from context lengths
    attend    once per layer: shared prefixes of decoding sequences, the rest of these sequences, then the chunks

With `deterministic` a token's bits depend on its position and context alone, otherwise also on the batch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton import tiling as tilings
from rollout_engine.kernels.triton.attention import Result, attend, empty_parts
from rollout_engine.kernels.triton.attention_shape import Parts
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.tiling import Tiling
from rollout_engine.kernels.triton.work import WorkList


class Heads(NamedTuple):
    """Head counts, head sizes and dtype of the layers that share a plan."""

    num_heads: int
    num_kv_heads: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype
    has_latents: bool = False
    """There is one key head, whose first `dim_v` channels are the value; `num_kv_heads` parts of the heads read it."""

    @classmethod
    def of(
        cls,
        num_heads: int,
        num_kv_heads: int,
        dim_k: int,
        dim_v: int,
        dtype: torch.dtype,
        *,
        has_latents: bool,
    ) -> "Heads":
        """Those of a layer: with latents, as few equal parts of heads as products have rows for."""
        if not has_latents:
            return cls(num_heads, num_kv_heads, dim_k, dim_v, dtype)
        if num_kv_heads != 1 or dim_v >= dim_k:
            raise ValueError(f"Latents are of one head, with dim_v < dim_k, not {num_kv_heads}, {dim_v} and {dim_k}.")
        most = tilings.most_heads_of_latents(dim_v)
        parts = next(parts for parts in range(-(-num_heads // most), num_heads + 1) if num_heads % parts == 0)
        return cls(num_heads, parts, dim_k, dim_v, dtype, has_latents=True)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def tiling(self, kind: str, shared_bytes: int = tilings.SHARED_BYTES, block_size: int = 1) -> Tiling:
        """The tiling of this kind, a function's name in `tiling`, for these heads and a device's shared memory.

        `block_size`: KV positions of a block.
        """
        sizes = self.group, self.dim_k, self.dim_v, self.dtype.itemsize
        of_latents = {"has_latents": self.has_latents}
        made = tilings.fitted(getattr(tilings, kind)(*sizes, **of_latents), *sizes, shared_bytes, **of_latents)
        if kind != "decode" or self.has_latents:
            return made
        return tilings.with_third_program(made, *sizes, shared_bytes, block_size)


class Limits(NamedTuple):
    """Limits of a batch: tokens, sequences, and tokens of one context."""

    num_tokens: int
    num_sequences: int
    context: int


class Prefixes(NamedTuple):
    """`shared_prefix.SharedPrefixes` as tensors on the device."""

    items: Tensor
    units: Tensor
    num_items: Tensor
    """int32 [1]: number of valid `items`."""


class Batch(NamedTuple):
    """One flat batch; tensors are on the device."""

    token_starts: Tensor
    """int32 [N + 1]: start of each sequence's tokens, then the end."""
    context_lens: Tensor
    """int32 [N], these tokens included; 0 for padding sequences of a captured batch."""
    block_tables: Tensor
    """int32 [N, max_blocks]."""
    num_decodes: int
    """The first `num_decodes` sequences have one token each."""
    prefixes: Prefixes | None = None
    """Prefixes that decoding sequences share."""


class PagedAttention:
    """Attention of batches up to `limits`. Its memory is static, so that CUDA graphs may capture it."""

    def __init__(
        self,
        heads: Heads,
        limits: Limits,
        device: torch.device | str,
        *,
        deterministic: bool = False,
        num_processors: int | None = None,
        block_size: int = 1,
    ) -> None:
        """`num_processors` defaults to the device's own number. `block_size`: KV positions of a block; 1 suits all.
        If it is whole tiles, more programs decode, and the last bits may be others unless `deterministic`."""
        self._heads = heads
        processors, shared_bytes = _processors(torch.device(device))
        processors = num_processors or processors
        kinds = ["deterministic"] * 3 if deterministic else ["decode", "shared_prefix", "prefill"]
        decode, prefix, chunk = (heads.tiling(kind, shared_bytes, block_size) for kind in kinds)
        self.decode = _Stage(heads, limits, decode, 1, processors, device)
        self.prefix = _Stage(heads, limits, prefix, prefix.block_m // heads.group, processors, device)
        self.chunk = _Stage(heads, limits, chunk, chunk.block_m // heads.group, processors, device, deterministic)
        self._prefix_parts = empty_parts(limits.num_sequences, heads.num_heads, dim_v=heads.dim_v, device=device)
        self._batch: Batch | None = None

    @property
    def prefix_shape(self) -> tuple[int, int]:
        """(KV positions per unit, tokens per item) of prefixes that sequences share."""
        return self.prefix.tiling.unit, self.prefix.tokens_per_item

    def plan(self, batch: Batch, sliding_windows: set[int]) -> None:
        """Plan the work of `batch` for `attend`, for all the layers' `sliding_windows`, 0 for none.

        Layers with a window do not share the reading of prefixes, which a window seldom includes.
        """
        self._batch = batch
        starts, lens, count = batch.token_starts, batch.context_lens, batch.num_decodes
        for window in sliding_windows:
            units = batch.prefixes.units if batch.prefixes is not None and not window else None
            if count:
                lists = self.decode.list_of(window)
                lists.fill(starts[: count + 1], lens[:count], sliding_window=window, prefix_units=units)
            if count < len(lens):
                lists = self.chunk.list_of(window)
                lists.fill(starts[count:], lens[count:], first_sequence=count, sliding_window=window)
        if batch.prefixes is not None:
            self.prefix.list_of(0).put(batch.prefixes.items, batch.prefixes.num_items)

    def attend(
        self,
        q: Tensor,
        layer: KVLayer,
        params: AttentionParams,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """Attend with q [T, H, Dk] -> out [T, H, Dv]; KV is already written. `lse` float32 [T, H]: see `Result`."""
        batch = self._batch
        assert batch is not None, "call plan first"
        count, window = batch.num_decodes, params.sliding_window
        if self._heads.has_latents:
            layer = layer.read_by_parts(self._heads.num_kv_heads)

        def run(stage: _Stage, result: Result, initial: Parts | None = None) -> None:
            work, memory = stage.list_of(window), stage.workspace
            tables = batch.block_tables
            attend(q, layer, tables, work, stage.tiling, params, result, memory, sinks=sinks, initial=initial)

        if count and batch.prefixes is not None and not window:
            run(self.prefix, Result(out, parts=self._prefix_parts))
            run(self.decode, Result(out, lse), self._prefix_parts)
        elif count:
            run(self.decode, Result(out, lse))
        if count < len(batch.context_lens):
            run(self.chunk, Result(out, lse))


def _processors(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and the shared memory that a program may have. Triton's interpreter runs one at a time."""
    if device.type == "cpu":
        return 1, tilings.SHARED_BYTES
    properties: Any = torch.cuda.get_device_properties(device)  # typed with fewer fields than it has
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


class _Stage:
    """Work lists of one kind, one per sliding window, and the workspace that they share."""

    def __init__(
        self,
        heads: Heads,
        limits: Limits,
        tiling: Tiling,
        tokens_per_item: int,
        processors: int,
        device: torch.device | str,
        is_whole: bool = False,
    ) -> None:
        self.tiling = tiling
        self.tokens_per_item = tokens_per_item
        self._lists: dict[int, WorkList] = {}
        self._heads, self._device, self._is_whole = heads, device, is_whole
        self._max_items = WorkList.items_needed(limits.num_tokens, limits.num_sequences, tokens_per_item)
        self._num_programs = processors * tiling.programs_per_processor
        slots = tiling.slots(limits.context, self._max_items, heads.num_kv_heads, self._num_programs)
        shape = (1, 1, 1) if is_whole else (self._num_programs, slots, tokens_per_item * heads.group)
        self.workspace = empty_parts(*shape, dim_v=heads.dim_v, device=device)

    def list_of(self, sliding_window: int) -> WorkList:
        """The work list of layers with this window."""
        if sliding_window not in self._lists:
            self._lists[sliding_window] = WorkList(
                self._max_items,
                tokens_per_item=self.tokens_per_item,
                unit=self.tiling.unit,
                num_kv_heads=self._heads.num_kv_heads,
                num_programs=self._num_programs,
                is_whole=self._is_whole,
                device=self._device,
            )
        return self._lists[sliding_window]
