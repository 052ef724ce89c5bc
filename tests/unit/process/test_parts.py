"""Long messages travel in parts, whole or not at all, within the bounds of the end that takes them."""

import random

import msgspec
import numpy as np
import pytest

from rollout_engine.children.failure import WireError
from rollout_engine.process import wire
from rollout_engine.process.parts import PART_BYTES, Assembler, in_parts
from rollout_engine.process.wire import (
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_STRUCT_BYTES,
    Abort,
    Decoder,
    Encoder,
    Limits,
    MessageTooLongError,
    Part,
    Reply,
)

LIMITS = Limits()
SMALL = Limits(struct_bytes=1 << 12, message_bytes=1 << 22)


def reply(*sizes):
    arrays = [np.random.default_rng(i).integers(0, 256, size, np.uint8) for i, size in enumerate(sizes)]
    return Reply(7, arrays=arrays)


def multiparts(message, limits=LIMITS):
    return [[bytes(frame) for frame in frames] for frames in in_parts(Encoder().encode(message), limits)]


def assembler(limits=LIMITS):
    return Assembler(Decoder(wire.ToClient), limits)


def same(a, b):
    return a.number == b.number and all(np.array_equal(x, y) for x, y in zip(a.arrays, b.arrays, strict=True))


@pytest.mark.parametrize(
    "sizes",
    [
        [], [10], [3000, 5000], [PART_BYTES - 100], [PART_BYTES], [PART_BYTES + 1], [3 * PART_BYTES], [5000] * 63,
        [5000] * 64, [2049] * 1199, [PART_BYTES - 17, 3 * PART_BYTES + 5, 2048, 2049, 7], [0] * 100,
    ],
    ids=str,
)  # fmt: skip
def test_messages_of_every_size_arrive_as_they_were_sent(sizes):
    message, reader = reply(*sizes), assembler()
    sent = multiparts(message)
    assert all(len(frame) <= MAX_FRAME_BYTES for frames in sent for frame in frames)
    assert all(sum(map(len, frames)) <= PART_BYTES + MAX_STRUCT_BYTES and len(frames) <= 64 for frames in sent)
    *before, last = (reader.read(frames) for frames in sent)
    assert before == [None] * (len(sent) - 1) and same(last, message)


def test_large_arrays_are_not_copied_into_their_parts():
    array = np.zeros(3 * PART_BYTES, np.uint8)
    sent = [*in_parts(Encoder().encode(Reply(7, arrays=[array])), LIMITS)]
    assert sum(np.shares_memory(np.frombuffer(data, np.uint8), array) for _, data in sent) >= 2


def test_arrays_of_a_long_message_begin_where_numbers_of_any_size_may():
    reader = assembler()
    *_, last = map(reader.read, multiparts(Reply(7, arrays=[np.zeros(2049 + 8 * i) for i in range(70)])))
    assert all(array.flags.aligned for array in last.arrays)


def test_other_messages_may_come_between_parts():
    message, reader, heard = reply(4 * PART_BYTES), assembler(), []
    for frames in multiparts(message):
        heard += [reader.read(frames), reader.read(multiparts(wire.Heartbeat())[0])]
    assert heard.count(wire.Heartbeat()) == len(heard) // 2
    assert same(heard[-2], message)


@pytest.mark.parametrize(
    "message, limit",
    [
        (Abort([*range(2000, 4000)]), r"\d+ and may take 4096 bytes beside its arrays of numbers; give long data as"),
        ([1 << 22], r"\d+ and may take 4194304 bytes in all; divide it"),
        ([2050] * MAX_FRAMES, f"{MAX_FRAMES + 1} and may take {MAX_FRAMES} arrays"),
    ],
    ids=["struct", "message", "frames"],
)
def test_a_message_beyond_the_bounds_of_the_other_end_is_not_sent(message, limit):
    message = reply(*message) if isinstance(message, list) else message
    limits = Limits(struct_bytes=1 << 26) if "65536" in limit else SMALL
    with pytest.raises(MessageTooLongError, match=limit):
        in_parts(Encoder().encode(message), limits)


def part(data, num_bytes_left, sizes=()):
    return multiparts(Part(np.frombuffer(data, np.uint8), num_bytes_left, [*sizes]))[0]


@pytest.mark.parametrize(
    "hostile",
    [
        [part(bytes(16), 0)],  # of no message
        [part(bytes(16), 16, [17])] + [part(bytes(16), 16)],  # that does not go on
        [part(bytes(16), 16, [17])] + [part(bytes(32), -16)],
        [part(b"", 16, [16])],
        [part(bytes(16), 0, [-16, 32])],
        [part(bytes(16), 1 << 30, [(1 << 12) + 1, 1 << 20])],
        [part(bytes(16), (1 << 23) - 16, [16, (1 << 23) - 16])],
        [part(bytes(16), (MAX_FRAMES + 1) * 16, [16] * (MAX_FRAMES + 1))],
        [multiparts(Part(np.zeros(4, np.float32), 0, [16]))[0]],
        [part(bytes(16), 0, [16])],  # no message
        [part(part(bytes(16), 0, [16])[0].ljust(64, b"\0"), 0, [len(part(bytes(16), 0, [16])[0])])],  # a part of a part
        [[b"\xc1"] * 65],
    ],
)
def test_parts_that_make_no_message_within_the_bounds_are_refused_and_the_next_message_is_read(hostile):
    reader = assembler(SMALL)
    with pytest.raises(WireError):
        for frames in hostile:
            reader.read(frames)
    assert not reader._buffer.size
    message = reply(3 * PART_BYTES)
    *_, last = map(reader.read, multiparts(message))
    assert same(last, message)


def test_mutated_parts_make_a_message_or_raise_one_error():
    choose, sent, num_read = random.Random(4), multiparts(reply(2 * PART_BYTES, 3000, 70_000)), 0
    for _ in range(300):
        reader = assembler(SMALL)
        for struct, data in sent:
            mutated = bytearray(struct)
            for _ in range(choose.randrange(3)):
                mutated[choose.randrange(len(mutated))] = choose.randrange(256)
            try:
                num_read += reader.read([bytes(mutated), data]) is not None
            except WireError:
                pass
    assert 0 < num_read < 300


def test_a_long_struct_is_refused_before_it_is_decoded():
    class Never:
        def decode(self, _):
            raise AssertionError("it was decoded")

    decoder = Decoder(wire.ToCore)
    decoder._decoder = Never()
    frame = msgspec.msgpack.encode({"type": "abort", "sequence_ids": [[]] * MAX_STRUCT_BYTES})
    with pytest.raises(WireError, match="at most 1048576 bytes beside its arrays"):
        decoder.decode([frame])
