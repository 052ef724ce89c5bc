"""Moves whole KV blocks, and slots of states, between the pools of a model and the host's memory.

The bytes of a block are those of its row in every tensor of the pool, in their order; those of a slot likewise. Many
blocks move in one gather or scatter per tensor. If a model is cut over ranks, each moves its part of a block.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from rollout_engine.base.messages import KVLoad, KVSave, ModelRunnerOutput

logger = logging.getLogger("rollout_engine")

_CHUNK_BYTES = 16 << 20
"""Bytes that are moved at a time, in addition to the pools."""


class Pools(Protocol):
    """The pools of KV and states of a model."""

    @property
    def states(self) -> Any:
        """Their `tensors()` have slots as the first dimension."""
        ...

    def tensors(self) -> Iterable[Tensor]:
        """Every tensor of KV; blocks are the first dimension of its shape."""
        ...


class KVTransfer:
    """Carries out saves and loads of steps.

    Args:
        pools: those of the model.
        save: takes the key and the bytes of a block, which may change when it returns.
    """

    def __init__(self, pools: Pools, save: Callable[[bytes, memoryview], None]) -> None:
        self._pools, self._save = pools, save
        self.block_bytes, self.state_bytes = _row_bytes(self.block_tensors()), _row_bytes(self._state_tensors())
        self.block_start = self.state_start = 0
        """First byte of this rank's part of a whole block, and of a whole slot, as they are loaded."""

    def block_tensors(self) -> list[Tensor]:
        """The tensors that blocks are rows of."""
        return list(self._pools.tensors())

    def describe_shapes(self) -> str:
        """Shapes and dtypes of a block's and a slot's rows, in order, as text."""
        tensors = [*self.block_tensors(), *self._state_tensors()]
        return " ".join(f"{'x'.join(map(str, each.shape[1:]))}:{each.dtype}" for each in tensors)

    def describe_dtypes(self) -> str:
        """Dtypes of a block's rows, as text."""
        return ", ".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in self.block_tensors()}))

    def begin_saves(
        self, saves: Sequence[KVSave], save: Callable[[bytes, memoryview], None] | None = None
    ) -> Callable[[], None]:
        """Read blocks and slots before anything later writes them; returns a function that waits and hands them on.

        Those for which the device has no memory are not saved. `save`: takes them in place of the usual function.
        """
        take = save or self._save
        parts: list[tuple[list[KVSave], _Reading]] = []
        try:
            for part in self._parts(saves):
                parts.append((part, _Reading(self._read(part))))
        except torch.OutOfMemoryError as problem:
            what = "the device has no memory to copy them"
            logger.warning("%d blocks of KV are saved in part or not at all: %s (%s).", len(saves), what, problem)

        def finish() -> None:
            for part, reading in parts:
                for each, row in zip(part, reading.rows(), strict=True):
                    take(each.key, memoryview(row))

        return finish

    def save(self, saves: Sequence[KVSave]) -> None:
        """Read blocks and slots, a part at a time, and hand them on."""
        for part in self._parts(saves):
            self.begin_saves(part)()

    def read(self, saves: Sequence[KVSave]) -> list[bytes]:
        """The bytes of blocks and slots, in order; b"" for those for which the device has no memory."""
        found: dict[bytes, bytes] = {}
        for part in self._parts(saves):
            self.begin_saves(part, lambda key, data: found.update({key: bytes(data)}))()
        return [found.get(save.key, b"") for save in saves]

    def load(self, loads: Sequence[KVLoad]) -> None:
        """Fill blocks and slots."""
        for part in self._parts(loads):
            is_state = part[0].is_state
            tensors = self._state_tensors() if is_state else self.block_tensors()
            count, start = (self.state_bytes, self.state_start) if is_state else (self.block_bytes, self.block_start)
            rows = [np.frombuffer(load.data, np.uint8, count, start) for load in part]
            self._write(tensors, [load.place for load in part], rows)

    def _read(self, saves: Sequence[KVSave]) -> Tensor:
        """uint8 [n, bytes] on the pool's device."""
        tensors = self._state_tensors() if saves[0].is_state else self.block_tensors()
        places = torch.tensor([save.place for save in saves], dtype=torch.int64, device=tensors[0].device)
        rows = [tensor.index_select(0, places).reshape(len(saves), -1).view(torch.uint8) for tensor in tensors]
        return rows[0] if len(rows) == 1 else torch.cat(rows, 1)

    def _write(self, tensors: list[Tensor], places: list[int], data: list[np.ndarray]) -> None:
        device = tensors[0].device
        host = torch.empty(len(places), data[0].nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        for row, each in zip(host.numpy(), data, strict=True):
            row[:] = each
        sent = host.to(device, non_blocking=True)  # the allocator of pinned memory keeps it until the copy is made
        indices, start = torch.tensor(places, dtype=torch.int64, device=device), 0
        for tensor in tensors:
            end = start + _row_bytes([tensor])
            rows = sent[:, start:end].contiguous().view(tensor.dtype)
            tensor.index_copy_(0, indices, rows.view(len(places), *tensor.shape[1:]))
            start = end

    def _parts(self, moves: Sequence[Any]) -> Iterator[list[Any]]:
        """The moves of blocks and of slots, apart, a number at a time that fits `_CHUNK_BYTES`."""
        for is_state, group in groupby(sorted(moves, key=attrgetter("is_state")), attrgetter("is_state")):
            listed = list(group)
            count = max(1, _CHUNK_BYTES // max(1, self.state_bytes if is_state else self.block_bytes))
            for start in range(0, len(listed), count):
                yield listed[start : start + count]

    def _state_tensors(self) -> list[Tensor]:
        return list(self._pools.states.tensors())


def save_behind(result: Callable[[], ModelRunnerOutput], save: Callable[[], None]) -> ModelRunnerOutput:
    """Wait for the result of a step, then hand on the KV that was read before it."""
    out = result()
    save()
    return out


class _Reading:
    """Rows on their way to the host."""

    def __init__(self, rows: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        self._host = rows
        if rows.device.type == "cuda":
            self._host = torch.empty(rows.shape, dtype=torch.uint8, pin_memory=True)
            self._host.copy_(rows, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def rows(self) -> np.ndarray:
        """Wait for them; uint8 [n, bytes]."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()


def _row_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes // max(1, len(tensor)) for tensor in tensors)
