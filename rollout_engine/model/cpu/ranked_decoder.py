"""The parts of a compiled decoder that the ranks of a cut model share."""

from torch import nn

from rollout_engine.kernels.cpu.decoder import Columns, DecoderRanks
from rollout_engine.model.modules.decoder_structure import DecoderStructure, UnsupportedStructure, mlp_of, require
from rollout_engine.model.ranks.cut import LinearCut, ModelCut
from rollout_engine.model.ranks.share import Share
from rollout_engine.model.ranks.shared_exchange import SharedExchange


def decoder_ranks(cut: ModelCut, structure: DecoderStructure) -> DecoderRanks:
    """This rank's columns of a decoder with `structure`.

    Raises `UnsupportedStructure` where its products are not all cut as the decoder computes them.
    """
    linears = {id(each.module): each for each in cut.linears}
    layers = [(layer, mlp_of(layer)) for layer in structure.layers]
    inputs = [_inputs(linears, [*layer.qkv, *mlp.gate_up], layer.out, mlp.down) for layer, mlp in layers]
    hidden = {linears[id(child)].share for layer, mlp in layers for child in (layer.out, mlp.down)}
    intermediate = {each[1] for each in inputs}
    require(len(hidden) == len(intermediate) == 1, "its layers differ in their sizes")
    exchange = cut.seat.exchange
    if not isinstance(exchange, SharedExchange):
        raise UnsupportedStructure("its ranks share no memory, being on several machines")
    return DecoderRanks(
        exchange.turns,
        exchange.decoder_memory,
        _columns(*hidden),
        _columns(*intermediate),
        [_columns(attended) for attended, _ in inputs],
    )


def _inputs(
    linears: dict[int, LinearCut], local: list[nn.Module], out: nn.Module, down: nn.Module
) -> tuple[Share, Share]:
    """The rank's share of what `out` and `down` read, where the products `local` before them are kept by each rank."""
    cuts = [linears.get(id(child)) for child in (*local, out, down)]
    *first, out_cut, down_cut = cuts
    if any(each is None or each.gathers for each in first) or out_cut is None or down_cut is None:
        raise UnsupportedStructure("its products are not cut by heads and columns")
    if out_cut.input_share is None or down_cut.input_share is None:
        raise UnsupportedStructure("its products are not cut by heads and columns")
    return out_cut.input_share, down_cut.input_share


def _columns(share: Share) -> Columns:
    return Columns(share.first, share.size, share.whole)
