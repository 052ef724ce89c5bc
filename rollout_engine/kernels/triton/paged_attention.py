"""Attention of whole batches on a device: decoding sequences first, then chunks of prompts, over one paged cache.

    plan      once per step and sliding window: work lists, made on the device from context lengths
    attend    once per layer: what decodes together reads shared prefixes, then each sequence its own; then the chunks

Where `is_ordered`, a token's bits depend on its position and context alone; otherwise also on what the batch is.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.scoring import Scoring
from rollout_engine.kernels.triton import tiling as tilings
from rollout_engine.kernels.triton.attention import Result, attend, empty_parts
from rollout_engine.kernels.triton.attention_shape import Parts
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.tiling import Tiling
from rollout_engine.kernels.triton.work import WorkList


class Heads(NamedTuple):
    """Of the layers that share a plan."""

    num_heads: int
    num_kv_heads: int
    dim_k: int
    dim_v: int
    dtype: torch.dtype

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    def tiling(self, kind: str) -> Tiling:
        """One of `tilings`, for these heads."""
        chosen: Tiling = getattr(tilings, kind)(self.group, self.dim_k, self.dim_v, self.dtype.itemsize)
        return chosen


class Limits(NamedTuple):
    """The most that a batch may hold."""

    num_tokens: int
    num_sequences: int
    context: int


class Prefixes(NamedTuple):
    """`shared_prefix.SharedPrefixes` on the device."""

    items: Tensor
    units: Tensor
    num_items: Tensor
    """int32 [1]: so many of `items` mean something."""


class Batch(NamedTuple):
    """One flat batch, on the device but for what is an int."""

    token_starts: Tensor
    """int32 [N + 1]: where the tokens of each sequence lie, and the end."""
    context_lens: Tensor
    """int32 [N], these tokens counted; 0 where a sequence pads a captured batch."""
    block_tables: Tensor
    """int32 [N, max_blocks]."""
    num_decodes: int
    """The first so many sequences have one token each."""
    prefixes: Prefixes | None = None
    """Of the sequences that decode."""


class PagedAttention:
    """Static memory for the plans and partial results of batches up to `limits`; graphs may capture its addresses."""

    def __init__(
        self,
        heads: Heads,
        limits: Limits,
        device: torch.device | str,
        *,
        is_ordered: bool = False,
        num_processors: int | None = None,
    ) -> None:
        """`num_processors` is the device's own number where it is not given."""
        self._heads = heads
        processors = num_processors or _num_processors(torch.device(device))
        ordered = "ordered" if is_ordered else None
        decode = heads.tiling(ordered or "decode")
        prefix = heads.tiling(ordered or "shared_prefix")
        chunk = heads.tiling(ordered or "prefill")
        self.decode = _Stage(heads, limits, decode, 1, processors, device)
        self.prefix = _Stage(heads, limits, prefix, prefix.block_m // heads.group, processors, device)
        self.chunk = _Stage(heads, limits, chunk, chunk.block_m // heads.group, processors, device, is_ordered)
        self._prefix_parts = empty_parts(limits.num_sequences, heads.num_heads, dim_v=heads.dim_v, device=device)
        self._batch: Batch | None = None

    def plan(self, batch: Batch, sliding_windows: set[int]) -> None:
        """Share out the work of `batch`; `attend` serves its layers next. Their windows, 0 for none, are all given.

        Layers with a window read their prefixes alone: a window seldom reaches back to one.
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
        scoring: Scoring,
        out: Tensor,
        *,
        sinks: Tensor | None = None,
        lse: Tensor | None = None,
    ) -> None:
        """q [T, H, Dk] -> out [T, H, Dv], over keys and values already written. `lse` float32 [T, H]: see `Result`."""
        batch = self._batch
        assert batch is not None, "plan comes first"
        tables, count, window = batch.block_tables, batch.num_decodes, scoring.sliding_window
        result = Result(out, lse)
        if count:
            initial = None
            if batch.prefixes is not None and not window:
                initial = self._prefix_parts
                self.prefix.attend(q, layer, tables, scoring, Result(out, parts=initial), sinks)
            self.decode.attend(q, layer, tables, scoring, result, sinks, initial)
        if count < len(batch.context_lens):
            self.chunk.attend(q, layer, tables, scoring, result, sinks)


def _num_processors(device: torch.device) -> int:
    """The interpreter walks through a grid one program after the other."""
    return 1 if device.type == "cpu" else torch.cuda.get_device_properties(device).multi_processor_count


class _Stage:
    """One kind of work list, for every sliding window, and the workspace they take turns in."""

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
        self._workspace = empty_parts(*shape, dim_v=heads.dim_v, device=device)

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

    def attend(
        self,
        q: Tensor,
        layer: KVLayer,
        tables: Tensor,
        scoring: Scoring,
        result: Result,
        sinks: Tensor | None,
        initial: Parts | None = None,
    ) -> None:
        work, memory = self.list_of(scoring.sliding_window), self._workspace
        attend(q, layer, tables, work, self.tiling, scoring, result, memory, sinks=sinks, initial=initial)
