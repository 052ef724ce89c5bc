"""Updates of weights of which this process holds a part: whole tensors arrive, and pass through a window.

place(name) ── a stand-in without values ── written ──> 8 MiB at a time in the window ──> `_stage_piece`
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from rollout_engine.execution.rank_parts import RankParts
from rollout_engine.kernels.cpu.stream import streaming_copy
from rollout_engine.model.ranks.exchange import WINDOW_BYTES
from rollout_engine.weights.held_weights import HeldWeights
from sync.manifest import dtype_name
from sync.tensor_writer import TensorWriter


class PartWeights(ABC):
    """The methods of `WeightHolder` that do not depend on the processes that hold the other parts.

    Args:
        own: the weights in this process.
        parts: the same, as regions of whole ones.
        whole: every accepted name as a view of the whole weights, without values.
        window: uint8, as `Meeting.window`.
    """

    takes_parts = False

    def __init__(self, own: HeldWeights, parts: RankParts, whole: Mapping[str, Tensor], window: Tensor) -> None:
        self._own, self._parts, self._window = own, parts, window
        self.metadata = {name: (dtype_name(view.dtype), tuple(view.shape)) for name, view in whole.items()}
        self._dtypes = {name: view.dtype for name, view in whole.items()}
        self._using_window, self._inplace = threading.Lock(), False
        self._placed: dict[int, tuple[str, Tensor]] = {}
        """Names of the stand-ins that `place` returned, by their ids."""
        self.writer = TensorWriter(
            find_copy=streaming_copy, find_upload=lambda out: self._upload if out.is_meta else None
        )
        """Writes to the tensors that `place` returns."""

    def takes_pieces(self, name: str) -> bool:
        return False

    def num_bytes(self, names: Iterable[str]) -> int:
        return sum(math.prod(self.metadata[name][1]) * self._dtypes[name].itemsize for name in names)

    def place(self, name: str, *, inplace: bool) -> Tensor:
        out = torch.empty(self.metadata[name][1], dtype=self._dtypes[name], device="meta")
        self._placed[id(out)] = name, out
        return out

    def release(self) -> None:
        """Free those of this process; others do so when they release their weights."""
        self._own.release()

    def copies(self) -> Iterator[Tensor]:
        return self._own.copies()

    @property
    def num_resident_bytes(self) -> int:
        return self._own.num_resident_bytes

    def beside_steps(self) -> AbstractContextManager[object]:
        return self._own.beside_steps()

    def _begin(self, *, inplace: bool) -> None:
        """Begin an update."""
        self._inplace, self._placed = inplace, {}

    def _upload(self, out: Tensor, fill: Callable[[memoryview, int], None]) -> None:
        """Have `fill` write the bytes of a whole weight, piece by piece, into the window, to be staged from there."""
        name, _ = self._placed[id(out)]
        for start, stop in pieces_of(out.shape, out.itemsize):
            with self._using_window:
                fill(self._window[: (stop - start) * out.itemsize].numpy().data, start * out.itemsize)
                self._stage_piece(name, start, stop)

    @abstractmethod
    def _stage_piece(self, name: str, start: int, stop: int) -> None:
        """Stage the parts of elements [start, stop) of a weight, which are in the window."""


def pieces_of(shape: Sequence[int], itemsize: int) -> Iterator[tuple[int, int]]:
    """Ranges of elements that fit the window: rows of the last dimension, of which ranks may have some columns."""
    count, most = math.prod(shape), WINDOW_BYTES // itemsize
    row = shape[-1] if shape and count else 1
    step = most // row * row or most
    return ((start, min(start + step, count)) for start in range(0, count, step))
