"""Messages of every kind, mutated."""

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from rollout_engine.frontend.wire import (
    Abort,
    AddRequest,
    Call,
    Encoder,
    Failure,
    Farewell,
    Heartbeat,
    Hello,
    Outputs,
    Refused,
    Rejected,
    Reply,
    RpcCall,
    Welcome,
    pack,
)
from rollout_engine.messages import EngineCoreOutputs, EngineCoreRequest, PromptLogprobs, SequenceEnd
from rollout_engine.sampling_params import SamplingParams
from tests.faults.peers import READY, Frames, RawClient


class Thrown(NamedTuple):
    """What `throw_mutants` did."""

    num_sent: int
    num_bad: int
    """Those that are no message, or not one for now: the core must reject and count each."""
    num_connections: int


def core_messages() -> list[Frames]:
    """What a client may say."""
    params = SamplingParams(n=2, stop_token_ids=[9], logit_bias={5: 1.0}, max_tokens=3)
    request = EngineCoreRequest(
        request_id="a", prompt_token_ids=[3, 4], params=params, max_tokens=3, seed=7, first_sequence=0, cache_salt="s"
    )
    return _frames_of(
        Hello(1),
        AddRequest(request),
        Abort(["a", "0_b"]),
        Call(7, "check_health", pack({})),
        Call(8, "score", pack(dict(prompt_token_ids=[[3]], completion_token_ids=[[4]], temperature=1.0))),
        RpcCall(9, "ping", pack([[1], {"x": 2}]), [np.zeros(3, np.uint8), np.zeros(3000, np.uint8)], 1.5),
    )


def client_messages() -> list[Frames]:
    """What a core may say."""
    columns = EngineCoreOutputs(1, [0, 1], [5, 6], [1, 1], [-0.5, -1.0], ended=[SequenceEnd(0, "stop", 2, "e")])
    columns.top_logprobs = np.zeros((2, 3), np.int32), np.zeros((2, 400), np.float32)
    columns.prompt_logprobs = {0: PromptLogprobs(np.zeros(5, np.float32))}
    return _frames_of(
        Welcome(0, READY),
        Outputs(0, columns),
        Refused("a", Failure("RequestError", "no", "n", "1")),
        Reply(7, pack([np.zeros(3, np.float32)]), arrays=[np.zeros(3000, np.uint8)]),
        Reply(8, failure=Failure("RPCError", "no", traceback="t", method="m", rank=0)),
        Rejected("?"),
        Heartbeat(),
        Farewell("bye"),
    )


def mutants(messages: list[Frames], count: int, choose: random.Random) -> Iterator[Frames]:
    """`count` of them, each changed at one to three places."""
    for _ in range(count):
        frames = [bytearray(frame) for frame in choose.choice(messages)]
        for _ in range(choose.randint(1, 3)):
            _mutate(frames, choose)
        yield [bytes(frame) for frame in frames]


def throw_mutants(directory: str, count: int, seed: int) -> Thrown:
    """Send mutants to the core that lives in `directory`, over several connections, and wait for every answer."""
    choose, num_sent, num_bad, num_connections = random.Random(seed), 0, 0, 0
    source = mutants(core_messages(), 2 * count, choose)
    while num_sent < count:
        num_connections += 1
        with RawClient(directory) as client:
            for _ in range(min(10_000, count - num_sent)):
                num_sent += client.throw(next(source))
            client.wait_rejected()
            assert not client.is_gone, "the core ended, or cut the client off"
            num_bad += client.num_bad
    return Thrown(num_sent, num_bad, num_connections)


def _mutate(frames: list[bytearray], choose: random.Random) -> None:
    frame = choose.choice(frames)
    match choose.randrange(6):
        case 0 | 1 if frame:
            frame[choose.randrange(len(frame))] = choose.randrange(256)
        case 2:
            del frame[choose.randrange(len(frame) + 1) :]
        case 3:
            frame.insert(choose.randrange(len(frame) + 1), choose.randrange(256))
        case 4:
            frames.append(bytearray(choose.randbytes(choose.randrange(30))))
        case 5 if len(frames) > 1:
            choose.shuffle(frames)


def _frames_of(*messages: Any) -> list[Frames]:
    encoder = Encoder()
    return [[bytes(frame) for frame in encoder.encode(message)] for message in messages]
