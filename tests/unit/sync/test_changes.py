"""Changes of a tensor give its new bits back, whatever they are, and nothing else."""

import zlib

import numpy as np
import pytest

from sync.changes import decode_changes, encode_all, encode_changes, num_streams
from sync.errors import ChecksumMismatch

WIDTHS = (1, 2, 4, 8)


def bits(random, count, width):
    return np.frombuffer(random.bytes(count * width), f"<u{width}").copy()


def decode(encoded, num_elements, width):
    streams = list(map(memoryview, encoded.streams))
    assert len(streams) == num_streams(encoded.num_changed, num_elements, width)
    return decode_changes(streams, encoded.num_changed, num_elements, width)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.5, 1.0])
def test_random_bits_are_restored_by_any_ranges(width, share):
    random = np.random.default_rng(width)
    old = bits(random, 5003, width)
    new = np.where(random.random(5003) < share, bits(random, 5003, width), old)
    encoded = encode_changes(old.data.cast("B"), new.data.cast("B"), width)
    assert encoded.num_changed == (old != new).sum()
    changes = decode(encoded, 5003, width)
    out = old.copy()
    for start in range(0, 5003, 700):
        part = out[start : start + 700]
        changes.apply(part.data.cast("B"), start * width)
    assert out.tobytes() == new.tobytes()


def test_gaps_of_any_length_are_kept():
    old = np.zeros(1 << 20, np.uint16)
    new = old.copy()
    new[[0, 1, 255, 510, 766, 1022, 300_000, (1 << 20) - 1]] = 7
    changes = decode(encode_changes(old.data.cast("B"), new.data.cast("B"), 2), 1 << 20, 2)
    changes.apply(old.data.cast("B"), 0)
    assert (old == new).all()


def test_all_elements_need_no_base():
    new = np.arange(100, dtype=np.uint32)
    out = np.full(100, 9, np.uint32)
    decode(encode_all(new.data.cast("B"), 4), 100, 4).apply(out.data.cast("B"), 0)
    assert (out == new).all()


@pytest.mark.parametrize("stream", range(4))
@pytest.mark.parametrize(
    "damage",
    [
        lambda stream: stream[:-1],
        lambda stream: stream + b"x",
        lambda stream: b"",
        lambda stream: zlib.compress(b"\0" * 10_000_000),
    ],
)
def test_streams_of_another_size_are_refused(stream, damage):
    old = np.zeros(9000, np.uint16)
    new = old.copy()
    new[::300] = 1
    encoded = encode_changes(old.data.cast("B"), new.data.cast("B"), 2)
    encoded.streams[stream] = damage(encoded.streams[stream])
    with pytest.raises(ChecksumMismatch, match="compressed changes"):
        decode(encoded, 9000, 2)


def test_changes_outside_of_the_tensor_are_refused():
    old = np.zeros(900, np.uint16)
    new = old.copy()
    new[[3, 899]] = 1
    encoded = encode_changes(old.data.cast("B"), new.data.cast("B"), 2)
    with pytest.raises(ChecksumMismatch, match="longer than the tensor|outside of the tensor"):
        decode(encoded, 899, 2)
