"""The seam between a server and a trainer of LoRA adapters: examples in, losses and log-probs out; no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple, Protocol

import msgspec
import numpy as np

_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]


class LoraShape(msgspec.Struct, frozen=True, kw_only=True):
    """Which matrices an adapter has, and the seed that they are drawn by."""

    rank: int
    seed: int | None = None
    """None: drawn."""
    train_mlp: bool = True
    train_attn: bool = True


class TrainingExample(NamedTuple):
    """One sequence, and the inputs of its loss."""

    token_ids: np.ndarray
    """int64 [T]."""
    inputs: dict[str, np.ndarray]
    """[T] each: `target_tokens` int64, the rest float32. Entry i is of the token behind `token_ids[i]`."""


class AdamStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of AdamW (Loshchilov and Hutter 2019); the defaults are those of Tinker."""

    learning_rate: _NotNegative = 1e-4
    beta1: _Share = 0.9
    beta2: _Share = 0.95
    eps: _NotNegative = 1e-12
    weight_decay: _NotNegative = 0.0
    """Decoupled: weights shrink by learning_rate * weight_decay."""
    grad_clip_norm: float = 0.0
    """Largest global norm of the gradients; 0: no bound."""


class LossResult(NamedTuple):
    """The result of one pass over examples."""

    loss: float
    """Sum over all tokens of all examples."""
    logprobs: list[np.ndarray]
    """float32 [T] of each example: of its `target_tokens`."""


class LoraTrainer(Protocol):
    """Trains adapters of one base model. Calls arrive one at a time, on one thread.

    Every method raises `RequestError` for arguments that it refuses.
    """

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the losses."""

    def check_shape(self, shape: LoraShape) -> None:
        """Refuse an adapter that cannot be trained or served."""

    def create(self, name: str, shape: LoraShape) -> None:
        """Make an adapter that changes nothing yet: B is zero."""

    def remove(self, name: str) -> None:
        """Free an adapter; no-op for an unknown one."""

    def run(
        self,
        name: str,
        examples: Sequence[TrainingExample],
        loss: str,
        config: Mapping[str, float],
        *,
        forward_only: bool = False,
    ) -> LossResult:
        """Compute a loss, and add its gradients to those of the adapter unless `forward_only`."""

    def step(self, name: str, step: AdamStep) -> dict[str, float]:
        """Apply the gradients and clear them -> metrics. Refused without gradients."""

    def clear(self, name: str) -> None:
        """Drop the gradients."""

    def save(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Write the adapter in PEFT's format, and the state of its optimizer, into an existing directory."""

    def load(self, name: str, directory: Path, *, optimizer: bool) -> None:
        """Read the files of `save`; without `optimizer` its state begins anew."""
