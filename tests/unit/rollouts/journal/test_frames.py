"""The bytes of a segment: cut at any place it has the frames before it, changed at any place it is refused."""

import pytest

from rollout_engine.rollouts.journal.frames import MAGIC, AlteredError, encode_frame, end_of, first_seed, read_frames

PAYLOADS = [b"one", b"", b"three and more", bytes(range(256)) * 3]


def segment(payloads=PAYLOADS, number=1):
    data, seed = MAGIC, first_seed(number)
    for payload in payloads:
        frame, seed = encode_frame(payload, seed)
        data += frame
    return data


def payloads_of(data, number=1):
    return [frame.payload for frame in read_frames(data, number)]


def test_frames_are_read_as_they_were_written():
    assert payloads_of(segment()) == PAYLOADS


def test_a_segment_that_is_torn_at_any_byte_has_the_frames_before_it():
    data = segment()
    ends = [end_of(frame) for frame in read_frames(data, 1)]
    for size in range(len(MAGIC), len(data)):
        assert payloads_of(data[:size]) == PAYLOADS[: sum(end <= size for end in ends)]


@pytest.mark.parametrize("bits", [0x01, 0x80, 0xFF])
def test_a_segment_with_any_altered_byte_is_refused(bits):
    data = segment()
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= bits
        with pytest.raises(AlteredError):
            payloads_of(bytes(altered))


def test_frames_cannot_be_removed_exchanged_or_moved_to_another_segment():
    data, (first, second, *_) = segment(), [*read_frames(segment(), 1)]
    a, b = data[first.start : end_of(first)], data[second.start : end_of(second)]
    rest = data[end_of(second) :]
    for wrong in (MAGIC + b + rest, MAGIC + b + a + rest, MAGIC + a + a + b + rest):
        with pytest.raises(AlteredError, match="does not match its checksum"):
            payloads_of(wrong)
    with pytest.raises(AlteredError, match="byte 16"):
        payloads_of(data, number=2)


def test_sectors_that_a_power_cut_left_as_zeros_are_a_torn_tail():
    data = segment([*PAYLOADS, b"x" * 5000])
    whole = end_of([*read_frames(data, 1)][-2])
    for start in range(-(-whole // 512) * 512, len(data), 512):
        assert payloads_of(data[:start] + bytes(len(data) - start)) == PAYLOADS
        with pytest.raises(AlteredError):  # something follows the zeros
            payloads_of(data[:start] + bytes(len(data) - start) + b"x")


def test_a_file_of_another_program_is_refused():
    with pytest.raises(AlteredError, match="another program wrote it"):
        payloads_of(b"SQLite format 3\0" + bytes(100))
