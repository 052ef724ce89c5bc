"""Where the model runs: on the CPU, or on a CUDA device by the Triton kernels."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from rollout_engine.config import EngineConfig
from rollout_engine.errors import ConfigError
from rollout_engine.execution import on_host
from rollout_engine.execution.shadow import Moves
from rollout_engine.model.device import why_not
from rollout_engine.model.loader import LoadedModel
from rollout_engine.model.logits_processors import LogitsProcessor
from rollout_engine.model.packed_weights import PackedWeights
from sync.arrival import Crossing


class WeightMemory(Protocol):
    """What weights that steps read, and what is derived from them, take."""

    @property
    def num_bytes(self) -> int:
        """Now."""
        ...

    def release(self, *, forget: bool) -> None:
        """Free what can be made again, or brought back; with `forget` the weights too, whose values are lost."""
        ...

    def derive(self) -> None:
        """Have again what `release(forget=False)` freed."""
        ...

    def take_back(self) -> None:
        """Have memory again for weights that were forgotten."""
        ...


class Served(Protocol):
    """A loaded model at work: `on_host.HostModel` or `on_device.DeviceServing`."""

    runner: Any
    """`execute`s steps, or, where it runs ahead, takes them by `submit`."""
    runs_ahead: bool
    """Steps run on a device while the host prepares others."""
    packed: PackedWeights
    num_blocks: int
    max_prefill_beside_decode: int
    """See `CoreConfig`."""
    moves: Moves
    crossing: Crossing | None
    """From the host's memory to weights; None where they lie in it."""
    choices: str
    """Made here, for the start-up line."""

    def score(self, sequences: Sequence[list[int]], num_prompt: Sequence[int], temperature: float) -> list[Any]:
        """Log-prob float32 [len - num_prompt] of every token after the prompt."""
        ...

    def memory_of(self, weights: Sequence[Tensor]) -> WeightMemory:
        """Of these, which are not packed."""
        ...


class Device(NamedTuple):
    """One of them."""

    torch_device: torch.device
    serve: Callable[[EngineConfig, LoadedModel, Sequence[LogitsProcessor]], Served]


def device_of(config: EngineConfig) -> Device:
    """The device that `config` names. Raises `ConfigError` where it cannot serve."""
    if config.device != "cuda":
        if config.compile:
            raise ConfigError(
                "compile=True is not possible on a CPU: its kernels compute a step bit for bit as the trainer does, "
                "and what is compiled would round otherwise. Leave it out, or use device='cuda'."
            )
        return Device(torch.device("cpu"), on_host.HostModel)
    device = torch.device("cuda", 0)
    obstacle = why_not(device)
    if obstacle is not None:
        raise ConfigError(f"device='cuda' is not possible: {obstacle}. Use device='cpu', or provide what is missing.")
    return Device(device, with_kernels())


def with_kernels() -> Callable[[EngineConfig, LoadedModel, Sequence[LogitsProcessor]], Served]:
    """How a model is served by the Triton kernels; they are imported now, where there may be none elsewhere."""
    serve: Callable[..., Served] = importlib.import_module("rollout_engine.execution.on_device").DeviceServing
    return serve
