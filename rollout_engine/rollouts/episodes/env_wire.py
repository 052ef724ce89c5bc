"""Messages between this process and a worker that plays environments.

A reply has the number of the order that it answers, and the id of the process that wrote it: a fork of an environment
may hold the same end of the channel.
"""

import os

import msgspec

from envs_adapters.base import Action, Observation
from rollout_engine.rollouts.episodes.env_host import Began
from rollout_engine.rollouts.episodes.factory_reference import FactoryReference
from rollout_engine.rollouts.episodes.observations import plain_data

MAX_REPLY_BYTES = 1 << 26


class Load(msgspec.Struct, tag=True):
    """Import the factory. First in each process."""

    reference: FactoryReference


class Reset(msgspec.Struct, tag=True):
    """Make the environment of an episode and reset it."""

    key: int
    seed: int


class Step(msgspec.Struct, tag=True):
    """Step the environment of an episode."""

    key: int
    action: Action


class Close(msgspec.Struct, tag=True):
    """Close the environment of an episode and forget it."""

    key: int


class Reuse(msgspec.Struct, tag=True):
    """Continue with another rollout; fails if a new process would differ from this one."""


class End(msgspec.Struct, tag=True):
    """End the process; the only order without a reply."""


Order = Load | Reset | Step | Close | Reuse | End


class NumberedOrder(msgspec.Struct):
    """An order as it is sent."""

    number: int
    order: Order


class Reply(msgspec.Struct):
    """The result of an order; empty if it has none."""

    began: Began | None = None
    observation: Observation | None = None
    failure: str = ""
    """Why there is neither, on one line."""
    number: int = 0
    """Number of the order that it answers."""
    pid: int = 0
    """Process id of the worker that answers."""


_encoder = msgspec.msgpack.Encoder()


def encode_order(number: int, order: Order) -> bytes:
    """Encode an order. Arguments that a policy has written and msgpack cannot carry become plain data."""
    try:
        return _encoder.encode(NumberedOrder(number, order))
    except (OverflowError, ValueError, RecursionError):
        if not isinstance(order, Step):
            raise
    calls = [
        msgspec.structs.replace(call, name=plain_data(call.name), arguments=plain_data(call.arguments))
        for call in order.action.tool_calls
    ]
    plain = Step(order.key, msgspec.structs.replace(order.action, tool_calls=calls))
    return _encoder.encode(NumberedOrder(number, plain))


def encode_reply(reply: Reply, number: int) -> bytes:
    """Encode this process's reply to order `number`; `info` and messages become plain data.

    Raises `ValueError` for one that is too long.
    """
    reply.number, reply.pid = number, os.getpid()
    observation = reply.observation if reply.began is None else reply.began.observation
    if observation is not None:
        observation.info, observation.messages = plain_data(observation.info), plain_data(observation.messages)
    if reply.began is not None:
        reply.began.tools = plain_data(reply.began.tools)
    frame = _encoder.encode(reply)
    if len(frame) > MAX_REPLY_BYTES:
        raise ValueError(f"info makes an observation of {len(frame)} bytes: {MAX_REPLY_BYTES} are the most allowed")
    return frame
