"""The parts of a compiled decoder that the ranks of a cut model share."""

from torch import nn

from rollout_engine.kernels.cpu.decoder import Columns, DecoderRanks
from rollout_engine.model.modules.decoder_structure import (
    MLP,
    DecoderStructure,
    Mixture,
    UnsupportedStructure,
    require,
)
from rollout_engine.model.ranks.cut import LinearCut, ModelCut
from rollout_engine.model.ranks.share import Share
from rollout_engine.model.ranks.shared_exchange import SharedExchange


def decoder_ranks(cut: ModelCut, structure: DecoderStructure) -> DecoderRanks:
    """This rank's columns of a decoder with `structure`.

    Raises `UnsupportedStructure` if its products are not all cut as the decoder computes them.
    """
    linears = {id(each.module): each for each in cut.linears}
    mlps = [layer.mlp for layer in structure.layers if isinstance(layer.mlp, MLP)]
    attended = [_input(linears, layer.qkv, layer.out) for layer in structure.layers]
    intermediate = {_input(linears, mlp.gate_up, mlp.down) for mlp in mlps} or {Share.all(0)}
    hidden = {
        linears[id(child)].share for child in (*(layer.out for layer in structure.layers), *(m.down for m in mlps))
    }
    require(len(hidden) == len(intermediate) == 1, "its layers differ in their sizes")
    experts = {id(child) for child, _ in cut.experts}
    mixtures = [layer.mlp for layer in structure.layers if isinstance(layer.mlp, Mixture)]
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


def _input(linears: dict[int, LinearCut], local: list[nn.Module], last: nn.Module) -> Share:
    """The rank's share of the input of `last`, if the products `local` before it are kept by each rank."""
    cuts, last_cut = [linears.get(id(child)) for child in local], linears.get(id(last))
    are_local = all(each is not None and each.result == "kept" for each in cuts)
    if not are_local or last_cut is None or last_cut.input_share is None:
        raise UnsupportedStructure("its products are not cut by heads and columns")
    return last_cut.input_share


def _columns(share: Share) -> Columns:
    return Columns(share.first, share.size, share.whole)
