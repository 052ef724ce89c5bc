"""Messages between rank 0 and another rank of an engine: both ends in one file.

life    RankSettings  ──>        once
        <── Joined               once
        <── Started | Failed     once it is loaded, or where it fails; the system closes the socket when either ends
steps   Forward | ...  ──>       no answer: the ranks meet in what they compute
calls   Call(StartWeights | ...) ──>   one at a time
        <── Answer(Done | Failed)      each, with the number of its call
pulse   <── bytes                signs of life (`rank_pulse`)
"""

import socket
from traceback import format_exception

import msgspec
import torch

from rollout_engine.base import errors
from rollout_engine.base.config import EngineConfig
from rollout_engine.children import channel
from rollout_engine.execution.made_with import arithmetic_of, device_id
from rollout_engine.execution.rank_values import RowsBytes
from rollout_engine.model.ranks.part import Region
from sync.described_types import describe_types

_MAX_BYTES = 1 << 40


class RankSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What another rank needs to load its part."""

    rank: int
    config: EngineConfig
    num_threads: int
    log_level: int
    import_path: list[str]
    meeting: str | None = None
    """Where ranks on several machines find one another; None: they share memory."""
    rendezvous: str | None = None
    """Where the group of their devices, or of CPUs that share no memory, forms; None without one."""


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


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The class of an error, and its text."""

    kind: str
    text: str
    method: str = ""
    traceback: str = ""
    rank: int | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Failed":
        """The failure that `error` is."""
        if isinstance(error, errors.RPCError):
            return cls(type(error).__name__, str(error), error.method, error.traceback, error.rank)
        if isinstance(error, errors.RolloutEngineError):
            return cls(type(error).__name__, str(error))
        lines = "".join(format_exception(error))
        return cls(type(error).__name__, errors.error_text(error), traceback=lines)

    def as_error(self, rank: int, method: str) -> Exception:
        """The error of a call of `method`, as rank 0 raises it: the rank lives on."""
        text = f"rank {rank}: {self.text.rstrip('.')}."
        return self._as_ours() or errors.RPCError(text, method=method, rank=rank, traceback=self.traceback)

    def as_death(self, rank: int) -> Exception:
        """The error by which a rank has ended."""
        return self._as_ours() or errors.EngineDeadError(f"rank {rank} failed: {self.text}")

    def _as_ours(self) -> Exception | None:
        """An error of this library; None for any other."""
        kind = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, errors.RolloutEngineError)):
            return None
        if issubclass(kind, errors.RPCError):
            return kind(self.text, method=self.method, rank=self.rank, traceback=self.traceback)
        return kind(self.text)


class Forward(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A step: arrays of `FlatBatch`, the rows whose logits are wanted and those that have adapters, as bytes."""

    token_ids: bytes
    first_positions: bytes
    token_starts: bytes
    blocks: bytes
    block_starts: bytes
    logit_rows: bytes
    adapter_rows: RowsBytes | None


class ForwardDense(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Whole sequences, int64 [num_rows, T], without the KV pool.

    `experts`: where routers send their tokens, int16 [num_rows * T, L, k].
    """

    input_ids: bytes
    num_rows: int
    adapter_rows: RowsBytes | None
    experts: bytes | None
    experts_shape: tuple[int, ...]


class Head(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Hidden states whose logits are wanted."""

    states: bytes
    shape: tuple[int, ...]
    dtype: str


class CopyBlocks(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Blocks of the KV pool to copy: (source, destination)."""

    pairs: list[tuple[int, int]]


class ForwardOnDevice(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """A step on devices; the tensors of its batch, of these forms, follow by the exchange."""

    forms: list[tuple[str, tuple[int, ...]]]
    num_decodes: int
    pool: int
    has_adapters: bool
    is_routed: bool


class HeadOnDevice(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Hidden states of this form follow by the exchange; their logits are wanted."""

    form: tuple[str, tuple[int, ...]]


class CaptureGraph(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Capture a CUDA graph of decode-only steps, by its size and variant."""

    size: int
    has_prefixes: bool
    has_adapters: bool
    is_first: bool
    """All earlier ones are void."""


class ReplayGraph(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Replay it."""

    size: int
    has_prefixes: bool
    has_adapters: bool


class OpenPool(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Make a KV pool beside that of steps."""

    pool: int
    num_blocks: int


class ClosePool(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Free it."""

    pool: int


class Meet(msgspec.Struct, tag=True, frozen=True, array_like=True):
    """Meet rank 0 on the host, once all that was told before has been launched."""


StepMessage = (
    Forward
    | ForwardDense
    | Head
    | CopyBlocks
    | ForwardOnDevice
    | HeadOnDevice
    | CaptureGraph
    | ReplayGraph
    | OpenPool
    | ClosePool
    | Meet
)


class PrepareWeights(msgspec.Struct, tag=True, frozen=True):
    """Take memory of weights back."""


class StartWeights(msgspec.Struct, tag=True, frozen=True):
    """`WeightHolder.start`."""

    inplace: bool
    carried: list[str] | None


class StageWeights(msgspec.Struct, tag=True, frozen=True):
    """Stage what is yours of elements [start, stop) of a weight, which are in the window."""

    name: str
    start: int
    stop: int
    inplace: bool
    content: bytes | None = None
    """The bytes of what is yours, for a rank whose window is its own."""


class ReadWeights(msgspec.Struct, tag=True, frozen=True):
    """Write what is yours of elements [start, stop) of a live weight into the window.

    The result is None, or the bytes of what is yours where the window is your own.
    """

    name: str
    start: int
    stop: int


class PackWeights(msgspec.Struct, tag=True, frozen=True):
    """`WeightHolder.pack`."""

    inplace: bool
    names: list[str]


class CommitWeights(msgspec.Struct, tag=True, frozen=True):
    """`WeightHolder.commit`."""


class SettleWeights(msgspec.Struct, tag=True, frozen=True):
    """`WeightHolder.settle`."""


class ReleaseKV(msgspec.Struct, tag=True, frozen=True):
    """Give the memory of all KV back."""


class ReleaseWeights(msgspec.Struct, tag=True, frozen=True):
    """Free copies of weights; `forget`: the weights too."""

    forget: bool


class RestoreWeights(msgspec.Struct, tag=True, frozen=True):
    """Undo `ReleaseWeights(forget=False)`."""


class WriteShard(msgspec.Struct, tag=True, frozen=True):
    """Write your live weights to your file in a directory; the result are their specs."""

    directory: str


class PrepareAdapter(msgspec.Struct, tag=True, frozen=True):
    """Lay out your rows of an adapter, to be known by a number: `LinearAdapter`s by name, as `pack_value` writes."""

    number: int
    linears: bytes
    gone: list[int]
    """Numbers of adapters that will not be installed any more."""


class InstallAdapter(msgspec.Struct, tag=True, frozen=True):
    """Put the adapter that was prepared under a number into a slot."""

    slot: int
    number: int


class RemoveAdapter(msgspec.Struct, tag=True, frozen=True):
    """Take the adapter out of a slot."""

    slot: int


class CallExtension(msgspec.Struct, tag=True, frozen=True):
    """Call a method of a worker extension; arguments and result as `pack_value` writes them."""

    method: str
    arguments: bytes


CallMessage = (
    PrepareWeights
    | StartWeights
    | StageWeights
    | ReadWeights
    | PackWeights
    | CommitWeights
    | SettleWeights
    | ReleaseKV
    | ReleaseWeights
    | RestoreWeights
    | WriteShard
    | PrepareAdapter
    | InstallAdapter
    | RemoveAdapter
    | CallExtension
)


class Done(msgspec.Struct, tag=True, frozen=True):
    """A call's result, as `pack_value` writes it."""

    value: bytes = b"\x92\xc0\x90"


class Call(msgspec.Struct, frozen=True):
    """A call as it is sent."""

    number: int
    message: CallMessage


class Answer(msgspec.Struct, frozen=True):
    """The answer to call `number`."""

    number: int
    result: Done | Failed


describe_types(RankSettings, Joined | Failed, Started | Failed, StepMessage, Call, Answer)


class Channel(channel.Channel):
    """One end of a socket between ranks. Its messages hold parts of models."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end, _MAX_BYTES)
