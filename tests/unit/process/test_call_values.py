"""Arguments and results of calls between processes: any value, arrays in place, nothing else."""

import msgspec
import numpy as np
import pytest
import torch

from rollout_engine.errors import RPCError, RPCTimeoutError
from rollout_engine.process.call_values import pack, unpack
from rollout_engine.process.wire import MAX_FRAME_BYTES, MAX_FRAMES, WireError, failure_of


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


def test_what_is_too_large_for_a_message_is_refused():
    too_large = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (MAX_FRAME_BYTES + 1,), (1,))
    frame, part = np.zeros(10_000), np.zeros(8000)  # each in a frame of its own; all in one
    num_parts = MAX_FRAME_BYTES // part.nbytes + 1
    for value in (
        np.ascontiguousarray(too_large),
        [frame] * MAX_FRAMES,
        [part] * num_parts,
        "x" * MAX_FRAME_BYTES,
    ):
        with pytest.raises(ValueError, match="a call carries fewer than 1024 arrays of 67108864 bytes at most"):
            pack(value)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        ext(1, "<f4", [2], 1, 0),  # of a frame that is not there
        ext(1, "<f4", [2], -1, 0),
        ext(3, "<f4", [2], 0, 0),  # of another kind
        ext(1, "<f4", [3], 0, 0),  # more than its bytes
        ext(1, "<f4", [1], 0, 8),  # beyond them
        ext(1, "<f4", [1], 0, -4),  # before them
        ext(1, "<f4", [1], 0, 2),  # between two numbers
        ext(1, "<f4", [-1, -2], 0, 0),
        ext(1, "<f4", [2**40, 2**40], 0, 0),
        ext(1, "|O", [1], 0, 0),
        ext(2, "float33", [2], 0, 0),
        ext(2, "float32", [[2]], 0, 0),
        ext(2, "float32", [2], 0),
        ext(2, 7, [2], 0, 0),
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
