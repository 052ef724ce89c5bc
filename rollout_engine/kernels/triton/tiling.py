"""Tile sizes of attention, chosen for Hopper; `tests/benchmarks/attention_gpu.py --tune` measures others."""

from typing import NamedTuple

SHARED_BYTES = 227 * 1024
"""Shared memory that a program of a Hopper may have; a consumer's Blackwell allows 99 KiB."""
_RESERVED_BYTES = 1024
"""Bytes of a multiprocessor's shared memory reserved for each program."""
_REGISTERS = 65_536
"""Registers of a multiprocessor; a thread has them in eights."""
_STAGE_BYTES = 32 * 1024
"""Limit of keys and values of one tile: three in flight for each of two programs fit a multiprocessor's 227 KiB."""
_ACCUMULATORS = 128
"""Most registers of a thread for its part of a product of weights and values."""
_MOST_HEADS = 64
_DETERMINISTIC_UNIT = 512
"""KV positions: enough to keep the traffic of parts small, few enough to divide one long context."""


class Tiling(NamedTuple):
    """Tile sizes and launch parameters for one work list."""

    block_m: int
    """Rows of one product: tokens x query heads of a KV head, padded."""
    tile: int
    """KV positions read at once; a power of two."""
    unit: int
    """KV positions of one unit of work; a multiple of `tile`."""
    num_warps: int
    num_stages: int
    """Odd: a tile is found through its block table, so prefetching one takes two stages."""
    programs_per_processor: int
    deterministic: bool = False
    """A row's bits depend only on its position and the values it reads."""
    skips_masks: bool = False
    """Tiles without masked keys are processed by a separate loop."""

    @property
    def max_registers(self) -> int | None:
        """Registers of a thread with which all programs of a multiprocessor run at once; None: a thread's most, 255."""
        share = _REGISTERS // (self.programs_per_processor * self.num_warps * 32)
        return share // 8 * 8 if share < 256 else None

    def slots(self, max_context: int, max_items: int, num_kv_heads: int, num_programs: int) -> int:
        """Parts that one program may store in the workspace."""
        if not self.deterministic:
            return 2
        units = -(-max_context // self.unit)
        return 1 + min(units, -(-units * max_items * num_kv_heads // num_programs))


def most_heads_of_latents(dim_v: int) -> int:
    """Most query heads whose rows of one token are a product with latents of `dim_v` channels.

    A deterministic program of four warps accumulates two such products, a unit's and those before it.
    """
    return min(_MOST_HEADS, _most_rows(dim_v, num_warps=4) // 2)


def fitted(
    tiling: Tiling,
    group: int,
    dim_k: int,
    dim_v: int,
    element_bytes: int,
    shared_bytes: int,
    *,
    has_latents: bool = False,
) -> Tiling:
    """Shrink `tiling` if its programs do not fit a multiprocessor: with fewer tiles in flight, fewer rows, one program.

    `shared_bytes`: the most that a lone program may have. The bits of a deterministic tiling do not change.
    """

    def fits() -> bool:
        return _fits(tiling, dim_k, dim_v, element_bytes, shared_bytes, has_latents=has_latents)

    if not fits():
        tiling = tiling._replace(num_stages=3)
    while not fits() and not tiling.deterministic and tiling.block_m > _rows(group, 32):
        tiling = tiling._replace(block_m=tiling.block_m // 2)
    return tiling if fits() else tiling._replace(programs_per_processor=1)


def with_third_program(
    tiling: Tiling, group: int, dim_k: int, dim_v: int, element_bytes: int, shared_bytes: int, block_size: int
) -> Tiling:
    """Add a third program on a multiprocessor to a `tiling` of decode, if a tile is within one block and it fits.

    Such a tile takes few registers to address: with up to 128 channels each, 168 hold all that a thread needs.
    """
    third = tiling._replace(programs_per_processor=3)
    is_small = dim_k + dim_v <= 256 and element_bytes == 2 and tiling.block_m == 16
    is_within_block = block_size % tiling.tile == 0
    return third if is_small and is_within_block and _fits(third, dim_k, dim_v, element_bytes, shared_bytes) else tiling


def _fits(
    tiling: Tiling, dim_k: int, dim_v: int, element_bytes: int, shared_bytes: int, *, has_latents: bool = False
) -> bool:
    """Whether the shared memory of a multiprocessor holds the tiling's programs, with channels padded to products.

    A tile of latents is read once, as values and as keys.
    """
    other_k = dim_k - dim_v if has_latents else dim_k
    block_k, block_v = (next_power_of_2(max(dim, 16)) for dim in (other_k, dim_v))
    share = (shared_bytes + _RESERVED_BYTES) // tiling.programs_per_processor - _RESERVED_BYTES
    tiles = tiling.num_stages // 2 * tiling.tile * (block_k + block_v)
    queries, weights = tiling.block_m * (block_k + (block_v if has_latents else 0)), tiling.block_m * tiling.tile
    if has_latents and tiling.deterministic:  # accumulators of a unit, float32, pass through the memory of its tiles
        tiles = max(tiles, tiling.block_m * block_v * 4 // element_bytes)
    return (tiles + queries + weights) * element_bytes + _RESERVED_BYTES <= share


def decode(group: int, dim_k: int, dim_v: int, element_bytes: int, *, has_latents: bool = False) -> Tiling:
    """For a token or a few of each sequence: bound by reading KV."""
    tile = _tile(dim_k if has_latents else dim_k + dim_v, element_bytes)
    return Tiling(_rows(group, 16), tile, tile, num_warps=4, num_stages=5, programs_per_processor=2)


def shared_prefix(group: int, dim_k: int, dim_v: int, element_bytes: int, *, has_latents: bool = False) -> Tiling:
    """For the tokens of several sequences over one prefix: still bound by reading KV."""
    tile = _tile(dim_k if has_latents else dim_k + dim_v, element_bytes)
    return Tiling(
        _rows(group, min(64, _most_rows(dim_v, num_warps=4))),
        tile,
        tile,
        num_warps=4,
        num_stages=3,
        programs_per_processor=2,
    )


def prefill(group: int, dim_k: int, dim_v: int, element_bytes: int, *, has_latents: bool = False) -> Tiling:
    """For many tokens of a sequence: bound by the tensor cores."""
    tile = _tile(dim_k if has_latents else dim_k + dim_v, element_bytes)
    rows = _rows(group, min(128 if element_bytes < 4 else 32, _most_rows(dim_v, num_warps=8)))
    return Tiling(rows, tile, tile, num_warps=8, num_stages=5, programs_per_processor=1, skips_masks=True)


def deterministic(group: int, dim_k: int, dim_v: int, element_bytes: int, *, has_latents: bool = False) -> Tiling:
    """For all batches in deterministic mode: another height could compile to other instructions."""
    tile = _tile(dim_k if has_latents else dim_k + dim_v, element_bytes)
    rows = _rows(group, 16)
    return Tiling(
        rows, tile, _DETERMINISTIC_UNIT, num_warps=4, num_stages=5, programs_per_processor=2, deterministic=True
    )


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less. (Triton's own takes 5 us.)"""
    return 1 << (number - 1).bit_length()


def _rows(group: int, at_least: int) -> int:
    return max(at_least, next_power_of_2(group))


def _most_rows(dim_v: int, *, num_warps: int) -> int:
    """Most rows, a power of two, of a product whose accumulators leave a thread registers for all else."""
    return max(16, num_warps * 32 * _ACCUMULATORS // next_power_of_2(max(dim_v, 16)))


def _tile(dims: int, element_bytes: int) -> int:
    fitting = _STAGE_BYTES // (dims * element_bytes)
    return min(64, max(16, 1 << (fitting.bit_length() - 1)))
