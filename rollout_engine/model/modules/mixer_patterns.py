"""Recognises mixers that compute the gated delta rule as Qwen3-Next's, Qwen3.5's and OLMo Hybrid's do, by trial.

    two to six linears  -> columns of q, k, v -> causal_conv1d_fn, SiLU -> the gated delta rule -> norm -> out_proj
                           columns of b, a    -> sigmoid(b), or twice that, -exp(A_log) softplus(a + dt_bias)
                           columns of z       -> the gate of the norm

The functions over tokens, the norm and the linears are replaced by known ones. Outputs of the linears that are all
different show which column each of them reads.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
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

_RECURRENCE = "torch_chunk_gated_delta_rule"


class _Names(NamedTuple):
    """Names of the parts of a mixer, other than its convolution."""

    inputs: tuple[str, ...]
    """Linears of its input."""
    norm: str = "norm"
    out: str = "out_proj"


_NAMES = (
    _Names(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
    _Names(("in_proj_qkvz", "in_proj_ba")),
    _Names(("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj"), "o_norm", "o_proj"),
)
"""Those of Qwen3.5, Qwen3-Next and OLMo Hybrid."""


class DeltaPattern(NamedTuple):
    """How a mixer computes the gated delta rule."""

    reason: str | None
    """Why it computes something else; None if it does not. Then there are columns."""
    inputs: Sequence[str] = ()
    """Names of the linears of its input, whose outputs, side by side, have the columns."""
    num_groups: int = 0
    """Heads of q and k."""
    convolved: Sequence[int] = ()
    """Column of each channel of the convolution: of q, k and v."""
    gates: Sequence[int] = ()
    """First column of the gate of each head, whose columns are neighbours."""
    betas: Sequence[int] = ()
    """Column of each head's b."""
    decays: Sequence[int] = ()
    """Column of each head's a."""
    beta_factor: float = 1.0
    """Multiplies the sigmoids of b."""
    norm: str = "norm"
    """Name of the norm behind the rule."""
    out: str = "out_proj"
    """Name of the last linear."""


def delta_pattern(mixer: nn.Module, state: StateGeometry) -> DeltaPattern:
    """The pattern of `mixer`, which keeps `state` of a sequence."""
    children, kind = dict(mixer.named_children()).keys(), type(mixer).__name__
    names = next((each for each in _NAMES if children == {*each.inputs, each.norm, each.out, "conv1d"}), None)
    if names is None or not isinstance(mixer, Mixer) or state.recurrence is None or len(state.convolutions) != 1:
        return DeltaPattern(f"{kind} has other parts")
    if {name for name, _ in mixer.named_parameters(recurse=False)} != {"A_log", "dt_bias"} or mixer._buffers:
        return DeltaPattern(f"{kind} has other tensors of its own")
    trial = _Trial(names, mixer, state.recurrence)
    functions: dict[str, Callable[..., Any]] = {CONVOLUTION: trial.convolve, _RECURRENCE: trial.recur}
    reason = unmatched_reason("delta rule", with_functions(mixer, functions), trial.run)
    if reason is not None:
        return DeltaPattern(reason)
    columns = trial.convolved, trial.gates, trial.betas, trial.decays
    return DeltaPattern(None, names.inputs, trial.num_groups, *columns, trial.beta_factor, names.norm, names.out)


class _Trial:
    """The parts of a mixer in its trial, which record their inputs."""

    def __init__(self, names: _Names, mixer: Any, sizes: tuple[int, int, int]) -> None:
        self._mixer, self._names = mixer, names
        self._num_heads, self._key_size, self._value_size = sizes
        self._widths = [mixer._modules[name].out_features for name in names.inputs]
        self.beta_factor = 2.0 if getattr(mixer, "allow_neg_eigval", False) else 1.0
        self.num_groups = 0
        self.convolved: list[int] = []
        self.gates: list[int] = []
        self.betas: list[int] = []
        self.decays: list[int] = []
        self._seen: dict[str, Tensor] = {}
        self._given: dict[str, Tensor] = {}

    def run(self, forward: Forward) -> None:
        """Find the columns; then compare all values at several scales."""
        self._find_columns(forward)
        for scale in SCALES:
            projected = waves(1, NUM_TOKENS, sum(self._widths), phase=0.3) * scale
            rates, biases = (waves(self._num_heads, phase=phase) for phase in (0.5, 0.7))
            self._compute(forward, projected, rates, biases, scale)
            for name, columns in (("convolved", self.convolved), ("gate", self._gate_columns())):
                require_same(self._seen[name], projected[0, :, columns], f"changes its {name} inputs")
            betas = torch.sigmoid(projected[0, :, self.betas]) * self.beta_factor
            require_same(self._seen["beta"], betas, "has other rates of writing")
            steps = F.softplus(projected[0, :, self.decays] + biases)
            require_same(self._seen["decay"], -rates.exp() * steps, "has other decays")

    def _find_columns(self, forward: Forward) -> None:
        count = sum(self._widths)
        numbers = torch.arange(count, dtype=torch.float32).expand(1, NUM_TOKENS, count)
        zeros = torch.zeros(self._num_heads)
        self._compute(forward, numbers.clone(), zeros, zeros)
        self.convolved = self._seen["convolved"][0].round().int().tolist()
        gates = self._seen["gate"][0].round().int().tolist()
        self.gates = gates[:: self._value_size]
        require(gates == self._gate_columns(), "reads gates that are no neighbours")
        small = numbers / count * 4 - 2  # numbers whose sigmoids and softpluses can be inverted
        self._compute(forward, small, zeros, zeros)
        beta, decay = self._seen["beta"][0].double() / self.beta_factor, self._seen["decay"][0].double()
        for name, found in (("betas", torch.logit(beta)), ("decays", torch.log(torch.expm1(-decay)))):
            columns = ((found + 2) / 4 * count).round()
            require(bool(((columns >= 0) & (columns < count)).all()), "has other gates")
            setattr(self, name, columns.int().tolist())

    def _gate_columns(self) -> list[int]:
        return [first + i for first in self.gates for i in range(self._value_size)]

    def _compute(self, forward: Forward, projected: Tensor, rates: Tensor, biases: Tensor, scale: float = 1.0) -> None:
        """Run the forward over these outputs of its linears, [1, T, N], and check the tensors that it passes on.

        `scale`: the size of the results of its other parts.
        """
        hidden, seen = waves(1, NUM_TOKENS, 7, phase=0.8), self._seen
        shape = NUM_TOKENS, self._num_heads, self._value_size
        channels = 2 * self._key_channels() + shape[1] * shape[2]
        mixed, core = (waves(1, *sizes, phase=0.1) * scale for sizes in ((channels, NUM_TOKENS), shape))
        normed, result = waves(shape[0] * shape[1], shape[2], phase=0.4) * scale, object()
        self._given = {"mixed": mixed, "core": core}
        seen.clear()

        def norm(x: Tensor, gate: Tensor) -> Tensor:
            require_same(x, core.flatten(0, 2), "norms something else than its recurrence")
            seen["gate"] = gate.reshape(NUM_TOKENS, -1)
            return normed.clone()

        def leave(x: Tensor) -> object:
            require_same(x, normed.reshape(1, NUM_TOKENS, -1), "projects something else than its norm")
            return result

        names = self._names
        parts: dict[str, object] = {names.norm: norm, names.out: leave, "A_log": rates, "dt_bias": biases}
        linears = (projection(hidden, part) for part in projected.split(self._widths, 2))
        parts |= zip(names.inputs, linears, strict=True)
        require(forward(parts, hidden) is result, "changes its result")
        require(seen.keys() == {"gate", "convolved", "beta", "decay"}, "leaves a part out")

    def _key_channels(self) -> int:
        """Channels of q, and of k."""
        channels = self._mixer.conv1d.weight.shape[0] - self._num_heads * self._value_size
        require(channels % 2 == 0, "convolves other channels than q, k and v")
        return int(channels // 2)

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
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, None]:
        """Replaces the gated delta rule: q and k [1, T, G, K], v [1, T, H, V], g and beta [1, T, H]."""
        require(use_qk_l2norm_in_kernel, "does not normalise queries and keys")
        require_harmless({name: given for name, given in others.items() if name != "chunk_size"})
        mixed, keys = self._given["mixed"][0].t(), self._key_channels()
        parts = mixed.split([keys, keys, mixed.shape[1] - 2 * keys], 1)
        for name, given, part in zip("qkv", (query, key, value), parts, strict=True):
            require_same(given.flatten(2)[0], part, f"gives its recurrence another {name}")
        require(query.shape[3] == key.shape[3] == self._key_size, "has keys of another size")
        require(value.shape[2:] == (self._num_heads, self._value_size), "has values of another size")
        require("beta" not in self._seen, "has two recurrences")
        self.num_groups = query.shape[2]
        self._seen["beta"], self._seen["decay"] = beta[0], g[0]
        return self._given["core"], None
