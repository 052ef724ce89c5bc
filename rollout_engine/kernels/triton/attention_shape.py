"""Compile-time constants and grouped arguments of the attention kernels."""

from typing import NamedTuple

from torch import Tensor


class Shape(NamedTuple):
    """Compile-time constants of one layer over one kind of work list."""

    group: int
    """Query heads per KV head."""
    num_kv_heads: int
    dim_k: int
    dim_v: int
    block_k: int
    """`dim_k` rounded up to a power of two."""
    block_v: int
    block_size: int
    block_m: int
    """Rows of one product."""
    tile: int
    """KV positions of one product."""
    tiles_per_unit: int
    rows: int
    """Rows of one workspace slot."""
    slots: int
    """Workspace slots of one program."""
    deterministic: bool
    skips_masks: bool
    has_window: bool
    has_softcap: bool
    has_sinks: bool
    has_initial: bool
    writes_parts: bool
    writes_lse: bool
    has_latents: bool = False
    """Keys are values, `block_v` channels, and `block_r` more channels."""
    block_r: int = 0
    """`dim_k` - `dim_v` rounded up to a power of two."""


class Pool(NamedTuple):
    """A KV pool and the block tables."""

    key_data: Tensor
    value_data: Tensor
    key_strides: tuple[int, ...]
    """Strides of the keys over blocks, heads and positions, in elements."""
    value_strides: tuple[int, ...]
    tables: Tensor
    """int32 [N, max_blocks]."""
    table_stride: int


class Queries(NamedTuple):
    """Query tensor [T, H, Dk] and its strides."""

    data: Tensor
    token_stride: int
    head_stride: int


class Lists(NamedTuple):
    """Tensors of a `WorkList`."""

    items: Tensor
    shares: Tensor
    line: Tensor


class Output(NamedTuple):
    """Output tensors: either `parts`, or the others are written."""

    data: Tensor
    token_stride: int
    head_stride: int
    lse: Tensor
    parts: "Parts"


class Parts(NamedTuple):
    """Partial softmaxes, unnormalised (see `softmax`), contiguous float32."""

    accs: Tensor
    """[..., Dv]."""
    tops: Tensor
    totals: Tensor


class ScoreFactors(NamedTuple):
    """Scores are product * inner, or tanh(product * inner) * outer, in units of log2; and the sliding window."""

    inner: float
    outer: float
    sliding_window: int
