"""Sequence seeds: 64 bits that, with the position, determine every sampled token.

`mix` is the finaliser of SplitMix64 (Steele, Lea, Flood, 2014) over a pair: any change of either argument changes
about half of the 64 bits, so neighbouring prompts and samples draw unrelated streams.
"""

MIN_SEED, MAX_SEED = -(2**63), 2**64 - 1
"""Seeds that users may give: 64 bits, as an unsigned or a signed number."""

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def mix(seed: int, index: int) -> int:
    """A 64-bit seed derived from `seed` and `index` (both taken modulo 2**64)."""
    z = (seed * _GOLDEN + (index + 1) * 0xD1B54A32D192ED03 + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def unsigned(seed: int) -> int:
    """The seed in [0, 2**64) with the same 64 bits: int64 tensors hold large seeds as negative numbers."""
    return seed & _MASK


def child_seed(seed: int, index: int) -> int:
    """Seed of sample `index` of a request seeded with `seed`: sample 0 uses the seed itself."""
    return seed if index == 0 else mix(seed, index)
