"""Which backend computes on a device. Only this file imports both; Triton, which `cuda` needs, may be missing."""

from typing import NamedTuple

import torch

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.kernels.triton import availability
from rollout_engine.model.backend import Arithmetic, Backend
from rollout_engine.model.cpu.backend import CpuBackend
from rollout_engine.model.ranks.exchange import Exchange, Meeting
from rollout_engine.model.ranks.group_exchange import GroupExchange

try:
    from rollout_engine.model.cuda.backend import CudaBackend
except ImportError as problem:
    _import_problem: ImportError | None = problem
else:
    _import_problem = None


class Device(NamedTuple):
    """A device, and the backend that computes on it."""

    torch_device: torch.device
    backend: type[Backend]

    @property
    def is_host(self) -> bool:
        """Whether the backend computes by the host's own kernels."""
        return self.backend is CpuBackend

    def splits_sums(self, config: EngineConfig) -> bool:
        """Whether ranks compute parts of sums, which they add up: fewer exchanges, but not the bits of one rank."""
        return not self.is_host and config.deterministic is not True


def device_of(config: EngineConfig) -> Device:
    """The device that `config` names. Raises `ConfigError` if no engine runs on it."""
    if config.device != "cuda":
        return Device(torch.device("cpu"), CpuBackend)
    device = torch.device("cuda", 0)
    if (reason := unsupported_reason(device)) is not None:
        raise ConfigError(f"device='cuda' is not possible: {reason}. Use device='cpu', or provide what is missing.")
    return Device(device, CudaBackend)


def exchange_of(device: Device, meeting: Meeting, rendezvous: str | None) -> Exchange:
    """A rank's end of the exchange between ranks, whose hosts have this `meeting`.

    `rendezvous`: of the group of their devices, or of CPUs that share no memory; None: the meeting is all they need.
    """
    if rendezvous is None:
        assert isinstance(meeting, Exchange), "ranks without a group share memory"
        return meeting
    return GroupExchange(meeting, device.torch_device, rendezvous)


def arithmetic_of(device: torch.device) -> Arithmetic:
    """The arithmetic of engines on `device`. Raises `ConfigError` if no engine runs on it."""
    if device.type == "cpu":
        return CpuBackend.arithmetic
    if (reason := unsupported_reason(device)) is not None:
        raise ConfigError(
            f"A model on {device} cannot be exact: {reason}. Move it to the CPU, or provide what is missing."
        )
    return CudaBackend.arithmetic


def unsupported_reason(device: torch.device) -> str | None:
    """Why `CudaBackend` cannot compute on `device`, as half a sentence for the user; None if it can."""
    reason = availability.unsupported_reason(device)
    if reason is None and _import_problem is not None:
        return f"its kernels cannot be imported ({_import_problem})"
    return reason
