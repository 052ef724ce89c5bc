"""The mixers of a compiled decoder's layers, from the modules that compute them."""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from rollout_engine.kernels.cpu import delta_net, mamba, short_convolution
from rollout_engine.kernels.cpu.decoder import Mixer as Operands
from rollout_engine.model.cpu.row_invariance import RowInvariantGatedNorm
from rollout_engine.model.modules.decoder_structure import Mixer
from rollout_engine.model.modules.mamba_patterns import MambaPattern
from rollout_engine.model.modules.mixer_functions import KEY_EPSILON, LayerStates
from rollout_engine.model.modules.mixer_patterns import DeltaPattern
from rollout_engine.model.modules.short_convolution_patterns import ConvolutionPattern
from rollout_engine.model.modules.structure_checks import require
from rollout_engine.model.packing.module_types import tensor_of


def mixer_operands(mixer: Mixer, states: LayerStates | None) -> Operands:
    """The operands of a mixer over its states. Raises `UnsupportedStructure` if its norm is another one."""
    require(states is not None, "its states are not in slots")
    assert states is not None, "as required"
    match mixer.pattern:
        case DeltaPattern():
            return _delta_net(mixer, mixer.pattern, states)
        case MambaPattern():
            return _mamba(mixer, mixer.pattern, states)
        case ConvolutionPattern():
            return _short_convolution(mixer, mixer.pattern, states)


def mixer_owners(mixer: Mixer) -> list[Mapping[str, Tensor | None]]:
    """The tensors of a mixer other than those of its linears, by name."""
    parts = (mixer.module, mixer.convolution, mixer.norm)
    return [child._parameters for child in parts if child is not None]


def _delta_net(mixer: Mixer, pattern: DeltaPattern, states: LayerStates) -> delta_net.DeltaNet:
    norm, group_size = _gated_norm(mixer.norm)
    require(group_size == len(norm.weight) and not norm.is_gate_first, "the norm of its mixers has another gate")
    return delta_net.DeltaNet(
        columns=delta_net.DeltaColumns(list(_runs(pattern.convolved)), pattern.gates, pattern.betas, pattern.decays),
        conv_weight=_weight(mixer.convolution),
        conv_bias=_bias(mixer.convolution),
        a_log=tensor_of(mixer.module, "A_log"),
        dt_bias=tensor_of(mixer.module, "dt_bias"),
        norm=norm,
        num_groups=pattern.num_groups,
        key_epsilon=KEY_EPSILON,
        beta_factor=pattern.beta_factor,
        tails=states.convolutions[0],
        states=_recurrence(states),
    )


def _mamba(mixer: Mixer, pattern: MambaPattern, states: LayerStates) -> mamba.Mamba:
    norm, group_size = _gated_norm(mixer.norm)
    return mamba.Mamba(
        columns=mamba.MambaColumns(list(_runs(pattern.convolved)), pattern.gates, pattern.steps),
        conv_weight=_weight(mixer.convolution),
        conv_bias=_bias(mixer.convolution),
        a_log=tensor_of(mixer.module, "A_log"),
        dt_bias=tensor_of(mixer.module, "dt_bias"),
        skip=tensor_of(mixer.module, "D"),
        limits=pattern.limits,
        norm=norm,
        norm_size=group_size,
        num_groups=pattern.num_groups,
        tails=states.convolutions[0],
        states=_recurrence(states),
    )


def _short_convolution(
    mixer: Mixer, pattern: ConvolutionPattern, states: LayerStates
) -> short_convolution.ShortConvolution:
    return short_convolution.ShortConvolution(
        *(pattern.values, pattern.inputs, pattern.gates),
        weight=_weight(mixer.convolution),
        bias=_bias(mixer.convolution),
        tails=states.convolutions[0],
    )


def _gated_norm(norm: nn.Module | None) -> tuple[delta_net.GatedNorm, int]:
    """A gated norm, and the channels that it norms together."""
    assert isinstance(norm, RowInvariantGatedNorm), "the norms of mixers were replaced"
    options = norm._options
    require(options["activation"] == "silu", "the norm of its mixers has another gate")
    made = delta_net.GatedNorm(
        norm.weight.detach(), options["epsilon"], options["rounds_norm"], is_gate_first=options["gate_first"]
    )
    return made, options["group_size"]


def _weight(convolution: nn.Module) -> Tensor:
    return tensor_of(convolution).detach().squeeze(1)


def _bias(convolution: nn.Module) -> Tensor | None:
    bias: Tensor | None = getattr(convolution, "bias", None)
    return None if bias is None else bias.detach()


def _recurrence(states: LayerStates) -> Tensor:
    require(states.recurrence is not None, "its states are not in slots")
    assert states.recurrence is not None, "as required"
    return states.recurrence


def _runs(columns: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Channels whose columns are neighbours too: (first channel, first column, number)."""
    first = 0
    for channel in range(1, len(columns) + 1):
        if channel == len(columns) or columns[channel] != columns[channel - 1] + 1:
            yield first, columns[first], channel - first
            first = channel
