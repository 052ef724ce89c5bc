"""What attention's kernels are compiled for, and how their arguments are grouped."""

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
    """`dim_k` in a tile: the next power of two."""
    block_v: int
    block_size: int
    block_m: int
    """Rows of one product."""
    tile: int
    """KV positions of one product."""
    tiles_per_unit: int
    rows: int
    """Of a slot of the workspace."""
    slots: int
    """Of a program."""
    is_ordered: bool
    skips_masks: bool
    has_window: bool
    has_softcap: bool
    has_sinks: bool
    has_initial: bool
    writes_parts: bool
    writes_lse: bool


class Pool(NamedTuple):
    """KV and who reads what of it."""

    key_data: Tensor
    value_data: Tensor
    key_strides: tuple[int, ...]
    """Block, head, position."""
    value_strides: tuple[int, ...]
    tables: Tensor
    """int32 [N, max_blocks]."""
    table_stride: int


class Queries(NamedTuple):
    """[T, H, Dk]."""

    data: Tensor
    token_stride: int
    head_stride: int


class Lists(NamedTuple):
    """Of a `WorkList`."""

    items: Tensor
    shares: Tensor
    line: Tensor


class Output(NamedTuple):
    """Either `parts` or the others are written."""

    data: Tensor
    token_stride: int
    head_stride: int
    lse: Tensor
    parts: "Parts"


class Parts(NamedTuple):
    """Parts of softmaxes, unnormalised (see `softmax`), contiguous float32."""

    accs: Tensor
    """[..., Dv]."""
    tops: Tensor
    totals: Tensor


class Numbers(NamedTuple):
    """Scores are product * inner, or tanh(product * inner) * outer, in units of log2."""

    inner: float
    outer: float
    sliding_window: int
