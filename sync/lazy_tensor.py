"""Tensors of a source that are not in memory yet: each is gathered, computed or read when it is asked for."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from sync.digests import PIECE_BYTES, Digest, tensor_bytes
from sync.errors import GatherFailed, SyncError

Fetch = Callable[[memoryview, int], None]
"""`fetch(out, start)` fills `out` with the bytes from `start` on."""


class LazyTensor(ABC):
    """A tensor whose shape and dtype are known before its values are there."""

    is_collective = False
    """Whether every rank of a trainer has to materialize it, in the same order."""
    was_begun = False
    """Whether `materialize` has been called; kept by collective ones only."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self.check: Callable[[], None] = lambda: None
        """Raises `ChecksumMismatch` if files that it is read from have changed."""

    @property
    def identity(self) -> object:
        """Equal for two that are one and the same weight under two names."""
        return id(self)

    @abstractmethod
    def materialize(self) -> Tensor:
        """The tensor, whole and detached; no other holder writes to it."""


class GatheredTensor(LazyTensor):
    """A DTensor, of which every rank holds a part, as FSDP2 and tensor parallelism make them."""

    is_collective = True

    def __init__(self, sharded: Tensor) -> None:
        super().__init__(tuple(sharded.shape), sharded.dtype)
        self._sharded = sharded

    @property
    def identity(self) -> object:
        return id(self._sharded)

    def materialize(self) -> Tensor:
        """Gather it. Raises `GatherFailed`."""
        self.was_begun = True
        return gather_whole(self._sharded)


class FileTensor(LazyTensor):
    """A tensor in a file, which is read into memory of our own and never mapped.

    Args:
        fetch: reads bytes of the tensor, row-major; raises once the file has changed.
        check: raises if the file, or one that belongs to it, has changed.
        check_digest: raises unless the digest of all that was read is the one that the tensor must have.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        fetch: Fetch,
        check: Callable[[], None] = lambda: None,
        check_digest: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(shape, dtype)
        self.fetch, self.check, self._check_digest = fetch, check, check_digest

    def materialize(self) -> Tensor:
        """Read the file. Raises `ChecksumMismatch`, and `SyncError` if there is no memory for it."""
        try:
            out = torch.empty(self.shape, dtype=self.dtype)
        except RuntimeError as problem:  # torch's own word for it
            num_bytes = math.prod(self.shape) * self.dtype.itemsize
            what = f"A tensor of shape {tuple(self.shape)} and dtype {self.dtype} takes {num_bytes} bytes"
            raise SyncError(f"{what}, more than this process can have: {str(problem).splitlines()[0]}.") from None
        memory = tensor_bytes(out)
        if self._check_digest is None:
            self.fetch(memory, 0)
        else:
            self._digest(lambda start, end: memory[start:end])
        return out

    def piece_digests(self) -> list[bytes]:
        """The digests of the pieces in the file. Raises `ChecksumMismatch`."""
        piece = memoryview(bytearray(PIECE_BYTES))
        return self._digest(lambda start, end: piece[: end - start])

    def _digest(self, buffer: Callable[[int, int], memoryview]) -> list[bytes]:
        """Read the file piece by piece, bytes [start, end) into `buffer(start, end)`."""
        num_bytes = math.prod(self.shape) * self.dtype.itemsize
        digest = Digest()
        for start in range(0, num_bytes, PIECE_BYTES):
            piece = buffer(start, min(start + PIECE_BYTES, num_bytes))
            self.fetch(piece, start)
            digest.update(piece)
        found = digest.hexdigest()
        if self._check_digest is not None:
            self._check_digest(found)
        return digest.pieces


def is_sharded(tensor: object) -> bool:
    """Whether this rank holds only a part (a DTensor)."""
    return hasattr(tensor, "full_tensor")


def gather_whole(sharded: Tensor) -> Tensor:
    """A DTensor whole and detached. Collective: every rank has to call it. Raises `GatherFailed`."""
    with torch.no_grad():
        try:
            whole: Tensor = sharded.full_tensor()  # type: ignore[attr-defined]
        except RuntimeError as problem:  # also torch.distributed's own errors
            what = (
                f"A weight of shape {tuple(sharded.shape)} could not be gathered from the trainer's ranks ({problem})"
            )
            how = "every other rank calls sync.join_gathers with the same source while this one sends, and stays"
            raise GatherFailed(f"{what}: {how}.") from problem
        return whole.detach()


def materialized(tensor: Tensor | LazyTensor) -> Tensor:
    """The tensor itself, materialized if it is lazy."""
    return tensor.materialize() if isinstance(tensor, LazyTensor) else tensor
