"""How a trainer's module comes to compute what an engine on the same kind of device does."""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn

from rollout_engine.errors import ConfigError
from rollout_engine.kernels.token_logprobs import FiguresOf, figures_of
from rollout_engine.model import row_invariance
from rollout_engine.model.attention import ATTENTION_NAME
from rollout_engine.model.device import why_not


class Arithmetic(NamedTuple):
    """What is swapped in, and what is asked of the rest."""

    attention_name: str
    """Of Hugging Face's attention interface."""
    make_row_invariant: Callable[[nn.Module], None]
    """In place."""
    unproven_parts: Callable[[nn.Module], list[str]]
    """Of a causal LM so made: what may still compute a row otherwise than the engine."""
    figures_of: FiguresOf
    """Log-probs of given tokens."""


ON_HOST = Arithmetic(ATTENTION_NAME, row_invariance.make_row_invariant, row_invariance.unproven_parts, figures_of)


def arithmetic_of(device: torch.device) -> Arithmetic:
    """That of engines on `device`. Raises `ConfigError` where none can serve."""
    if device.type == "cpu":
        return ON_HOST
    if obstacle := why_not(device):
        raise ConfigError(
            f"A model on {device} cannot be exact: {obstacle}. Move it to the CPU, or provide what is missing."
        )
    return with_kernels()


def with_kernels() -> Arithmetic:
    """That of the Triton kernels; they are imported now, where there may be none elsewhere."""
    arithmetic: Arithmetic = importlib.import_module("rollout_engine.model.device.row_invariance").ON_DEVICE
    return arithmetic
