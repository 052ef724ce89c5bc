"""The shapes of attention's products. Chosen for Hopper; `tests/benchmarks/attention_gpu.py --tune` measures others."""

from typing import NamedTuple

_STAGE_BYTES = 32 * 1024
"""Keys and values of one tile, at most: three of them in flight for two programs fit a multiprocessor's 227 KiB."""
_ORDERED_UNIT = 512
"""KV positions: enough that parts are a small share of the traffic, few enough to share out one long context."""


class Tiling(NamedTuple):
    """How one list is attended to."""

    block_m: int
    """Rows of one product: tokens x query heads of a KV head, padded."""
    tile: int
    """KV positions read at once; a power of two."""
    unit: int
    """KV positions of one unit of work; a multiple of `tile`."""
    num_warps: int
    num_stages: int
    """Odd: a tile is found through its block table, so each fetched ahead takes two."""
    programs_per_processor: int
    is_ordered: bool = False
    """Bits of a row depend on nothing but its position and what it reads."""
    skips_masks: bool = False
    """Tiles that every row sees whole are read by a loop of their own."""

    def slots(self, max_context: int, max_items: int, num_kv_heads: int, num_programs: int) -> int:
        """Parts that one program may leave in the workspace."""
        if not self.is_ordered:
            return 2
        units = -(-max_context // self.unit)
        return 1 + min(units, -(-units * max_items * num_kv_heads // num_programs))


def decode(group: int, dim_k: int, dim_v: int, element_bytes: int) -> Tiling:
    """A token or a few of a sequence at a time: the reading of KV is all that costs."""
    tile = _tile(dim_k + dim_v, element_bytes)
    return Tiling(_rows(group, 16), tile, tile, num_warps=4, num_stages=5, programs_per_processor=2)


def shared_prefix(group: int, dim_k: int, dim_v: int, element_bytes: int) -> Tiling:
    """The tokens of several sequences that read one prefix: still less to compute than to read."""
    tile = _tile(dim_k + dim_v, element_bytes)
    return Tiling(_rows(group, 64), tile, tile, num_warps=4, num_stages=3, programs_per_processor=2)


def prefill(group: int, dim_k: int, dim_v: int, element_bytes: int) -> Tiling:
    """Many tokens of a sequence at a time: tensor cores are to be kept busy."""
    tile = _tile(dim_k + dim_v, element_bytes)
    rows = _rows(group, 128 if element_bytes < 4 else 32)
    return Tiling(rows, tile, tile, num_warps=8, num_stages=5, programs_per_processor=1, skips_masks=True)


def ordered(group: int, dim_k: int, dim_v: int, element_bytes: int) -> Tiling:
    """For all of these where bits must not depend on the batch: another height could be another instruction."""
    tile = _tile(dim_k + dim_v, element_bytes)
    rows = _rows(group, 16)
    return Tiling(rows, tile, _ORDERED_UNIT, num_warps=4, num_stages=5, programs_per_processor=2, is_ordered=True)


def _rows(group: int, at_least: int) -> int:
    return max(at_least, 1 << (group - 1).bit_length())


def _tile(dims: int, element_bytes: int) -> int:
    fitting = _STAGE_BYTES // (dims * element_bytes)
    return min(64, max(16, 1 << (fitting.bit_length() - 1)))
