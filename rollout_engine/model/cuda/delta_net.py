"""The gated delta rule of a fused layer: the kernels that modules on a device call, in the order of their forward.

columns of q, k, v -> convolution, SiLU -> q / |q|, k / |k|, v -> recurrence -> norm with the gate z
columns of b, a    -> sigmoid(b), -exp(A_log) softplus(a + dt_bias)
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.activation import sigmoid, softplus
from rollout_engine.kernels.state_chunks import ChunkTensors
from rollout_engine.kernels.triton.convolution import convolve
from rollout_engine.kernels.triton.gated_norm import gated_norm, l2_normalise
from rollout_engine.kernels.triton.recurrence import recur
from rollout_engine.model.modules import decoder_structure as structure
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.mixer_functions import KEY_EPSILON, LayerStates
from rollout_engine.model.modules.mixer_patterns import DeltaPattern
from rollout_engine.model.modules.module_patterns import gated_norm_options
from rollout_engine.model.modules.structure_checks import UnsupportedStructure, require
from rollout_engine.model.packing.module_types import tensor_of

Columns = slice | Tensor
"""Columns of projected rows: neighbours, or int64 numbers."""


class DeltaNet(NamedTuple):
    """Operands of one layer; weights are read from the memory that updates write."""

    convolved: Columns
    """The columns of q, k and v, in the order of the convolution's channels."""
    gates: Columns
    """[H * V]."""
    betas: Columns
    decays: Columns
    weight: Tensor
    """[C, W] of the convolution."""
    bias: Tensor | None
    """[C]."""
    a_log: Tensor
    """[H]."""
    dt_bias: Tensor
    """[H]."""
    norm: Tensor
    """[V]."""
    norm_options: dict[str, Any]
    num_groups: int
    beta_factor: float
    """Multiplies the sigmoids of b: 1 or 2, which rounds nothing."""
    sizes: tuple[int, int, int]
    """Heads, channels of a key, channels of a value."""

    def compute(self, projected: Tensor, states: LayerStates, chunks: ChunkTensors) -> Tensor:
        """Rows [T, N] of the input's projections -> [T, H * V], over the states in their slots."""
        num_heads, key_size, value_size = self.sizes
        of_keys = self.num_groups * key_size
        mixed = _take(projected, self.convolved)
        mixed = convolve(mixed, self.weight, self.bias, silu=True, chunks=chunks, states=states.convolutions[0])
        q, k, v = mixed.split([of_keys, of_keys, num_heads * value_size], 1)
        q, k = (l2_normalise(x.unflatten(1, (-1, key_size)), KEY_EPSILON) for x in (q, k))
        rates = sigmoid(_take(projected, self.betas)).float() * self.beta_factor
        decays = -self.a_log.float().exp() * softplus(_take(projected, self.decays).float() + self.dt_bias)
        rule: dict[str, Any] = {"delta": True, "scale": key_size**-0.5, "chunks": chunks, "states": states.recurrence}
        out = recur(q, k, v.unflatten(1, (-1, value_size)), decays.float(), rates, None, **rule)
        gate = _take(projected, self.gates).unflatten(1, (-1, value_size))
        return gated_norm(out, gate, self.norm, **self.norm_options).flatten(1)


def delta_operands(delta: structure.Mixer, geometry: LayerGeometry) -> DeltaNet:
    """The operands of a mixer. Raises `UnsupportedStructure` if it has no delta rule, or a norm without a gate."""
    pattern, state, norm = delta.pattern, geometry.state, delta.norm
    if not isinstance(pattern, DeltaPattern) or norm is None:
        raise UnsupportedStructure(f"{type(delta.module).__name__} has no gated delta rule")
    require("q_proj" not in pattern.inputs, f"{type(delta.module).__name__} multiplies by q, k and v at once")
    require(pattern.beta_factor in (1.0, 2.0), f"{type(delta.module).__name__} has other rates of writing")
    options = gated_norm_options(norm)
    if options is None:
        raise UnsupportedStructure(f"{type(norm).__name__} is not RMSNorm with a gate")
    assert state is not None and state.recurrence is not None, "the pattern is that of a recurrence"
    weight, bias = tensor_of(delta.convolution).detach(), getattr(delta.convolution, "bias", None)
    gates, device = [first + i for first in pattern.gates for i in range(state.recurrence[2])], weight.device
    activation = options.pop("activation")
    return DeltaNet(
        convolved=_columns(pattern.convolved, device),
        gates=_columns(gates, device),
        betas=_columns(pattern.betas, device),
        decays=_columns(pattern.decays, device),
        weight=weight.squeeze(1),
        bias=None if bias is None else bias.detach(),
        a_log=tensor_of(delta.module, "A_log").detach(),
        dt_bias=tensor_of(delta.module, "dt_bias").detach(),
        norm=tensor_of(norm).detach(),
        norm_options=options | {"is_sigmoid": activation == "sigmoid"},
        num_groups=pattern.num_groups,
        beta_factor=pattern.beta_factor,
        sizes=state.recurrence,
    )


def _columns(numbers: Sequence[int], device: torch.device) -> Columns:
    first = numbers[0]
    if list(numbers) == list(range(first, first + len(numbers))):
        return slice(first, first + len(numbers))
    return torch.tensor(numbers, dtype=torch.int64, device=device)


def _take(rows: Tensor, columns: Columns) -> Tensor:
    return rows[:, columns] if isinstance(columns, slice) else rows.index_select(1, columns)
