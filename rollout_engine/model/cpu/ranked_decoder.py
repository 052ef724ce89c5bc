"""The parts of a compiled decoder that the ranks of a cut model share."""

from typing import NamedTuple

from torch import nn

from rollout_engine.kernels.cpu.decoder import Columns, DecoderRanks
from rollout_engine.model.modules.decoder_structure import DecoderStructure
from rollout_engine.model.modules.feed_forwards import MLP, Mixture
from rollout_engine.model.modules.structure_checks import UnsupportedStructure, require
from rollout_engine.model.ranks.cut import LinearCut, ModelCut
from rollout_engine.model.ranks.share import Share
from rollout_engine.model.ranks.shared_exchange import SharedExchange


def decoder_ranks(cut: ModelCut, structure: DecoderStructure) -> DecoderRanks:
    """This rank's columns of a decoder with `structure`.

    Raises `UnsupportedStructure` if its products are not all cut as the decoder computes them.
    """
    linears = {id(each.module): each for each in cut.linears}
    mlps = [layer.mlp for layer in structure.layers if isinstance(layer.mlp, MLP)]
    attended = [_input(linears, layer.qkv, layer.out) for layer in structure.layers if layer.out is not None]
    intermediate = {_input(linears, mlp.gate_up, mlp.down) for mlp in mlps} or {Share.all(0)}
    mixtures = [layer.mlp for layer in structure.layers if isinstance(layer.mlp, Mixture)]
    cut_shared = [each.shared for each in mixtures if each.shared is not None and id(each.shared.down) in linears]
    downs = [mlp.down for mlp in (*mlps, *cut_shared)]
    outs = [layer.out for layer in structure.layers if layer.out is not None]
    hidden = {linears[id(child)].share for child in (*outs, *downs)}
    require(len(hidden) == len(intermediate) == 1, "its layers differ in their sizes")
    require(all(mixture.latents is None for mixture in mixtures), "its experts have latents")
    experts = {id(child) for child, _ in cut.experts}
    require(all(id(mixture.experts) in experts for mixture in mixtures), "its experts are not cut as wholes")
    exchange = cut.seat.exchange
    if not isinstance(exchange, SharedExchange):
        raise UnsupportedStructure("its ranks share no memory, being on several machines")
    return DecoderRanks(
        exchange.turns,
        exchange.decoder_memory,
        _columns(*hidden),
        _columns(*intermediate),
        [_columns(each) for each in attended],
    )


class SharedColumns(NamedTuple):
    """The columns of a mixture's shared expert that a rank computes."""

    inner: Columns
    """The columns of gate and up that the rank computes."""
    outer: Columns
    """The columns of down that the rank computes: its own of the hidden size, or all."""


def shared_columns(cut: ModelCut | None, mlp: MLP | Mixture | None) -> SharedColumns | None:
    """Those of the shared expert of `mlp`; None if there is none, or every rank computes all of it.

    Raises `UnsupportedStructure` if its products are cut otherwise than the decoder computes them.
    """
    if cut is None or not isinstance(mlp, Mixture) or mlp.shared is None:
        return None
    linears = {id(each.module): each for each in cut.linears}
    require(mlp.shared_gate is None or id(mlp.shared_gate) not in linears, "the gate of its shared expert is cut")
    parts = [*mlp.shared.gate_up, mlp.shared.down]
    if not any(id(child) in linears for child in parts):
        return None
    inner = _input(linears, mlp.shared.gate_up, mlp.shared.down)
    return SharedColumns(_columns(inner), _columns(linears[id(mlp.shared.down)].share))


def _input(linears: dict[int, LinearCut], local: list[nn.Module], last: nn.Module) -> Share:
    """The rank's share of the input of `last`, if the products `local` before it are kept by each rank."""
    cuts, last_cut = [linears.get(id(child)) for child in local], linears.get(id(last))
    are_local = all(each is not None and each.result == "kept" for each in cuts)
    if not are_local or last_cut is None or last_cut.input_share is None:
        raise UnsupportedStructure("its products are not cut by heads and columns")
    return last_cut.input_share


def _columns(share: Share) -> Columns:
    return Columns(share.first, share.size, share.whole)
