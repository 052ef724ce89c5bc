"""Recognises mixers that compute Mamba 2's recurrence as Bamba's and Granite 4's do, by trial.

    in_proj -> columns of x, B, C -> causal_conv1d_fn, SiLU -> mamba2_chunk_scan -> norm -> out_proj
               columns of dt      -> softplus(dt + dt_bias) within limits, A = -exp(A_log), D
               columns of a gate  -> the gate of the norm

The functions over tokens, the norm and the linears are replaced by known ones. Outputs of the linear that are all
different show which column each of them reads.
"""

from collections.abc import Callable
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
from rollout_engine.model.modules.mixer_trial import (
    CONVOLUTION,
    check_convolution,
    projection,
    require_harmless,
    with_functions,
)
from rollout_engine.model.modules.mixers import Mixer
from rollout_engine.model.modules.state_geometry import StateGeometry

_PARTS = {"in_proj", "conv1d", "norm", "out_proj"}
"""And perhaps an activation "act", which no forward reads: it names one to the convolution."""
_VECTORS = ("A_log", "D", "dt_bias")
_RECURRENCE = "mamba2_chunk_scan"


class MambaPattern(NamedTuple):
    """How a mixer computes Mamba 2's recurrence."""

    reason: str | None
    """Why it computes something else; None if it does not. Then there are columns."""
    num_groups: int = 0
    """Heads of B and C."""
    convolved: tuple[int, ...] = ()
    """Column of each channel of the convolution: of x, B and C."""
    gates: int = 0
    """Column of the gate of the first channel; those of the others follow."""
    steps: tuple[int, ...] = ()
    """Column of each head's dt."""
    limits: tuple[float, float] = (0.0, float("inf"))
    """The least and the largest step, behind softplus."""


def mamba_pattern(mixer: nn.Module, state: StateGeometry) -> MambaPattern:
    """The pattern of `mixer`, which keeps `state` of a sequence."""
    names, kind = dict(mixer.named_children()).keys(), type(mixer).__name__
    if (
        names - {"act"} != _PARTS
        or not isinstance(mixer, Mixer)
        or state.recurrence is None
        or len(state.convolutions) != 1
    ):
        return MambaPattern(f"{kind} has other parts")
    if {name for name, _ in mixer.named_parameters(recurse=False)} != {*_VECTORS} or mixer._buffers:
        return MambaPattern(f"{kind} has other tensors of its own")
    trial = _Trial(mixer, state.recurrence)
    functions: dict[str, Callable[..., Any]] = {CONVOLUTION: trial.convolve, _RECURRENCE: trial.recur}
    reason = unmatched_reason("Mamba 2", with_functions(mixer, functions), trial.run)
    if reason is not None:
        return MambaPattern(reason)
    return MambaPattern(None, trial.num_groups, trial.convolved, trial.gates, trial.steps, trial.limits)


class _Trial:
    """The parts of a mixer in its trial, which record their inputs."""

    def __init__(self, mixer: Any, sizes: tuple[int, int, int]) -> None:
        self._mixer, self._width = mixer, mixer.in_proj.out_features
        self._num_heads, self._key_size, self._value_size = sizes
        self._size = self._num_heads * self._value_size
        self.num_groups, self.gates = 0, 0
        self.convolved: tuple[int, ...] = ()
        self.steps: tuple[int, ...] = ()
        self.limits = (0.0, float("inf"))
        self._seen: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}

    def run(self, forward: Forward) -> None:
        """Find the columns; then compare all values at several scales."""
        numbers = torch.arange(self._width, dtype=torch.float32).expand(1, NUM_TOKENS, self._width)
        self._compute(forward, numbers)
        found = {name: tuple(each[0].round().int().tolist()) for name, each in self._seen.items()}
        self.convolved, self.steps, self.gates = found["convolved"], found["steps"], found["gates"][0]
        gates = range(self.gates, self.gates + self._size)
        require(found["gates"] == tuple(gates), "reads gates that are no neighbours")
        for scale in SCALES:
            projected = waves(1, NUM_TOKENS, self._width, phase=0.3) * scale
            self._compute(forward, projected, scale)
            for name, columns in (("convolved", self.convolved), ("gates", gates), ("steps", self.steps)):
                require_same(self._seen[name], projected[0, :, list(columns)], f"changes its {name}")

    def _compute(self, forward: Forward, projected: Tensor, scale: float = 1.0) -> None:
        """Run the forward over these outputs of its linear, [1, T, N], and check the tensors that it passes on.

        `scale`: the size of the results of its other parts.
        """
        hidden, seen, result = waves(1, NUM_TOKENS, 7, phase=0.8), self._seen, object()
        core = waves(1, NUM_TOKENS, self._num_heads, self._value_size, phase=0.2) * scale
        mixed = waves(1, len(self._mixer.conv1d.weight), NUM_TOKENS, phase=0.1) * scale
        vectors = {
            name: waves(self._num_heads, phase=phase) for name, phase in zip(_VECTORS, (0.5, 0.6, 0.7), strict=True)
        }
        self._given = {"mixed": mixed, "core": core} | vectors
        normed = waves(1, NUM_TOKENS, self._size, phase=0.4) * scale
        seen.clear()

        def norm(x: Tensor, gate: Tensor) -> Tensor:
            require_same(x, core.flatten(2), "norms something else than its recurrence")
            seen["gates"] = gate[0]
            return normed.clone()

        def leave(x: Tensor) -> object:
            require_same(x, normed, "projects something else than its norm")
            return result

        parts: dict[str, object] = {"in_proj": projection(hidden, projected), "norm": norm, "out_proj": leave}
        require(forward(parts | vectors, hidden) is result, "changes its result")
        require(seen.keys() == {"gates", "convolved", "steps"}, "leaves a part out")

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **others: Any
    ) -> Tensor:
        """Replaces `causal_conv1d_fn`: x [1, C, T]."""
        require(activation in ("silu", "swish"), "has no SiLU behind its convolution")
        check_convolution(self._mixer.conv1d, weight, bias, others)
        require("convolved" not in self._seen, "convolves twice")
        self._seen["convolved"] = x[0].t()
        return self._given["mixed"]

    def recur(
        self,
        x: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        chunk_size: int,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **others: Any,
    ) -> Tensor:
        """Replaces `mamba2_chunk_scan`: x [1, T, H, V], dt [1, T, H], A [H], B and C [1, T, G, K], D [H]."""
        require(dt_softplus, "has steps without softplus")
        require_harmless(others)
        given, keys = self._given, B.shape[2] * B.shape[3]
        parts = given["mixed"][0].t().split([self._size, keys, keys], 1)
        for name, found, part in zip("xBC", (x, B, C), parts, strict=True):
            require_same(found.flatten(2)[0], part, f"gives its recurrence another {name}")
        require(x.shape[2:] == (self._num_heads, self._value_size), "has values of another size")
        require(B.shape == C.shape and B.shape[3] == self._key_size, "has keys of another size")
        require(D is given["D"] and dt_bias is given["dt_bias"], "gives its recurrence other vectors")
        require_same(A, -given["A_log"].exp(), "has other decays")
        require("steps" not in self._seen, "has two recurrences")
        self.num_groups, self.limits = B.shape[2], (float(dt_limit[0]), float(dt_limit[1]))
        self._seen["steps"] = dt[0]
        return given["core"]
