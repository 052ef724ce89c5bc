"""Arguments and results of calls between processes: any value, arrays in place, nothing else."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from rollout_engine.base.errors import RPCError, RPCTimeoutError
from rollout_engine.children import values
from rollout_engine.children.failure import WireError, failure_of
from rollout_engine.children.values import pack, unpack
from sync.manifest import TensorSpec, WeightManifest


def round_trip(value):
    return unpack(*pack(value))


def ext(code, *form):
    return msgspec.msgpack.encode(msgspec.msgpack.Ext(code, msgspec.msgpack.encode(form)))


def test_plain_values_come_back_as_they_were():
    value = {"a": [1, 2.5, None, True, "text", b"bytes"], "b": {"c": []}, 7: -1}
    assert round_trip(value) == value
    assert round_trip((1, (2,))) == [1, [2]]


@pytest.mark.parametrize("dtype", "? i1 u1 <i2 <u2 <i4 <u4 <i8 <u8 <f2 <f4 <f8".split())
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (4, 5)])
def test_arrays_keep_dtype_shape_and_bits(dtype, shape):
    value = (np.random.default_rng(0).integers(0, 100, shape)).astype(dtype)
    back = round_trip({"x": [value]})["x"][0]
    assert back.dtype == value.dtype and back.shape == value.shape and back.tobytes() == value.tobytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (4, 5)])
def test_tensors_keep_dtype_shape_and_bits(dtype, shape):
    value = torch.randn(shape).to(dtype)
    back = round_trip([value])[0]
    assert back.dtype == dtype and torch.equal(back, value)


def test_strided_arrays_and_tensors_needing_gradients_travel_by_value():
    array, tensor = np.arange(12).reshape(3, 4).T, torch.ones(3, 4, requires_grad=True)
    back = round_trip([array, tensor.T])
    assert np.array_equal(back[0], array) and torch.equal(back[1], tensor.T) and not back[1].requires_grad


def test_large_arrays_are_not_copied_on_either_side():
    array, tensor = np.zeros(10_000), torch.zeros(20_000)
    body, arrays = pack([array, tensor])
    assert len(body) < 100
    back = unpack(body, arrays)
    array[5], tensor[6] = 1, 2
    assert back[0][5] == 1 and back[1][6] == 2


def test_tensors_from_memory_that_is_not_writable_are_copies():
    body, (content,) = pack([torch.ones(3)])
    content.flags.writeable = False
    assert unpack(body, [content])[0].add_(1).tolist() == [2, 2, 2]


@pytest.mark.parametrize("value", [print, object(), np.array(["a"]), np.array([object()]), np.zeros(2, ">f4"), {1, 2j}])
def test_what_has_no_place_is_refused_before_it_is_sent(value):
    with pytest.raises(TypeError, match="has no place in a call between processes"):
        pack([value])


SPECS = [TensorSpec(f"layers.{i}.weight", (i, 3), "float32", f"{i:032x}") for i in range(2000)]


@pytest.mark.parametrize(
    "value",
    [
        [*range(-5, 100_000)],
        [2**40 + i for i in range(20_000)],
        [i / 7 for i in range(20_000)],
        [[*range(i % 7)] for i in range(20_000)],
        [[i / 7] for i in range(20_000)],
        [[*range(100_000)], [], [3]],
        "é" * 70_000,
        b"\xff" * 100_000,
        [f"é{i}" for i in range(20_000)],
        {"a": {"b": ["x" * 70_000, 1, None, [*range(20_000)]]}},
        [[*range(40_000)], ["text"]],
    ],
    ids=lambda value: f"{value!r:.20}",
)
def test_long_values_come_back_as_they_were_and_are_short_beside_their_arrays(value):
    body, arrays = pack(value)
    assert len(body) < 1000 and arrays
    assert unpack(body, arrays) == value


def test_long_lists_of_structs_come_back_as_dicts_and_as_structs():
    manifest = WeightManifest.of(3, SPECS, [["layers.0.weight", "head"]])
    body, arrays = pack({"manifest": manifest})
    assert len(body) < 1000
    assert msgspec.convert(unpack(body, arrays)["manifest"], WeightManifest) == manifest
    assert unpack(*pack({"manifest": manifest}), dict[str, Any])["manifest"]["tensors"][7]["shape"] == [7, 3]


@pytest.mark.parametrize(
    "value", [[True] * 70_000, [1, 2.0] * 20_000, [2**63] * 20_000, [None] * 70_000, [[1], "a"] * 20_000]
)
def test_lists_of_other_things_stay_as_they_are(value):
    assert round_trip(value) == value


def test_more_numbers_than_a_core_would_decode_are_refused_before_they_are_sent(monkeypatch):
    monkeypatch.setattr(values, "_MAX_OBJECTS", 100_000)
    assert round_trip([*range(100_000)]) == [*range(100_000)]
    with pytest.raises(ValueError, match="a list has 100001 numbers, and lists may have 100000; give arrays"):
        pack([[*range(100_000)], [1]])


@pytest.mark.parametrize(
    "value",
    [[*range(40_000)], "x" * 400_000, b"x" * 400_000, ["xy"] * 40_000, SPECS],
    ids=lambda value: f"{value!r:.9}",
)
def test_arrays_that_are_referred_to_again_and_again_do_not_fill_the_memory(value, monkeypatch):
    body, arrays = pack([value, None])
    again = b"\xdc\x00\x10" + 16 * bytes(body)[1:-1]
    assert len(unpack(again, arrays)) == 16
    monkeypatch.setattr(values, "_MAX_OBJECTS", 200_000)
    assert len(unpack(body, arrays)) == 2
    with pytest.raises(WireError, match="more than 200000 numbers"):
        unpack(again, arrays)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        ext(1, ["<f4", [2], 1, 0]),  # of a frame that is not there
        ext(1, ["<f4", [2], -1, 0]),
        ext(3, ["<f4", [2], 0, 0]),  # of another kind
        ext(1, ["<f4", [3], 0, 0]),  # more than its bytes
        ext(1, ["<f4", [1], 0, 8]),  # beyond them
        ext(1, ["<f4", [1], 0, -4]),  # before them
        ext(1, ["<f4", [1], 0, 2]),  # between two numbers
        ext(1, ["<f4", [-1, -2], 0, 0]),
        ext(1, ["<f4", [2**40, 2**40], 0, 0]),
        ext(1, ["|O", [1], 0, 0]),
        ext(2, ["float33", [2], 0, 0]),
        ext(2, ["float32", [[2]], 0, 0]),
        ext(2, ["float32", [2], 0]),
        ext(2, [7, [2], 0, 0]),
        ext(1, ["<f4", [2], 0, 0], ["<f4", [2], 0, 0]),
        ext(1),
        ext(3, ["|u1", [8], 0, 0]),  # lists of such numbers are made by nobody
        ext(3, ["<i4", [1, 2], 0, 0]),
        ext(3, ["<i4", [2], 0, 0], ["<i8", [1], 0, 0]),
        ext(3, ["<i4", [2], 0, 0], ["<i4", [1], 0, 0]),  # lengths of other lists
        ext(4, ["<i4", [2], 0, 0]),
        ext(5, ["<f8", [1], 0, 0], ["<i4", [1], 0, 0]),
        ext(6, [1, 2]),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(6, msgspec.msgpack.encode({"a": [1], "b": [1, 2]}))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(6, msgspec.msgpack.encode({"a": 1}))),
        msgspec.msgpack.encode(msgspec.msgpack.Ext(6, msgspec.msgpack.encode({"a": "text"}))),
        b"\x91" * 100_000 + b"\xc0",
    ],
)
def test_what_is_no_value_is_refused_whole(body):
    with pytest.raises(WireError):
        unpack(body, [np.zeros(8, np.uint8)])


def test_a_value_of_another_type_is_refused_by_name():
    with pytest.raises(WireError, match=r"Expected `int`, got `str` - at `\$\[1\]`"):
        unpack(*pack([1, "2"]), list[int])
    with pytest.raises(WireError, match="ndarray"):
        unpack(*pack([1, 2]), np.ndarray)


@pytest.mark.parametrize("numbers", [[], [np.zeros(7, np.int8)], [np.zeros(5, np.int8), np.zeros(70_000, np.float32)]])
def test_small_arrays_share_a_frame_and_begin_where_numbers_of_any_size_may(numbers):
    small = [np.full(n, n, np.float64) for n in range(2000)]
    body, arrays = pack([numbers, small])
    assert len(arrays) == 1 + sum(array.nbytes > 1 << 16 for array in numbers)
    back, back_small = unpack(body, arrays)
    assert all(np.array_equal(a, b) for a, b in zip([*back, *back_small], [*numbers, *small], strict=True))
    assert all(array.flags.aligned for array in back_small)


@pytest.mark.parametrize("kind", [RPCError, RPCTimeoutError])
def test_errors_of_calls_keep_method_rank_and_traceback(kind):
    error = failure_of(kind("it failed", method="m", rank=2, traceback="lines")).as_error("other")
    assert type(error) is kind
    assert (str(error), error.method, error.rank, error.traceback) == ("it failed", "m", 2, "lines")
