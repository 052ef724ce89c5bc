"""Small integers packed into words, and scales that many elements share."""

import torch
from torch import Tensor


def ceil_div(count: int, size: int) -> int:
    """The number of blocks of `size` that hold `count` elements; the last may be partial."""
    return -(-count // size)


def unpack(words: Tensor, bits: int, count: int) -> Tensor:
    """Unsigned integers from a dense stream of bits: int32 [..., W] -> uint8 [..., count].

    Integer i has the bits [i * bits, (i + 1) * bits) of its row, the lowest bit of the first word first. `bits` is 1 to
    8, and W is at least ceil(count * bits / 32).
    """
    if 8 % bits == 0:
        packed = words.contiguous().view(torch.uint8)  # little-endian: the lowest byte first
        if bits < 8:
            shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
            packed = ((packed[..., None] >> shifts) & (2**bits - 1)).flatten(-2)
        return packed[..., :count]
    first = torch.arange(count) * bits
    word, offset = first // 32, first % 32
    unsigned = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 1))
    pairs = unsigned[..., word] | (unsigned[..., word + 1] << 32)
    codes: Tensor = (pairs >> offset) & (2**bits - 1)
    return codes.to(torch.uint8)


def spread(values: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """Values of blocks [..., R, C] as float32 that broadcasts to `shape`, whose last two dimensions are cut into blocks
    of `block` rows and columns; those at the edges may be partial."""
    result = values.to(torch.float32)
    for dim, size in zip((-2, -1), block, strict=True):
        if result.shape[dim] > 1 and size > 1:
            result = result.repeat_interleave(size, dim).narrow(dim, 0, shape[dim])
    return result
