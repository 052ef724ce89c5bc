"""What a tensor's digest is, in one piece or many, however its bytes come."""

import pytest
import torch
import xxhash

from sync.digests import PIECE_BYTES, Digest, tensor_bytes, tensor_digest

SIZES = [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 17]
"""Bytes, around the borders of pieces."""


def digest_of(content):
    """By the words of the module."""
    pieces = [content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)]
    return xxhash.xxh3_128_hexdigest(b"".join(bytes.fromhex(xxhash.xxh3_128_hexdigest(piece)) for piece in pieces))


def filled(size):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@pytest.mark.parametrize("size", SIZES)
def test_a_digest_is_that_of_the_digests_of_the_pieces(size):
    tensor = filled(size)
    assert tensor_digest(tensor) == digest_of(tensor.numpy().tobytes())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("part", [100_003, PIECE_BYTES, 2 * PIECE_BYTES, 7 * PIECE_BYTES + 1])
def test_bytes_may_come_in_parts_of_any_size(size, part):
    content, digest = tensor_bytes(filled(size)), Digest()
    for start in range(0, size, part):
        digest.update(content[start : start + part])
    assert digest.hexdigest() == digest_of(content.tobytes())


def test_a_scalar_has_its_bytes_and_what_is_empty_has_none():
    assert tensor_digest(torch.tensor(1.0)) == digest_of(torch.tensor(1.0).numpy().tobytes())
    assert tensor_digest(torch.empty(0, 3)) == xxhash.xxh3_128_hexdigest(b"")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8])
def test_strides_do_not_matter(dtype):
    tensor = (torch.arange(12) % 5).view(3, 4).to(dtype)
    assert tensor_digest(tensor.t().contiguous().t()) == tensor_digest(tensor)


@pytest.mark.parametrize("where", [0, PIECE_BYTES // 4 - 1, PIECE_BYTES // 4, -1])
def test_one_flipped_bit_is_told(where):
    tensor = torch.zeros(PIECE_BYTES // 4 + 1000)
    before = tensor_digest(tensor)
    tensor.view(torch.int32)[where] ^= 1
    assert tensor_digest(tensor) != before
