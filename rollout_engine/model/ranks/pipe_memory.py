"""The memory of the ranks of an engine with several stages, and the ends of the way from one stage to the next.

    memory     exchange of all ranks │ exchange of each stage │ a belt between each stage and the next
    belt       place │ place │ ...   one for each forward that may be on its way, used in turn

The first rank of a stage writes its hidden states to a place, and notifies every rank of the next stage.
A wait for a socket leaves the core to others, and ends with the process at the other end.
"""

import mmap
import os
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.cpu.turns import BrokenTurnsError
from rollout_engine.model.ranks.shared_exchange import TOTAL_BYTES

_PLACE_BYTES = 1 << 30
_HEADER = struct.Struct("<3q")
"""Serial of a forward, bytes of its hidden states, bytes of its routed experts."""


def num_places(num_stages: int) -> int:
    """Places of a belt: forwards in flight, as many that failed before, and a score."""
    return 2 * num_stages + 2


class PipePlan:
    """How ranks of stages are numbered, and their places in the shared memory.

    Rank 0 is the first one of the last stage, which draws. Its ranks are the first, then those of the first
    stage, the second, and so on.
    """

    def __init__(self, num_stages: int, ranks_of_stage: int) -> None:
        self.num_stages, self.ranks_of_stage = num_stages, ranks_of_stage
        self.num_ranks = num_stages * ranks_of_stage
        self._belt_bytes = num_places(num_stages) * _PLACE_BYTES

    @property
    def total_bytes(self) -> int:
        """Bytes of addresses. Memory is taken as it is written."""
        return self.exchange_start(self.num_stages) + (self.num_stages - 1) * self._belt_bytes

    def stage_of(self, rank: int) -> int:
        """The stage of a rank, in the order of layers."""
        return (rank // self.ranks_of_stage - 1) % self.num_stages

    def readers_of(self, stage: int) -> list[int]:
        """The ranks of the stage behind one that is not the last."""
        first = (stage + 2) % self.num_stages * self.ranks_of_stage
        return list(range(first, first + self.ranks_of_stage))

    def writer_of(self, stage: int) -> int:
        """The rank that passes the hidden states of a stage on."""
        return (stage + 1) % self.num_stages * self.ranks_of_stage

    def exchange_start(self, stage: int) -> int:
        """Byte of the memory at which the exchange of a stage begins; that of all ranks is at 0."""
        return (1 + stage) * TOTAL_BYTES

    def belt(self, descriptor: int, stage: int) -> list[Tensor]:
        """The places, uint8 each, between a stage and the next, in a file of `total_bytes`."""
        start = self.exchange_start(self.num_stages) + stage * self._belt_bytes
        memory = torch.frombuffer(mmap.mmap(descriptor, self._belt_bytes, offset=start), dtype=torch.uint8)
        return list(memory.split(_PLACE_BYTES))


class Outbox:
    """The end of a belt at the rank that writes to it; `sockets` to all that read."""

    def __init__(self, places: list[Tensor], sockets: Sequence[socket.socket]) -> None:
        self._places, self._sockets = places, sockets

    def put(self, serial: int, hidden: Tensor, experts: Tensor | None) -> None:
        """Pass on hidden states [T, H] of forward `serial`, and routed experts int32 [T, L, k] of the layers so far.

        Raises `BrokenTurnsError` if no reader is left.
        """
        sizes = hidden.nbytes, 0 if experts is None else experts.nbytes
        if sum(sizes) > _PLACE_BYTES:
            what = f"Stages pass on up to {_PLACE_BYTES} bytes at a time, and this step has {sum(sizes)}"
            raise ConfigError(f"{what}. Give a smaller max_num_batched_tokens.")
        place = self._places[serial % len(self._places)]
        place[: sizes[0]].copy_(_bytes(hidden))
        if experts is not None:
            place[sizes[0] : sum(sizes)].copy_(_bytes(experts))
        message = _HEADER.pack(serial, *sizes)
        try:
            for each in self._sockets:
                each.sendall(message)
        except OSError:
            raise BrokenTurnsError("the next stage has ended or failed") from None

    def break_(self) -> None:
        """Let no thread wait at this end any more."""
        _shut(self._sockets)

    def close(self) -> None:
        """Free the sockets; no thread waits at this end."""
        for each in self._sockets:
            each.close()


class Inbox:
    """The end of a belt at a rank that reads from it."""

    def __init__(self, places: list[Tensor], source: socket.socket) -> None:
        self._places, self._socket = places, source
        self._reading = threading.Lock()
        self._arrived: dict[int, tuple[int, int]] = {}
        """Sizes of the contents of places, by serial."""
        self._last = -1

    def take(self, serial: int, dtype: torch.dtype, width: int) -> tuple[Tensor, Tensor | None]:
        """Wait for forward `serial`: copies of its hidden states [T, width], and of its routed experts, int32 [n].

        Raises `BrokenTurnsError` if they never arrive.
        """
        self.wait_for(serial)
        size, num_more = self._arrived.pop(serial)
        place = self._places[serial % len(self._places)]
        hidden = place[:size].view(dtype).view(-1, width).clone()
        return hidden, place[size : size + num_more].view(torch.int32).clone() if num_more else None

    def wait_for(self, serial: int) -> None:
        """Wait until forward `serial` and all before it have arrived. Raises as `take`."""
        with self._reading:
            while self._last < serial:
                try:
                    message = self._socket.recv(_HEADER.size)
                except OSError:
                    message = b""
                if len(message) < _HEADER.size:
                    raise BrokenTurnsError("a stage has ended or failed")
                self._last, *sizes = _HEADER.unpack(message)
                self._arrived[self._last] = sizes[0], sizes[1]
                self._arrived.pop(self._last - len(self._places), None)  # no caller has asked for it

    def break_(self) -> None:
        """Let no thread wait at this end any more."""
        _shut([self._socket])

    def close(self) -> None:
        """Free the socket; no thread waits at this end."""
        self._socket.close()


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a channel that notifies a reader of written places: whole messages, in order."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def adopt(descriptor: int) -> socket.socket:
    """One end of a pair, which this process has inherited."""
    os.set_inheritable(descriptor, False)
    return socket.socket(fileno=descriptor)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _shut(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
