"""Chunks of sequences and the states that they read and write."""

import numpy as np
import pytest

from rollout_engine.kernels.state_chunks import StateChunk, StateChunks

RIGHT = dict(
    token_starts=[0, 3, 7], sources=[5, -1], write_starts=[0, 2, 3], write_ends=[1, 3, 7], write_slots=[5, 0, 2]
)


def chunks(**changed):
    return StateChunks(**{name: np.array(each) for name, each in (RIGHT | changed).items()})


def test_they_are_read_one_at_a_time():
    found = chunks()
    assert (found.num_chunks, found.num_tokens, found.num_slots) == (2, 7, 6)
    assert list(found.each()) == [StateChunk(0, 3, 5, {1: 5, 3: 0}), StateChunk(3, 7, -1, {7: 2})]


def test_arrays_are_copies_that_cannot_be_changed():
    sources = np.array([5, -1])
    found = chunks(sources=sources)
    sources[0] = 4
    assert found.sources.tolist() == [5, -1] and found.sources.dtype == np.int64
    with pytest.raises(ValueError, match="read-only"):
        found.sources[0] = 1


def test_whole_sequences_start_from_zeros_and_write_nothing():
    found = StateChunks.whole([3, 0, 2])
    assert list(found.each()) == [StateChunk(0, 3, -1, {}), StateChunk(3, 3, -1, {}), StateChunk(3, 5, -1, {})]
    assert found.num_slots == 0
    assert StateChunks.whole([]).num_tokens == 0


def test_states_are_written_at_every_interval_inside_a_chunk():
    found = StateChunks.whole([3, 0, 8, 4, 5]).write_every(4)
    assert [chunk.writes for chunk in found.each()] == [{}, {}, {7: 0}, {}, {19: 1}]
    assert found.num_slots == 2


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"token_starts": [[0, 3, 7]]}, "token_starts should be integers in one dimension"),
        ({"sources": [5.0, -1.0]}, "sources should be integers"),
        ({"token_starts": [0, 7]}, "token_starts should have 3 elements"),
        ({"token_starts": [1, 3, 7]}, "token_starts should rise from 0"),
        ({"token_starts": [0, 8, 7]}, "token_starts should rise from 0"),
        ({"write_starts": [0, 2, 2]}, "write_starts should rise from 0 up to 3"),
        ({"write_ends": [1, 3]}, "write_ends should have 3 elements"),
        ({"sources": [5, -2]}, "sources should be slots or -1"),
        ({"write_slots": [5, -1, 2]}, "write_slots slots"),
        ({"write_ends": [0, 3, 7]}, "write_ends should lie behind a token of their own chunk"),
        ({"write_ends": [1, 4, 7]}, "write_ends should lie behind a token of their own chunk"),
        ({"write_ends": [1, 3, 8]}, "write_ends should lie behind a token of their own chunk"),
        ({"write_ends": [3, 3, 7]}, "write_ends should rise within a chunk"),
        ({"write_slots": [5, 2, 2]}, "slot 2 is written twice"),
        ({"sources": [5, 0]}, "slot 0 is"),
        ({"sources": [2, -1]}, "slot 2 is"),
    ],
)
def test_arrays_that_break_a_rule_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        chunks(**wrong)


def test_they_fit_values_and_a_pool():
    found = chunks()
    found.check(7, 6)
    for num_tokens, num_slots, message in ((8, 6, "8 tokens"), (7, 5, "below 5"), (7, None, "pass `states` too")):
        with pytest.raises(ValueError, match=message):
            found.check(num_tokens, num_slots)
    StateChunks.whole([7]).check(7, None)
