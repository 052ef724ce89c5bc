"""Digests and finiteness of tensors, computed on their own device.

On a CUDA device a Triton kernel (`sync.digest_kernel`) computes them. All results are fetched at once: the device is
waited for once, and no tensor is copied to the host.
"""

import functools
import importlib.util
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sync import digest_kernel
from sync.digests import PIECE_BYTES, Digest, tensor_bytes, tensor_digest
from sync.finite import is_finite

logger = logging.getLogger("sync")


class CheckResult(NamedTuple):
    """The digest of a tensor's values, and whether they are finite."""

    digest: str
    """The digest as a manifest has it."""
    finite: bool
    """No NaN and no infinity. True for integers, and if finiteness was not checked."""


class HostCheck:
    """Checks bytes in the host's memory that are given in order."""

    def __init__(self, dtype: torch.dtype, *, check_finite: bool) -> None:
        self._digest, self._finite, self._dtype, self._check_finite = Digest(), True, dtype, check_finite

    def update(self, memory: memoryview, write: Callable[[int, int], None] | None = None) -> None:
        """Check the next bytes, piece by piece. `write(start, end)`, if given, first fills that part of `memory`."""
        for start in range(0, len(memory), PIECE_BYTES):
            end = min(start + PIECE_BYTES, len(memory))
            if write is not None:
                write(start, end)
            piece = memory[start:end]
            self._digest.update(piece)
            if self._check_finite:
                self._finite = self._finite and is_finite(piece, self._dtype)

    @property
    def result(self) -> CheckResult:
        """The result for all bytes; `update` must not be called again."""
        return CheckResult(self._digest.hexdigest(), self._finite)


class TensorCheck:
    """Checks tensors on any devices, one after the other.

    Args:
        check_finite: also check that values are finite.
    """

    def __init__(self, *, check_finite: bool) -> None:
        self._check_finite = check_finite
        self._on_host: dict[int, CheckResult] = {}
        """Results by the position in which the tensor was added."""
        self._on_device: dict[torch.device, tuple[digest_kernel.DeviceCheck, list[int]]] = {}
        """The check of each device, and the positions of its tensors."""
        self._count = 0

    def add(self, tensor: Tensor, out: Tensor | None = None) -> None:
        """Check `tensor`. If it is on a device, it must keep its values until `launch` or `results`.

        With `out`, also copy it there, cast nearest-even; allowed only where `supports` is true of both.
        """
        if supports(tensor):
            device = tensor.device if out is None else out.device
            if device not in self._on_device:
                self._on_device[device] = digest_kernel.DeviceCheck(), []
            check, positions = self._on_device[device]
            check.add(tensor, out)
            positions.append(self._count)
        else:
            host_check = HostCheck(tensor.dtype, check_finite=self._check_finite)
            host_check.update(tensor_bytes(tensor.detach().cpu().contiguous()))
            self._on_host[self._count] = host_check.result
        self._count += 1

    def launch(self) -> None:
        """Launch all pending checks; work launched on the device after this may overwrite the tensors."""
        for check, _ in self._on_device.values():
            check.launch()

    def results(self) -> list[CheckResult]:
        """The results of all tensors, in the order in which they were added."""
        found = dict(self._on_host)
        for check, positions in self._on_device.values():
            found |= zip(positions, (CheckResult(*pair) for pair in check.results()), strict=True)
        return [found[i] for i in range(self._count)]


def supports(tensor: Tensor) -> bool:
    """Whether the kernel can check `tensor` on its device."""
    return tensor.device.type == "cuda" and _device_is_supported(tensor.device)


@functools.cache
def _device_is_supported(device: torch.device) -> bool:
    """Whether the kernel works on that device. If it does not, tensors are checked on the host, more slowly."""
    try:
        unsupported_reason = _trial(device) if importlib.util.find_spec("triton") else "Triton is not installed"
    except Exception as problem:  # Triton finds no compiler, or does not support the device
        unsupported_reason = f"{type(problem).__name__}: {problem}"
    if unsupported_reason:
        logger.warning("Weights on %s are copied to the host for their digests: %s.", device, unsupported_reason)
    return not unsupported_reason


def _trial(device: torch.device) -> str:
    """Compare the kernel on that device with the host; return the difference in words, or ""."""
    values = torch.arange(1500.0)
    values[1234] = float("inf")
    there = values.to(device)
    copy = torch.zeros_like(there)
    check = digest_kernel.DeviceCheck()
    check.add(there[:1200], copy[:1200])
    check.add(there)
    wanted = [(tensor_digest(values[:1200]), True), (tensor_digest(values), False)]
    if check.results() == wanted and torch.equal(copy[:1200].cpu(), values[:1200]):
        return ""
    return "the kernel's results differ from the host's"
