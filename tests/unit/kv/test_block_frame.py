"""Frames of blocks: no byte changes, and none stands in for another, unnoticed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_engine.kv.block_frame import HEADER_BYTES, DamagedBlock, make_header, open_frame
from tests.unit.kv.blocks import NAMESPACE, data, key

SPACE, KEY, DATA = bytes.fromhex(NAMESPACE), key(0), data(0, 300)
FRAME = make_header(SPACE, KEY, DATA) + DATA


@given(st.binary(max_size=600))
def test_a_frame_returns_its_data(content):
    frame = make_header(SPACE, KEY, content) + content
    assert len(frame) == HEADER_BYTES + len(content)
    assert open_frame(memoryview(frame), SPACE, KEY) == content


@pytest.mark.quick(80)
@pytest.mark.parametrize("place", range(len(FRAME)))
def test_a_damaged_byte_anywhere_is_noticed(place):
    for change in (1, 0x80, 0xFF):
        frame = bytearray(FRAME)
        frame[place] ^= change
        with pytest.raises(DamagedBlock):
            open_frame(memoryview(frame), SPACE, KEY)


@pytest.mark.quick(76)
@pytest.mark.parametrize("size", [*range(HEADER_BYTES + 1), len(FRAME) - 1])
def test_a_torn_frame_is_noticed(size):
    with pytest.raises(DamagedBlock, match="ends within|header states"):
        open_frame(memoryview(FRAME[:size]), SPACE, KEY)


def test_a_longer_frame_and_those_of_others_are_noticed():
    with pytest.raises(DamagedBlock, match="states 300 bytes, 301 follow"):
        open_frame(memoryview(FRAME + b"0"), SPACE, KEY)
    with pytest.raises(DamagedBlock, match="another one"):
        open_frame(memoryview(FRAME), SPACE, key(1))
    with pytest.raises(DamagedBlock, match="another one"):
        open_frame(memoryview(FRAME), bytes(16), KEY)
