"""Chunks of sequences in one step, and the states that they read and write: input of the layers that keep a state."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_ARRAYS = ("token_starts", "sources", "write_starts", "write_ends", "write_slots")


class StateChunk(NamedTuple):
    """One chunk: tokens [first, end) of the step."""

    first: int
    end: int
    source: int
    """Slot of the state before its first token; -1: zeros."""
    writes: dict[int, int]
    """Flat index behind a token -> slot that takes the state behind that token."""


class ChunkTensors(NamedTuple):
    """The chunks of a step on a device: int64 tensors, those of `StateChunks` and `owners`.

    A captured step may have a chunk that writes slot -1: none.
    """

    token_starts: Tensor
    sources: Tensor
    write_starts: Tensor
    write_ends: Tensor
    write_slots: Tensor
    owners: Tensor
    """[T]: the chunk of each token."""


@dataclass(frozen=True, eq=False)
class StateChunks:
    """N chunks, end to end in T tokens. A chunk reads a state from one slot, or starts from zeros, and writes states.

    A chunk may write the slot that it reads. Any two chunks may read one slot; but a slot is written once at most, and
    one that is written is read by no other chunk. Arrays are copied, and cannot be changed afterwards. Raises
    `ValueError` for arrays that break these rules.
    """

    token_starts: np.ndarray
    """int64 [N + 1]: chunk n is tokens [token_starts[n], token_starts[n + 1])."""
    sources: np.ndarray
    """int64 [N]: slot of the state before the first token; -1: zeros."""
    write_starts: np.ndarray
    """int64 [N + 1]: the writes of chunk n are [write_starts[n], write_starts[n + 1])."""
    write_ends: np.ndarray
    """int64 [W]: flat index behind the last token that the written state includes; rising within a chunk."""
    write_slots: np.ndarray
    """int64 [W]: slot that is written."""
    address: int = field(init=False, repr=False)
    """Address of the five arrays, which lie end to end, as C++ reads them (`cpu/state_chunks.h`)."""
    num_slots: int = field(init=False, repr=False)
    """Slots that a pool needs to have: one more than the highest that is named."""
    _on: dict[torch.device, ChunkTensors] = field(init=False, repr=False, default_factory=dict)
    """Copies that `on` has made."""

    def __post_init__(self) -> None:
        arrays = [np.asarray(getattr(self, name)) for name in _ARRAYS]
        for name, array in zip(_ARRAYS, arrays, strict=True):
            if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
                raise ValueError(f"{name} should be integers in one dimension, and is {array.dtype} {array.shape}.")
        table = np.concatenate(arrays, dtype=np.int64, casting="unsafe")
        table.flags.writeable = False
        ends = np.cumsum([len(array) for array in arrays])
        for name, part in zip(_ARRAYS, np.split(table, ends[:-1]), strict=True):
            object.__setattr__(self, name, part)
        self._check_shapes()
        self._check_writes()
        object.__setattr__(self, "address", table.ctypes.data)
        slots = np.concatenate((self.sources, self.write_slots))
        object.__setattr__(self, "num_slots", int(slots.max(initial=-1)) + 1)

    @classmethod
    def whole(cls, lengths: Sequence[int]) -> "StateChunks":
        """Sequences of these lengths, from zeros and without writes, as a trainer has them."""
        count = len(lengths)
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
        none = np.zeros(0, np.int64)
        return cls(starts, np.full(count, -1), np.zeros(count + 1, np.int64), none, none)

    @classmethod
    def in_place(
        cls, sizes: Sequence[int] | np.ndarray, first_positions: Sequence[int] | np.ndarray, slots: Sequence[int]
    ) -> "StateChunks":
        """Chunks of these sizes and positions of their first tokens, each of which continues in a slot of its own."""
        starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)))
        sources = np.where(np.asarray(first_positions) > 0, slots, -1)
        return cls(starts, sources, np.arange(len(starts)), starts[1:], np.asarray(slots))

    def write_every(self, interval: int) -> "StateChunks":
        """The same chunks, whose states are written after every `interval` tokens inside a chunk, to slots 0, 1, ..."""
        spans = zip(self.token_starts[:-1].tolist(), self.token_starts[1:].tolist(), strict=True)
        ends = [range(first + interval, end, interval) for first, end in spans]
        counts = np.cumsum([0, *map(len, ends)])
        flat = np.fromiter((end for each in ends for end in each), np.int64, counts[-1])
        return StateChunks(self.token_starts, self.sources, counts, flat, np.arange(len(flat)))

    def on(self, device: torch.device) -> ChunkTensors:
        """The chunks on `device`; they are copied there once, and nothing waits for that."""
        if device not in self._on:
            arrays = [getattr(self, name) for name in _ARRAYS]
            arrays.append(np.repeat(np.arange(self.num_chunks), np.diff(self.token_starts)))
            ends = np.cumsum([0, *(len(array) + len(array) % 2 for array in arrays)]).tolist()  # multiples of 16 bytes
            packed = torch.zeros(ends[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
            parts = [slice(start, start + len(array)) for start, array in zip(ends, arrays, strict=False)]
            for part, array in zip(parts, arrays, strict=True):
                packed.numpy()[part] = array
            packed = packed.to(device, non_blocking=True)
            self._on[device] = ChunkTensors(*(packed[part] for part in parts))
        return self._on[device]

    @property
    def num_chunks(self) -> int:
        """Number of chunks, N."""
        return len(self.sources)

    @property
    def num_tokens(self) -> int:
        """Number of tokens, T."""
        return int(self.token_starts[-1])

    def check(self, num_tokens: int, num_slots: int | None) -> None:
        """Raise `ValueError` unless these are chunks of `num_tokens` in a pool of `num_slots`; None: no pool."""
        if num_tokens != self.num_tokens:
            raise ValueError(f"chunks should have {num_tokens} tokens, not {self.num_tokens}.")
        if num_slots is None and self.num_slots:
            raise ValueError("chunks without states should read and write no slot: pass `states` too.")
        if num_slots is not None and self.num_slots > num_slots:
            highest = self.num_slots - 1
            raise ValueError(f"slots of chunks should be below {num_slots}, the number of states; one is {highest}.")

    def each(self) -> Iterator[StateChunk]:
        """The chunks, one at a time."""
        starts, writes = self.token_starts.tolist(), self.write_starts.tolist()
        ends, slots = self.write_ends.tolist(), self.write_slots.tolist()
        for n, source in enumerate(self.sources.tolist()):
            part = slice(writes[n], writes[n + 1])
            yield StateChunk(starts[n], starts[n + 1], source, dict(zip(ends[part], slots[part], strict=True)))

    def _check_shapes(self) -> None:
        count, num_writes = len(self.sources), len(self.write_slots)
        for name, total in (("token_starts", None), ("write_starts", num_writes)):
            starts = getattr(self, name)
            if len(starts) != count + 1:
                raise ValueError(f"{name} should have {count + 1} elements, one more than sources, not {len(starts)}.")
            if starts[0] or (np.diff(starts) < 0).any() or (total is not None and starts[-1] != total):
                end = "" if total is None else f" up to {total}, the number of write_slots"
                raise ValueError(f"{name} should rise from 0{end}, and is {starts.tolist()}.")
        if len(self.write_ends) != num_writes:
            raise ValueError(
                f"write_ends should have {num_writes} elements, as write_slots, and has {len(self.write_ends)}."
            )
        if self.sources.min(initial=0) < -1 or self.write_slots.min(initial=0) < 0:
            raise ValueError("sources should be slots or -1, and write_slots slots; one of them is below that.")

    def _check_writes(self) -> None:
        numbers = np.arange(self.num_chunks)
        owners = np.repeat(numbers, np.diff(self.write_starts))
        ends = self.write_ends
        if (ends <= self.token_starts[owners]).any() or (ends > self.token_starts[owners + 1]).any():
            raise ValueError("write_ends should lie behind a token of their own chunk; one does not.")
        if ((np.diff(ends) <= 0) & (np.diff(owners) == 0)).any():
            raise ValueError("write_ends should rise within a chunk; some do not.")
        order = np.argsort(self.write_slots)
        slots = self.write_slots[order]
        if (np.diff(slots) == 0).any():
            twice = int(slots[:-1][np.diff(slots) == 0][0])
            raise ValueError(f"A slot should be written once in a step; slot {twice} is written twice.")
        if not len(slots):
            return
        place = np.minimum(np.searchsorted(slots, self.sources), len(slots) - 1)
        shared = (slots[place] == self.sources) & (owners[order][place] != numbers)
        if shared.any():
            raise ValueError(
                f"A slot that a chunk writes should be read by no other; slot {int(self.sources[shared][0])} is."
            )
