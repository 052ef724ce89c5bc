"""Messages between a client and a core: they arrive as they were sent, and nothing else is a message."""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout_engine.base import errors
from rollout_engine.base.errors import LifecycleError, RequestError, RPCError
from rollout_engine.base.messages import EngineCoreOutputs, EngineCoreRequest, IdLogprobs, SequenceEnd
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.children.failure import Failure, WireError, failure_of
from rollout_engine.children.values import pack, unpack
from rollout_engine.process import wire
from rollout_engine.process.wire import (
    Abort,
    AddRequest,
    Call,
    Decoder,
    Encoder,
    Hello,
    Outputs,
    Refused,
    Reply,
    Welcome,
)
from tests.faults.peers import READY

BIG, SMALL = np.arange(3000, dtype=np.float32).reshape(100, 30), np.arange(6, dtype=np.int32).reshape(2, 3)


def request(**changes):
    fields = dict(
        prompt_token_ids=[3, 4],
        params=SamplingParams(n=2, stop=["x"]),
        max_tokens=5,
        seed=2**64 - 1,
        first_sequence_id=0,
    )
    return EngineCoreRequest(**(fields | changes))


def sample_messages():
    to_core = [
        Hello(1), AddRequest(request()), Abort([0, 1 << 40]), Call(7, "score", *pack({"x": [1.5, BIG]}), 1.5),
        wire.Goodbye(),
    ]  # fmt: skip
    columns = EngineCoreOutputs(1, [0, 1], [5, 6], [1, 1], [-0.5, -1.0], ended=[SequenceEnd(0, "stop", 2)])
    columns.top_logprobs = (SMALL, BIG)
    columns.sampled_ranks = np.array([1, 7], np.int32)
    columns.routed_experts = np.arange(8, dtype=np.int16).reshape(2, 2, 2)
    columns.prompt_routed_experts = {0: np.zeros((300, 2, 8), np.uint8)}
    columns.id_logprobs = IdLogprobs.of({0: BIG[0], 1: BIG.ravel()})
    body, arrays = pack([SMALL, BIG])
    to_client = [
        Welcome(1, READY), Outputs([columns]), Refused(3, Failure("RequestError", "no", "n", "1")),
        Reply(7, body, arrays=arrays), Reply(8, failure=Failure("LifecycleError", "no")), wire.Rejected("?"),
        wire.LiveVersion(3), wire.Heartbeat(), wire.Farewell("bye"),
    ]  # fmt: skip
    return [(wire.ToCore, message) for message in to_core] + [(wire.ToClient, message) for message in to_client]


def with_array(array=BIG):
    outputs = EngineCoreOutputs(1, [0], [5], [1], [-0.5])
    outputs.top_logprobs = (SMALL, array)
    return Outputs([outputs])


def frames_of(message):
    return [bytes(frame) for frame in Encoder().encode(message)]


def same(a, b):
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, msgspec.Struct):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__struct_fields__)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return bytes(a) == bytes(b) if isinstance(a, msgspec.Raw) else a == b


@pytest.mark.parametrize(("union", "message"), sample_messages(), ids=lambda value: type(value).__name__)
def test_messages_arrive_as_they_were_sent(union, message):
    assert same(Decoder(union).decode(frames_of(message)), message)


def test_large_arrays_travel_beside_the_struct_without_a_copy():
    first, beside = Encoder().encode(with_array(array := np.zeros((1, 9000), np.float32)))
    assert len(first) < 500
    array.view(np.uint8)[0, 0] = 1
    assert beside[0] == 1
    [step] = Decoder(wire.ToClient).decode([bytes(first), frame := bytes(beside)]).steps
    _, received = step.top_logprobs
    assert np.shares_memory(received, np.frombuffer(frame, np.uint8)) and not received.flags.writeable


def test_the_buffer_of_the_first_frame_is_used_again():
    encoder = Encoder()
    assert encoder.encode(Abort(["a"]))[0] is encoder.encode(Abort(["b" * 50]))[0]


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"garbage"],
        [msgspec.msgpack.encode({"type": "nobody"})],
        [msgspec.msgpack.encode({"type": "hello", "protocol": 1, "more": 2})],
        [msgspec.msgpack.encode({"type": "hello", "protocol": "1"})],
        [msgspec.msgpack.encode({"type": "hello"})],
        [frames_of(Hello(1))[0] + b"\0"],
        [frames_of(AddRequest(request()))[0][:-3]],
        [frames_of(Hello(1))[0], b"a frame too many"],
        frames_of(with_array())[:1],
        frames_of(with_array())[::-1],
        [frames_of(with_array())[0], frames_of(with_array())[1][:-1]],
        [b"\xdd\xff\xff\xff\xff"],
        [b"\x91" * 100_000],
        [frames_of(Hello(1))[0], *[b""] * 2000],
    ],
)
def test_what_is_no_message_is_refused(frames):
    for union in (wire.ToCore, wire.ToClient):
        with pytest.raises(WireError):
            Decoder(union).decode(frames)


@pytest.mark.parametrize(
    "array",
    [
        ["<f4", [2], b"1234"], ["<f4", [-1], b""], ["<f4", [2**62, 4], b""], ["|O", [1], b"12345678"], ["<f4", [1], 1],
        ["<f4", [1], -1], [["<f4"], [1], b"1234"], "<f4", ["<f4", [1.0], b"1234"], ["<f4", [1] * 9, b"1234"],
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_their_bytes_are_refused(array):
    with pytest.raises(WireError):
        Decoder(wire.ToClient).decode([msgspec.msgpack.encode({"type": "reply", "number": 1, "arrays": [array]})])


@pytest.mark.parametrize("value", [print, object(), np.array([None]), np.zeros(2, complex)])
def test_what_has_no_place_on_the_wire_raises_before_it_is_sent(value):
    with pytest.raises(TypeError, match="no place in a message"):
        Encoder().encode(Reply(1, arrays=[value]))


def test_errors_arrive_as_what_they_are():
    refused = failure_of(RequestError.for_field("n", 0, "at least 1")).as_error()
    assert isinstance(refused, RequestError) and (refused.field, refused.bound) == ("n", "at least 1")
    assert type(failure_of(LifecycleError("not now")).as_error()) is LifecycleError
    met = failure_of(ZeroDivisionError("division by zero")).as_error("score")
    assert type(met) is RPCError and (met.method, met.traceback) == ("score", "ZeroDivisionError: division by zero\n")
    assert "score: ZeroDivisionError: division by zero" in str(met)


@pytest.mark.parametrize("name", [name for name, value in vars(errors).items() if isinstance(value, type)])
def test_every_error_can_travel(name):
    assert str(Failure(name, "text").as_error()).endswith("text")


def mutate(random_, frames):
    frames = [bytearray(frame) for frame in frames]
    for _ in range(random_.randint(1, 3)):
        frame = frames[random_.randrange(len(frames))] if frames else bytearray()
        match random_.randrange(6):
            case 0 if frame:
                frame[random_.randrange(len(frame))] = random_.randrange(256)
            case 1:
                del frame[random_.randrange(len(frame) + 1) :]
            case 2:
                frame.extend(random_.randbytes(random_.randint(1, 9)))
            case 3:
                random_.shuffle(frames)
            case 4:
                frames.append(bytearray(random_.randbytes(random_.randrange(30))))
            case 5 if frames:
                frames.pop(random_.randrange(len(frames)))
    return [bytes(frame) for frame in frames]


def decode_mutants(count):
    """How many of `count` mutated messages decode; anything but a message or a `WireError` fails."""
    random_, num_decoded = random.Random(7), 0
    samples = [(Decoder(union), frames_of(message)) for union, message in sample_messages()]
    for _ in range(count):
        decoder, frames = random_.choice(samples)
        try:
            message = decoder.decode(mutate(random_, frames))
            if isinstance(message, Call):
                unpack(message.arguments, message.arrays, dict[str, Any])
            num_decoded += 1
        except WireError:
            pass
    return num_decoded


def test_mutated_messages_decode_or_raise_one_error():
    assert 0 < decode_mutants(8_000) < 8_000


@pytest.mark.slow
def test_a_million_mutated_messages_decode_or_raise_one_error():
    assert 0 < decode_mutants(1_000_000) < 1_000_000


@pytest.mark.parametrize(
    "sequences, widths, sizes",
    [([0], [3], [2]), ([0], [3], []), ([0, 1], [3], [3]), ([0, 1], [2, 2], [3, 1]), ([0], [0], [0]), ([0], [-1], [])],
)
def test_log_probs_of_ids_that_do_not_fit_their_sequences_are_no_message(sequences, widths, sizes):
    outputs = EngineCoreOutputs(1, [0], [5], [1], id_logprobs=IdLogprobs.of({0: BIG[0]}))
    outputs.id_logprobs.sequence_ids, outputs.id_logprobs.widths = sequences, widths
    outputs.id_logprobs.pieces = [np.zeros(size, np.float32) for size in sizes]
    with pytest.raises(WireError, match="do not fit each other"):
        Decoder(wire.ToClient).decode(frames_of(Outputs([outputs])))


def test_log_probs_of_ids_take_few_frames_none_too_long(monkeypatch):
    monkeypatch.setattr("rollout_engine.base.sequence_rows._PIECE_VALUES", 2000)
    rows = {number: np.full(1 + number % 1500, number, np.float32) for number in range(3000)}
    rows[9999] = np.zeros(5000, np.float32)
    outputs = EngineCoreOutputs(1, id_logprobs=IdLogprobs.of(rows))
    frames = frames_of(Outputs([outputs]))
    assert max(map(len, frames[1:])) == 20_000
    monkeypatch.setattr(wire, "MAX_FRAMES", len(frames))
    [step] = Decoder(wire.ToClient).decode(frames).steps
    received = dict(step.id_logprobs.rows())
    assert received.keys() == rows.keys()
    assert all(np.array_equal(received[number], row) for number, row in rows.items())
