"""What tensors show where they lie: digests, and whether values are finite.

On a device a kernel looks (`sync.digest_kernel`), and all is told at once: the device is waited for once, and no tensor
comes to the host.
"""

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sync.digests import PIECE_BYTES, Digest, tensor_bytes, tensor_digest
from sync.finite import is_finite

logger = logging.getLogger("sync")


class Arrival(NamedTuple):
    """What lies in a tensor's place."""

    digest: str
    """As in a manifest."""
    finite: bool
    """No NaN and no infinity; True for what is not floating."""


class Look:
    """What is known of bytes of the host that have passed, in order."""

    def __init__(self, dtype: torch.dtype, *, finite: bool) -> None:
        self._digest, self._finite, self._dtype, self._looks = Digest(), True, dtype, finite

    def over(self, memory: memoryview, write: Callable[[int, int], None] | None = None) -> None:
        """`memory` follows; `write(start, end)` first fills it from start to end, piece by piece."""
        for start in range(0, len(memory), PIECE_BYTES):
            end = min(start + PIECE_BYTES, len(memory))
            if write is not None:
                write(start, end)
            piece = memory[start:end]
            self._digest.update(piece)
            if self._looks:
                self._finite = self._finite and is_finite(piece, self._dtype)

    @property
    def arrival(self) -> Arrival:
        """All has passed. Finite, where nobody asked."""
        return Arrival(self._digest.hexdigest(), self._finite)


class Looks:
    """At one tensor after the other, on any devices.

    Args:
        finite: look for values that are not; else all are taken to be.
    """

    def __init__(self, *, finite: bool) -> None:
        self._finite = finite
        self._told: dict[int, Arrival] = {}
        """By place in the order, of the host's."""
        self._there: dict[torch.device, tuple[Any, list[int]]] = {}
        """`DeviceLooks`, and the places in the order."""
        self._count = 0

    def at(self, tensor: Tensor, out: Tensor | None = None) -> None:
        """The next one. Until `launch` or `told` it keeps its values, if it is on a device.

        `out`: where it is copied too, cast nearest-even; only for two that the kernel sees.
        """
        if sees(tensor):
            device = tensor.device if out is None else out.device
            if device not in self._there:
                self._there[device] = _kernel().DeviceLooks(), []
            looks, order = self._there[device]
            looks.add(tensor, out)
            order.append(self._count)
        else:
            look = Look(tensor.dtype, finite=self._finite)
            look.over(tensor_bytes(tensor.detach().cpu().contiguous()))
            self._told[self._count] = look.arrival
        self._count += 1

    def launch(self) -> None:
        """All that is on devices may change again after what is launched there by now."""
        for looks, _ in self._there.values():
            looks.launch()

    def told(self) -> list[Arrival]:
        """Of all, in order."""
        for looks, order in self._there.values():
            self._told |= zip(order, (Arrival(*pair) for pair in looks.told()), strict=True)
        return [self._told[i] for i in range(self._count)]


def sees(tensor: Tensor) -> bool:
    """Whether the kernel can look at it."""
    return tensor.device.type == "cuda" and _serves(tensor.device)


@functools.cache
def _serves(device: torch.device) -> bool:
    """Whether the kernel finds on that device what the host finds. Where it does not, the host looks: more slowly."""
    try:
        obstacle = _trial(device) if importlib.util.find_spec("triton") else "Triton is not installed"
    except Exception as problem:  # Triton finds no compiler, or does not know the device
        obstacle = f"{type(problem).__name__}: {problem}"
    if obstacle:
        logger.warning("Weights on %s are brought to the host for their digests: %s.", device, obstacle)
    return not obstacle


def _trial(device: torch.device) -> str:
    """What is wrong with the kernel there, if anything is."""
    values = torch.arange(1500.0)
    values[1234] = float("inf")
    there = values.to(device)
    copy = torch.zeros_like(there)
    looks = _kernel().DeviceLooks()
    looks.add(there[:1200], copy[:1200])
    looks.add(there)
    wanted = [(tensor_digest(values[:1200]), True), (tensor_digest(values), False)]
    fine = looks.told() == wanted and torch.equal(copy[:1200].cpu(), values[:1200])
    return "" if fine else "the kernel makes others than the host does"


def _kernel() -> Any:
    """Imported where it is needed: elsewhere there may be no Triton."""
    return importlib.import_module("sync.digest_kernel")
