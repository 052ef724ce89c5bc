"""The kernel sees what the host sees: digests, and values that are not finite."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from sync import digest_kernel, digests, looks  # noqa: E402
from sync.digests import tensor_digest  # noqa: E402
from sync.finite import is_finite, markers  # noqa: E402
from sync.looks import Looks  # noqa: E402
from tests.unit.kernels.triton.conftest import device, language_patched_once, tensors_as_loop_bounds  # noqa: E402, F401

PIECE = 2048
"""Bytes: the interpreter is slow."""
SIZES = [0, 1, 16, 240, 241, 256, 1000, 1024, 1025, PIECE - 1, PIECE, PIECE + 240, PIECE + 241, 3 * PIECE + 1088]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.fixture
def small_pieces(monkeypatch):
    """On both sides."""
    for module in (digests, digest_kernel):
        monkeypatch.setattr(module, "PIECE_BYTES", PIECE)


@pytest.fixture
def told(monkeypatch, device):  # noqa: F811
    """A function from tensors to what the kernel tells of them."""
    monkeypatch.setattr(looks, "sees", lambda tensor: True)

    def look_at(*tensors):
        all_of_them = Looks(finite=True)
        for tensor in tensors:
            all_of_them.at(tensor.to(device))
        return all_of_them.told()

    return look_at


def random_bytes(size):
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


def test_digests_are_those_of_the_library_at_every_size(told, small_pieces):
    tensors = [random_bytes(size) for size in SIZES]
    assert told(*tensors) == [(tensor_digest(tensor), True) for tensor in tensors]


def test_pieces_of_the_real_size(told):
    tensor = random_bytes(digests.PIECE_BYTES + 3000)
    assert told(tensor) == [(tensor_digest(tensor), True)]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64, torch.int32, torch.int8, torch.bool])
def test_every_dtype_has_the_digest_of_its_bytes(told, small_pieces, dtype):
    tensor = (torch.arange(1300) % 97 - 40).to(dtype).view(26, 50)
    assert told(tensor, tensor[0, 0]) == [(tensor_digest(tensor), True), (tensor_digest(tensor[0, 0]), True)]


@pytest.mark.parametrize("start", [1, 3, 8])
def test_a_tensor_may_start_anywhere(told, small_pieces, start):
    tensor = random_bytes(PIECE + 700 + start)[start:]
    assert told(tensor) == [(tensor_digest(tensor), True)]


def test_strides_do_not_matter(told, small_pieces):
    tensor = torch.randn(60, 50)
    assert told(tensor.t(), tensor[:, ::2]) == [(tensor_digest(x), True) for x in (tensor.t(), tensor[:, ::2])]


def test_no_tensors_tell_nothing(told):
    assert told() == []


def test_a_cast_made_for_its_digest_is_let_go_before_the_end(told, small_pieces, monkeypatch):
    monkeypatch.setattr(digest_kernel, "_LAUNCH_BYTES", 3000)
    launched, launch = [], digest_kernel.DeviceLooks._launch
    monkeypatch.setattr(
        digest_kernel.DeviceLooks, "_launch", lambda self: launched.append(len(self._tensors)) or launch(self)
    )
    tensors = [random_bytes(size) for size in (1000, 2000, 100, 3300, 700)]
    assert told(*tensors) == [(tensor_digest(tensor), True) for tensor in tensors]
    assert launched == [2, 2, 1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_one_value_that_is_not_finite_is_seen_wherever_it_is(told, small_pieces, dtype):
    """In a whole block, in the rest of a piece, in its last bytes, in the rest of the tensor; of either sign."""
    size = (PIECE + PIECE // 2 + 500) // dtype.itemsize
    fine = torch.linspace(-1, 1, size, dtype=torch.float64).to(dtype)
    largest = torch.full((300,), torch.finfo(dtype).max, dtype=torch.float64)
    cases = [fine, largest.to(dtype), (-largest[:3]).to(dtype)]
    bad = [float("nan")] if dtype == torch.float8_e4m3fn else [float("nan"), float("inf"), float("-inf")]
    for i, place in enumerate([0, PIECE // dtype.itemsize - 1, PIECE // dtype.itemsize + 70, size - 1]):
        case = fine.clone()
        case[place] = bad[i % len(bad)]
        cases.append(case)
    found = told(*cases, cases[-1][-1:])
    assert [finite for _, finite in found] == [True] * 3 + [False] * 5
    assert found[0].digest == tensor_digest(fine)


@pytest.mark.parametrize("dtype", FLOATS)
def test_markers_tell_every_pattern_of_bits_as_its_value_does(dtype):
    width = dtype.itemsize
    patterns = torch.arange(1 << 8 * min(width, 2), dtype=torch.int64)
    patterns = patterns << (8 * max(width - 2, 0))
    masks, carries, signs = (marker & ((1 << 8 * width) - 1) for marker in markers(dtype))
    marked = [bool(((bits & masks) + carries) & signs) for bits in (p % (1 << 8 * width) for p in patterns.tolist())]
    values = patterns.view(torch.uint8).view(-1, 8)[:, :width].contiguous().view(dtype).flatten()
    assert marked == [not finite for finite in values.double().isfinite().tolist()]
    assert is_finite(values[:0].view(torch.uint8).numpy().data, dtype)
