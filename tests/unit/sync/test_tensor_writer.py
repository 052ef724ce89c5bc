"""A tensor is written and checked piece by piece, with the results of writing and checking it whole."""

import ctypes

import numpy as np
import pytest
import torch

from sync.digests import PIECE_BYTES as PIECE
from sync.digests import digest_of, tensor_bytes, tensor_digest
from sync.errors import ManifestMismatch
from sync.tensor_writer import TensorWriter

FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn]
SIZES = [0, 1, 1000, PIECE // 4, PIECE // 4 + 1, 3 * PIECE // 4 + 17]
"""Elements of float32, around the borders of pieces."""


@pytest.fixture(params=["numpy", "a copy function"])
def copies(request):
    """How many bytes each call of the copy function was asked for; None without one."""
    return None if request.param == "numpy" else []


@pytest.fixture
def writer(copies):
    def copy(out, source, num_bytes, width):
        copies.append(num_bytes)
        return copied(out, source, num_bytes, width)

    return TensorWriter() if copies is None else TensorWriter(find_copy=lambda: copy)


def copied(out, source, num_bytes, width):
    """By numpy, as a kernel would."""
    ctypes.memmove(out, source, num_bytes)
    bits = np.frombuffer((ctypes.c_char * num_bytes).from_address(out), f"u{width}")
    return int((bits & ((1 << (8 * width - 1)) - 1)).max(initial=0))


def filled(size, dtype):
    return torch.randn(size, generator=torch.Generator().manual_seed(size)).to(dtype)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_tensor_arrives_whole_under_its_digest(writer, size, dtype):
    source, out = (filled(size, torch.float32) * 100).to(dtype), torch.zeros(size, dtype=dtype)
    assert writer.write(out, source) == (tensor_digest(source), True)
    assert torch.equal(out, source)
    assert writer.write(torch.zeros(size, dtype=dtype), source, check_finite=False).digest == tensor_digest(source)


@pytest.mark.parametrize("source", [
    pytest.param(filled(64, torch.float32).view(8, 8)[:, 3], id="a column"),
    pytest.param(torch.tensor(0.5).expand(PIECE // 2), id="one number"),
    pytest.param(filled(64, torch.float32).view(8, 8).t(), id="transposed"),
    pytest.param(filled(64, torch.bfloat16)[::4], id="a column, to be cast"),
])  # fmt: skip
def test_a_strided_source_arrives_as_its_values(writer, source):
    out = torch.zeros(source.shape)
    expected = source.float().contiguous()
    assert digest_of(writer.write_changed(out, source).digests) == tensor_digest(expected)
    assert torch.equal(out, expected)
    target, parts = torch.empty(source.shape, device="meta"), []

    def upload(out, fill):
        for start in range(0, out.nbytes, PIECE):
            piece = bytearray(min(PIECE, out.nbytes - start))
            fill(memoryview(piece), start)
            parts.append(bytes(piece))

    assert TensorWriter(find_upload=lambda out: upload).write(target, source).digest == tensor_digest(expected)
    assert b"".join(parts) == bytes(tensor_bytes(expected))


def test_the_copy_function_makes_every_plain_copy_and_nothing_else(writer, copies):
    source = filled(PIECE // 4 + 1, torch.float32)
    writer.write(torch.zeros_like(source), source)
    writer.write(torch.zeros_like(source), source, check_finite=False)
    pieces = [PIECE, 4] * 2
    assert copies in (None, pieces)
    writer.write(torch.zeros(len(source), dtype=torch.bfloat16), source)
    writer.write(torch.zeros(4, 5).t(), torch.zeros(5, 4))
    assert copies in (None, pieces)


@pytest.mark.parametrize("size", SIZES)
def test_a_cast_on_the_way_is_that_of_the_whole(writer, size):
    source, out = filled(size, torch.float32), torch.zeros(size, dtype=torch.bfloat16)
    assert writer.write(out, source, check_finite=False).digest == tensor_digest(source.bfloat16())
    assert torch.equal(out, source.bfloat16())


def test_places_and_sources_may_be_strided_and_scalars_are_tensors_too(writer):
    for source in (torch.randn(30, 20).t(), torch.randn(20, 30), torch.tensor(2.5)):
        for out in (torch.zeros(source.shape), torch.zeros(source.shape).t().contiguous().t()):
            assert writer.write(out, source) == (tensor_digest(source), True)
            assert torch.equal(out, source)
            assert writer.write(out, source, check_finite=False).digest == tensor_digest(source)


def test_bytes_are_fetched_straight_to_their_place(writer):
    source, out, starts = filled(3 * PIECE // 4, torch.float32), torch.zeros(3 * PIECE // 4), []
    content = tensor_bytes(source)

    def fetch(piece, start):
        starts.append(start)
        piece[:] = content[start : start + len(piece)]

    assert writer.read(out, fetch) == (tensor_digest(source), True)
    assert torch.equal(out, source) and starts == [0, PIECE, 2 * PIECE]


@pytest.mark.quick(38)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-nan"])
@pytest.mark.parametrize("where", [0, 600_000, -1])
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(writer, dtype, value, where):
    if "inf" in value and dtype == torch.float8_e4m3fn:
        pytest.skip("it has no infinities")
    bad = torch.tensor(float(value.removeprefix("-"))).to(dtype)
    if value.startswith("-"):
        bad = bad.reshape(1).view(torch.uint8)
        bad[-1] |= 0x80
        bad = bad.view(dtype)[0]
    source = torch.ones(900_000).to(dtype)
    source[where] = bad
    assert writer.write(torch.zeros_like(source), source) == (tensor_digest(source), False)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_largest_and_the_smallest_values_are_finite(writer, dtype):
    limits = torch.finfo(dtype)
    for value in (limits.max, limits.min, limits.tiny, 0.0, -0.0):
        assert writer.write(
            torch.zeros(2, dtype=dtype), torch.tensor([value, -value], dtype=torch.float64).to(dtype)
        ).finite


def test_integers_are_always_finite(writer):
    for dtype in (torch.int64, torch.int16, torch.uint8, torch.bool):
        assert writer.write(torch.zeros(3, dtype=dtype), torch.tensor([-1, 0, 1]).to(dtype)).finite


def test_a_tensor_of_another_shape_is_refused_before_any_byte_is_written(writer):
    out = torch.zeros(2, 3)
    with pytest.raises(ManifestMismatch, match=r"\[3, 3\] cannot be written to one of \[2, 3\]"):
        writer.write(out, torch.ones(3, 3))
    assert not out.any()
