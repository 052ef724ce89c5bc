"""The uniform numbers of `kernels.rng`, bit for bit, as a device function."""

import triton
import triton.language as tl

_WORD = tl.constexpr(0xFFFFFFFF)


@triton.jit
def uniform(seed, position):
    """float64 in [0, 1) with 53 random bits, from int64 scalars or tensors."""
    seed, position = seed.to(tl.uint64), position.to(tl.uint64)
    key_0, key_1 = seed & _WORD, seed >> 32
    word_0, word_1, word_2, word_3 = position & _WORD, position >> 32, position * 0, position * 0
    for _ in tl.static_range(10):
        a, b = word_0 * 0xD2511F53, word_2 * 0xCD9E8D57
        word_0, word_1 = (b >> 32) ^ word_1 ^ key_0, b & _WORD
        word_2, word_3 = (a >> 32) ^ word_3 ^ key_1, a & _WORD
        key_0, key_1 = (key_0 + 0x9E3779B9) & _WORD, (key_1 + 0xBB67AE85) & _WORD
    return ((word_0 << 21) + (word_1 >> 11)).to(tl.float64) * (2.0**-53)
