"""Layers that keep a state on a device: the kernels of their functions over tokens, and parts of exact ones.

An exact trainer has the same parts: gated norms, activations inside mixers, and zero-centred norms.
"""

from typing import Any

import torch
from torch import Tensor, nn

from rollout_engine.kernels import norm
from rollout_engine.kernels.state_kernels import StateKernels, TokenKernel
from rollout_engine.kernels.triton import convolution, recurrence, recurrence_backward
from rollout_engine.kernels.triton.gated_norm import gated_norm, l2_normalise
from rollout_engine.model.cuda.gradients import offset_norm_rows
from rollout_engine.model.modules.mixers import MixerConvolution, mixers_of, swap_mixers, use_state_kernels
from rollout_engine.model.modules.module_patterns import gated_norm_options
from rollout_engine.model.modules.own_forwards import OwnForward, RowScores, names_an_activation, swap_calls
from rollout_engine.model.packing.module_types import become

STATE_KERNELS = StateKernels(
    TokenKernel(recurrence.recur, recurrence_backward.find_gradients),
    TokenKernel(convolution.convolve, convolution.find_gradients),
    l2_normalise,
)
REPLACED = MixerConvolution
"""Modules whose weights of several rows are read by kernels."""


def make_mixers_exact(module: nn.Module, scores: RowScores) -> None:
    """Have every mixer below `module` call our functions over tokens, and replace the parts of mixers, in place."""
    swap_mixers(module)
    use_state_kernels(module, STATE_KERNELS)
    for mixer in mixers_of(module):
        for child in mixer.modules():
            if (options := gated_norm_options(child)) is not None:
                become(child, _GatedNorm)._options = options
            elif names_an_activation(child) and not isinstance(child, OwnForward):
                swap_calls(child, scores)  # before a gated norm is taken for a norm


class _GatedNorm(nn.Module):
    weight: Tensor
    _options: dict[str, Any]

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return norm.gated_rms_norm(hidden_states, gate, self.weight, **self._options, kernel=gated_norm)


class OffsetNorm(nn.Module):
    """`kernels.norm.offset_rms_norm` as a module."""

    weight: Tensor
    _epsilon: float

    def forward(self, x: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            return norm.offset_rms_norm(x, self.weight, self._epsilon, offset_norm_rows)
