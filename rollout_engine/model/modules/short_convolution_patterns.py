"""Recognises mixers that are a short convolution as LFM2's, by trial.

    in_proj -> columns of B, x -> B * x -> causal_conv1d_fn -> times the columns of C -> out_proj

The convolution and the linears are replaced by known ones. Outputs of the linear whose products are all different show
which column each of them reads.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rollout_engine.model.modules.forward_trial import (
    NUM_TOKENS,
    SCALES,
    Forward,
    require,
    require_same,
    unmatched_reason,
    waves,
)
from rollout_engine.model.modules.mixer_trial import CONVOLUTION, check_convolution, projection, with_functions
from rollout_engine.model.modules.mixers import Mixer
from rollout_engine.model.modules.state_geometry import StateGeometry


class ConvolutionPattern(NamedTuple):
    """How a mixer convolves."""

    reason: str | None
    """Why it does something else; None if it does not. Then there are columns, each the first of a block."""
    values: int = 0
    """Column of B, which x multiplies."""
    inputs: int = 0
    """Column of x."""
    gates: int = 0
    """Column of C, which multiplies the convolution's outputs."""


def convolution_pattern(mixer: nn.Module, state: StateGeometry) -> ConvolutionPattern:
    """The pattern of `mixer`, which keeps `state` of a sequence."""
    names, kind = dict(mixer.named_children()).keys(), type(mixer).__name__
    is_alone = state.recurrence is None and len(state.convolutions) == 1
    if names != {"in_proj", "conv", "out_proj"} or not isinstance(mixer, Mixer) or not is_alone:
        return ConvolutionPattern(f"{kind} has other parts")
    if mixer._parameters or mixer._buffers:
        return ConvolutionPattern(f"{kind} has tensors of its own")
    trial = _Trial(mixer)
    reason = unmatched_reason("short convolution", with_functions(mixer, {CONVOLUTION: trial.convolve}), trial.run)
    return ConvolutionPattern(reason) if reason is not None else ConvolutionPattern(None, *trial.columns)


class _Trial:
    """The parts of a mixer in its trial, which record their inputs."""

    def __init__(self, mixer: Any) -> None:
        self._mixer, self._size, self._width = mixer, len(mixer.conv.weight), mixer.in_proj.out_features
        self.columns = (0, 0, 0)
        """The first columns of B, x and C in the product of the input."""
        self._seen: list[Tensor] = []
        self._mixed = torch.empty(0)

    def run(self, forward: Forward) -> None:
        """Find the columns; then compare all values at several scales."""
        require(self._width == 3 * self._size, "projects to other columns than B, C and x")
        self._find_columns(forward)
        values, inputs, gates = self.columns
        for scale in SCALES:
            projected = waves(1, NUM_TOKENS, self._width, phase=0.3) * scale
            left = self._compute(forward, projected)
            product = self._block(projected, values) * self._block(projected, inputs)
            require_same(self._seen[0], product, "convolves something else than the product of two blocks")
            require_same(left, self._block(projected, gates) * self._mixed[0].t(), "gates its convolution otherwise")

    def _find_columns(self, forward: Forward) -> None:
        """Give each block in turn other values than ones; those of B and x are alike, and in their order."""
        found: dict[str, list[int]] = {"convolved": [], "left": []}
        for first in range(0, self._width, self._size):
            projected = torch.ones(1, NUM_TOKENS, self._width)
            self._block(projected, first).mul_(2 + torch.arange(self._size))
            left = self._compute(forward, projected)
            for name, got, plain in (("convolved", self._seen[0], 1.0), ("left", left, self._mixed[0].t())):
                if not torch.allclose(got, torch.ones_like(got) * plain):
                    found[name].append(first)
        require([len(each) for each in found.values()] == [2, 1], "reads its columns otherwise")
        self.columns = (*found["convolved"], *found["left"])  # type: ignore[assignment]  # three, as required

    def _block(self, projected: Tensor, first: int) -> Tensor:
        return projected[0, :, first : first + self._size]

    def _compute(self, forward: Forward, projected: Tensor) -> Tensor:
        """The input of the last linear [T, C], for these outputs [1, T, 3 C] of the first."""
        hidden, result, left = waves(1, NUM_TOKENS, 7, phase=0.8), object(), list[Tensor]()
        self._mixed = waves(1, self._size, NUM_TOKENS, phase=0.1) + 3
        self._seen.clear()

        def leave(x: Tensor) -> object:
            left.append(x[0])
            return result

        parts: dict[str, object] = {"in_proj": projection(hidden, projected), "out_proj": leave}
        require(forward(parts, hidden) is result and len(left) == 1, "changes its result")
        require(len(self._seen) == 1, "does not convolve once")
        return left[0]

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
    ) -> Tensor:
        """Replaces `causal_conv1d_fn`: x [1, C, T]."""
        require(activation is None, "has an activation behind its convolution")
        check_convolution(self._mixer.conv, weight, bias, others)
        self._seen.append(x[0].t())
        return self._mixed
