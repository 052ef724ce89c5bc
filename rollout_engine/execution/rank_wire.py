"""Messages between rank 0 and another rank of an engine: both ends in one file.

life    RankSettings  ──>        once
        <── Joined               once
        <── Started | Failure    once it is loaded, or if it fails; the system closes the socket when either ends
steps   Step | ...  ──>          no answer: the ranks meet in their computation; a picture crosses before a step
calls   Call  ──>                one at a time
        <── Answer(Done | Failure)     each, with the number of its call
pulse   <── bytes                signs of life (`rank_pulse`)
"""

import msgspec
import torch

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.messages import SchedulerOutput
from rollout_engine.children.failure import Failure
from rollout_engine.execution.made_with import arithmetic_of, device_id
from rollout_engine.model.ranks.part import Region
from sync.described_types import describe_types

NUM_SOCKETS = 4
"""Sockets of a rank: its life, its steps, its calls and its pulse."""
MAX_BYTES = 1 << 40
"""Bytes of one message at most: it may hold parts of models."""


class RankSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings by which another rank loads its part."""

    rank: int
    config: EngineConfig
    num_threads: int
    log_level: int
    import_path: list[str]
    meeting: str | None = None
    """Address at which ranks on several machines meet; None: they share memory."""
    rendezvous: str | None = None
    """Address of the group of their devices, or of CPUs that share no memory; None without one."""


class Joined(msgspec.Struct, tag=True, frozen=True):
    """The rank has read its settings, and begins to load."""

    arithmetic: dict[str, str]
    """Facts that its bits depend on, by `made_with.arithmetic_of`."""
    device: str
    """Id of its GPU among all machines; "" for a CPU."""

    @classmethod
    def of(cls, device: torch.device) -> "Joined":
        """The message of a rank that computes on this device."""
        return cls(arithmetic_of(device), device_id(device))


class Started(msgspec.Struct, tag=True, frozen=True):
    """The rank has loaded its part."""

    regions: dict[str, Region]
    """Name of a weight -> the elements of it that are the rank's."""


class Step(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A step, of which rank 0 alone draws."""

    work: SchedulerOutput
    """New sequences are without the fields that only draws need, and their pictures without arrays."""
    token_ids: bytes
    """int64: those of the flat batch."""
    serial: int = -1
    """That of its forward, if there are several stages."""


class TakePicture(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Keep a picture, to which the next step refers by its digest."""

    digest: bytes
    arrays: bytes
    """The arrays, packed by `pack_value`."""


class ForgetPictures(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Forget the pictures that are kept for later steps."""


class TakeLogits(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Compute rows of the last step's logits."""

    rows: list[int]


class BeginScore(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A score, to be known by a number; arguments of `Backend.score` as `pack_value` writes them."""

    number: int
    arguments: bytes


class ScorePiece(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Compute the next piece of a score."""

    number: int
    serial: int = -1
    """That of its forward, if there are several stages."""


class EndScore(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Forget a score."""

    number: int


class Meet(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Meet rank 0 on the host, once all messages before are launched."""


StepMessage = Step | TakePicture | ForgetPictures | TakeLogits | BeginScore | ScorePiece | EndScore | Meet


class Done(msgspec.Struct, tag=True, frozen=True):
    """A call's result, as `pack_value` writes it."""

    value: bytes = b"\x92\xc0\x90"


class Call(msgspec.Struct, frozen=True):
    """A call of a method of `RankWorker`."""

    number: int
    method: str
    arguments: msgspec.Raw
    """By name."""


class Answer(msgspec.Struct, frozen=True):
    """The answer to call `number`."""

    number: int
    result: Done | Failure


describe_types(RankSettings, Joined | Failure, Started | Failure, StepMessage, Call, Answer)
