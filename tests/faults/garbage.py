"""Messages of every kind, mutated."""

import asyncio
import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

import sync
from rollout_engine import AsyncLLM, LifecycleError
from rollout_engine.base.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    IdLogprobs,
    PromptLogprobs,
    SequenceEnd,
    UpdateOptions,
)
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.children.failure import Failure
from rollout_engine.children.values import pack
from rollout_engine.engine.verbs import VERBS
from rollout_engine.process.weight_rendezvous import Rendezvous
from rollout_engine.process.weight_server import WEIGHT_VERBS
from rollout_engine.process.wire import (
    Abort,
    AddRequest,
    Call,
    Draining,
    Encoder,
    Farewell,
    Heartbeat,
    Hello,
    LiveVersion,
    Outputs,
    Refused,
    Rejected,
    Reply,
    Welcome,
)
from tests.faults.peers import READY, Frames, RawClient
from tests.faults.updates import spelling


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
        prompt_token_ids=[3, 4], params=params, max_tokens=3, seed=7, first_sequence_id=0, cache_salt="s"
    )
    manifest = sync.make_sender("inproc").offer({"a": torch.ones(3)}, 5, {})
    options, rendezvous = UpdateOptions(timeout=1.0), Rendezvous("shm", "/nowhere", 1.0)
    calls: dict[str, dict[str, Any]] = {
        "score": dict(prompt_token_ids=[[3]], completion_token_ids=[[4]], temperature=1.0),
        "pause_generation": dict(mode="keep", clear_cache=True),
        "sleep": dict(level=1, mode="keep"),
        "wake_up": dict(tags=["weights", "kv_cache"]),
        "reset_prefix_cache": dict(reset_running_requests=True),
        "begin_weight_update": dict(manifest=manifest, rendezvous=rendezvous, options=options),
        "stage_weights": dict(path="/nowhere", version=5, options=options),
    }
    plain = [
        name for name, verb in (VERBS | WEIGHT_VERBS).items() if set(verb.arguments.__struct_fields__) <= {"timeout"}
    ]
    return _frames_of(
        Hello(1),
        AddRequest(request),
        Abort([0, 1 << 40]),
        *(Call(7, name, *pack(calls.get(name, {}))) for name in [*plain, *calls]),
        Call(9, "collective_rpc", *pack(_rpc("ping", 1, np.zeros(3, np.uint8), np.zeros(9000), x=2)), 1.5),
    )


def client_messages() -> list[Frames]:
    """What a core may say."""
    columns = EngineCoreOutputs(1, [0, 1], [5, 6], [1, 1], [-0.5, -1.0], ended=[SequenceEnd(0, "stop", 2, "e")])
    columns.top_logprobs = np.zeros((2, 3), np.int32), np.zeros((2, 400), np.float32)
    columns.sampled_ranks = np.ones(2, np.int32)
    columns.routed_experts = np.zeros((2, 1, 2), np.uint8)
    columns.prompt_routed_experts = {0: np.zeros((4, 1, 2), np.uint8)}
    columns.id_logprobs = IdLogprobs.of({0: np.zeros(3, np.float32), 1: np.zeros(900, np.float32)})
    columns.prompt_logprobs = {0: PromptLogprobs(np.zeros(5, np.float32))}
    body, arrays = pack([np.zeros(3, np.float32), np.zeros(100_000, np.uint8)])
    return _frames_of(
        Welcome(0, READY),
        Outputs([columns]),
        Refused(3, Failure("RequestError", "no", "n", "1")),
        Reply(7, body, arrays=arrays),
        Reply(8, failure=Failure("RPCError", "no", traceback="t", method="m", rank=0)),
        Rejected("?"),
        LiveVersion(3),
        Heartbeat(),
        Draining("it received SIGTERM"),
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


async def restore(engine: AsyncLLM) -> None:
    """Run again, whatever mutants have brought about that were calls: pauses, sleep, an open update."""
    deadline = time.monotonic() + 60
    while True:
        try:
            await engine.wake_up()
            await engine.update_weights(spelling(engine.policy_version + 1))  # they may have been dropped
            return await engine.resume_generation()
        except LifecycleError as refusal:
            assert time.monotonic() < deadline, refusal
            await asyncio.sleep(0.01)


def _rpc(method: str, *args: Any, **kwargs: Any) -> dict[str, Any]:
    return dict(method=method, timeout=1.5, args=args, kwargs=kwargs)


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
