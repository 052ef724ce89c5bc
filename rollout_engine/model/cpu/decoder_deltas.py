"""The gated delta rule of a compiled decoder's layers, from the modules that compute it."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from rollout_engine.kernels.cpu import delta_net as compiled
from rollout_engine.model.cpu.row_invariance import RowInvariantGatedNorm
from rollout_engine.model.modules.decoder_structure import DeltaNet, require
from rollout_engine.model.modules.mixer_functions import KEY_EPSILON, LayerStates
from rollout_engine.model.packing.module_types import tensor_of


def delta_net(delta: DeltaNet, states: LayerStates | None) -> compiled.DeltaNet:
    """The operands of a mixer over its states. Raises `UnsupportedStructure` if its norm is another one."""
    norm, pattern, convolution = delta.norm, delta.pattern, delta.convolution
    assert isinstance(norm, RowInvariantGatedNorm), "the norms of mixers were replaced"
    options, weight = norm._options, norm.weight.detach()
    is_known = options["group_size"] == len(weight) and not options["gate_first"] and options["activation"] == "silu"
    require(is_known, "the norm of its mixers has another gate")
    require(states is not None and states.recurrence is not None, "its states are not in slots")
    assert states is not None and states.recurrence is not None, "as required"
    bias = getattr(convolution, "bias", None)
    return compiled.DeltaNet(
        columns=compiled.DeltaColumns(list(_runs(pattern.convolved)), pattern.gates, pattern.betas, pattern.decays),
        conv_weight=tensor_of(convolution).detach().squeeze(1),
        conv_bias=None if bias is None else bias.detach(),
        a_log=tensor_of(delta.module, "A_log"),
        dt_bias=tensor_of(delta.module, "dt_bias"),
        norm=compiled.GatedNorm(weight, options["epsilon"], options["rounds_norm"]),
        num_groups=pattern.num_groups,
        key_epsilon=KEY_EPSILON,
        tails=states.convolutions[0],
        states=states.recurrence,
    )


def delta_owners(delta: DeltaNet) -> list[Mapping[str, Tensor | None]]:
    """The tensors of a mixer other than those of its linears, by name."""
    return [child._parameters for child in (delta.module, delta.convolution, delta.norm)]


def _runs(columns: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Channels whose columns are neighbours too: (first channel, first column, number)."""
    first = 0
    for channel in range(1, len(columns) + 1):
        if channel == len(columns) or columns[channel] != columns[channel - 1] + 1:
            yield first, columns[first], channel - first
            first = channel
