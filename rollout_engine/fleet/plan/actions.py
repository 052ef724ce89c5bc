"""Decisions of a fleet's brain, for others to carry out."""

from typing import NamedTuple

from rollout_engine.base.messages import EngineCoreRequest, SequenceEnd


class Start(NamedTuple):
    """Start a replica's engine at the time `at`."""

    replica: int
    at: float


class CatchUp(NamedTuple):
    """Give a replica the newest weights at the time `at`."""

    replica: int
    at: float


class Send(NamedTuple):
    """Send a request to a replica."""

    replica: int
    request: EngineCoreRequest


class Abort(NamedTuple):
    """End sequences that a replica has."""

    replica: int
    sequence_ids: list[int]


class Stop(NamedTuple):
    """End a replica's engine."""

    replica: int
    answers_first: bool = False
    """Let it answer the calls that it has got: others have taken its place, and it has not failed."""


class Tell(NamedTuple):
    """Report ends of sequences to the user: no replica will report them."""

    ended: list[SequenceEnd]


class Fail(NamedTuple):
    """Report to the user that no replica is left: every request fails."""

    reason: str


Action = Start | CatchUp | Send | Abort | Stop | Tell | Fail
