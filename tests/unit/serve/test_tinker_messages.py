"""Tinker's messages on the wire."""

import random

import numpy as np
import pytest

from rollout_engine.base.errors import RequestError
from rollout_engine.serve.problems import HttpProblem
from rollout_engine.serve.tinker.messages import pass_message, read_pass
from rollout_engine.serve.tinker.protobuf import bytes_field, double_field, number_field, read_message, read_varints

from .tinker_client import example, fields

INPUTS = {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 0.5]}


def request(data, **more):
    """The bytes of a pass over one example."""
    config = bytes_field(7, bytes_field(1, b"low") + bytes_field(2, double_field(1, 0.25)))
    return bytes_field(1, b"m") + number_field(2, 3) + bytes_field(3, data) + bytes_field(4, b"ppo") + config


def test_fields_are_read_as_they_were_written():
    data = number_field(1, 300) + bytes_field(2, b"abc") + double_field(3, 1.5) + number_field(4, -1)
    assert [number for number, _ in read_message(memoryview(data))] == [1, 2, 3, 4]
    assert fields(data)[1] == [300] and fields(data)[2] == [b"abc"] and fields(data)[4] == [2**64 - 1]
    assert data.startswith(b"\x08\xac\x02\x12\x03abc\x19")  # as the specification spells 300 and a text
    assert read_varints(memoryview(b"\x03\xac\x02")) == [3, 300]


def test_a_pass_is_read():
    found = read_pass(request(example([1, 2, 3], INPUTS)))
    assert (found.model_id, found.seq_id, found.loss_fn, found.config) == ("m", 3, "ppo", {"low": 0.25})
    [read] = found.examples
    assert read.token_ids.tolist() == [1, 2, 3] and read.token_ids.dtype == np.int64
    assert {name: array.tolist() for name, array in read.inputs.items()} == INPUTS
    assert read.inputs["weights"].dtype == np.float32


@pytest.mark.parametrize(
    "data, said",
    [
        (example([], {}), r"data\[0\].model_input"),
        (example([1, 2], {"weights": [1.0, 2.0, 3.0]}), r"weights.*\[2\]"),
        (bytes_field(1, bytes_field(2, b"png")), "image"),
        (bytes_field(2, bytes_field(1, b"weights") + bytes_field(2, bytes_field(2, b""))), "sparse"),
        (bytes_field(2, bytes_field(1, b"weights") + bytes_field(2, number_field(3, 4))), "dtype 4"),
        (
            bytes_field(2, bytes_field(1, b"weights") + bytes_field(2, bytes_field(1, b"abc") + number_field(3, 1))),
            "multiple of 4",
        ),
    ],
)
def test_an_example_that_is_not_computed_is_refused_by_its_place(data, said):
    with pytest.raises(RequestError, match=said):
        read_pass(request(data))


def test_bytes_that_are_no_message_are_refused():
    whole, draws = request(example([1, 2, 3], INPUTS)), random.Random(0)
    for _ in range(300):
        broken = bytearray(whole[: draws.randrange(1, len(whole) + 1)])
        broken[draws.randrange(len(broken))] = draws.randrange(256)
        try:
            read_pass(bytes(broken))
        except (HttpProblem, RequestError) as problem:
            assert str(problem)


def test_results_have_an_array_of_each_example():
    arrays = {"logprobs": [np.float32([1, 2]), np.float32([3])]}
    found = fields(pass_message(arrays, {"loss:sum": 1.5}))
    record = fields(found[2][0])
    batched = fields(fields(record[2][0])[2][0])
    assert record[3] == [2] and np.frombuffer(batched[1][0], "<f4").tolist() == [1, 2, 3]
    assert np.frombuffer(batched[2][0], "<i8").tolist() == [0, 8, 12] and batched[3] == [1]
    assert fields(found[3][0]) == fields(bytes_field(1, b"loss:sum") + double_field(2, 1.5))
