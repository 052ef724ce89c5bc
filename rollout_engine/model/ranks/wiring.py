"""Connects the parts of a module that is cut over ranks: joins the ranks' parts of a product's inputs and outputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rollout_engine.base.errors import ConfigError
from rollout_engine.model.modules.mixer_functions import OwnHeads, give_own_heads
from rollout_engine.model.ranks.cut import LinearCut, ModelCut
from rollout_engine.model.ranks.divided_experts import DividedExperts
from rollout_engine.model.ranks.seat import Seat
from rollout_engine.model.ranks.share import Share


def connect(module: Any, cut: ModelCut, *, replaced_experts: bool = True) -> None:
    """Make the forward of `module`, whose linears have been replaced, that of all ranks together.

    `replaced_experts`: whether its experts have been too; else they are transformers' own, and the ranks' outputs are
    added up.
    """
    for each in cut.linears:
        _connect_linear(each, cut.seat)
    for mixer, heads in cut.mixers:
        _connect_mixer(mixer, heads, cut)
    child: Any
    for child, share in cut.experts:
        if cut.group is not None:
            child._divided = DividedExperts(cut.group, child, share)
            continue
        child._own_experts = own = OwnExperts(cut.seat, share)
        if not replaced_experts:
            if hasattr(child, "gate_up_proj_bias"):  # transformers' own loop over these refuses experts of other ranks
                raise ConfigError(
                    f"tensor_parallel_size: the experts of {type(child).__name__} have biases, and such experts "
                    "are cut on a CPU only. Leave it out."
                )
            child.num_experts, child._is_expert_parallel = share.size, True
            child.register_forward_pre_hook(own.before)
            child.register_forward_hook(own.after)
    if cut.embedding is not None:
        embedding: Any = cut.embedding[0]
        embedding._own_rows = rows = OwnRows(cut.seat, cut.embedding[1])
        embedding.register_forward_pre_hook(rows.before)
        embedding.register_forward_hook(rows.after)


def _connect_mixer(mixer: Any, heads: Share, cut: ModelCut) -> None:
    state = cut.geometry[mixer.layer_idx].state
    assert state is not None and state.recurrence is not None, "it has been cut by heads"
    size = state.recurrence[2]
    gather_columns = cut.seat.exchange.gathering(heads.times(size))

    def gather(part: Tensor) -> Tensor:
        return gather_columns(part.flatten(1)).view(-1, heads.whole, size)

    give_own_heads(mixer, OwnHeads(heads.first, heads.stop, gather))


class Joins(NamedTuple):
    """How the parts of ranks become whole rows around a product."""

    input: Callable[[Tensor], Tensor] | None
    """Gathers the product's input; None if it reads the rank's own part."""
    output: Callable[[Tensor], Tensor] | None
    """Gathers the product's output, or adds it up; None if each rank keeps its own."""


def joins_of(linear: nn.Module) -> Joins:
    """The joins around a linear, which may not be cut."""
    found: Joins = getattr(linear, "_joins", Joins(None, None))
    return found


def _connect_linear(cut: LinearCut, seat: Seat) -> None:
    exchange = seat.exchange
    join_input: Callable[[Tensor], Tensor] | None = None
    join_output: Callable[[Tensor], Tensor] | None = None
    if cut.input_share is not None and cut.result != "added":
        join_input = exchange.gathering(cut.input_share)
    if cut.result != "kept":
        join_output = exchange.add_up if cut.result == "added" else exchange.gathering(cut.share)
    if join_input is not None:
        cut.module.register_forward_pre_hook(lambda _, given: (join_input(given[0]),))
    if join_output is not None:
        cut.module.register_forward_hook(lambda _, given, out: join_output(out))
    linear: Any = cut.module
    linear._joins = Joins(join_input, join_output)


class OwnExperts:
    """The experts of a mixture that this rank computes."""

    def __init__(self, seat: Seat, share: Share) -> None:
        self._exchange, self.share, self.splits_sums = seat.exchange, share, seat.splits_sums

    def is_own(self, experts: Tensor) -> Tensor:
        """Whether each expert, by its number, is computed on this rank: integers -> bool, of the same shape."""
        return (experts >= self.share.first) & (experts < self.share.stop)

    def before(self, module: nn.Module, given: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor] | None:
        """Hook before the forward of transformers' experts: number own ones from 0, and all others behind them."""
        if not module._is_expert_parallel:  # it has been replaced since, by one that handles ranks
            return None
        x, experts, weights = given
        is_own = self.is_own(experts)
        return x, (experts - self.share.first).where(is_own, self.share.size), weights.masked_fill(~is_own, 0.0)

    def after(self, module: nn.Module, given: tuple[Any, ...], out: Tensor) -> Tensor:
        """Hook after the forward of transformers' experts: add up the outputs of all ranks."""
        return self.add_up(out) if module._is_expert_parallel else out

    def merge(self, outputs: Tensor, experts: Tensor) -> Tensor:
        """Outputs [T * k, H] of experts [T, k] on all ranks; of `outputs`, only rows of this rank's own are read."""
        return self._exchange.merge_rows(outputs, self.is_own(experts).flatten())

    def add_up(self, sums: Tensor) -> Tensor:
        """Weighted sums [T, H] over all experts, from those over the own ones, which may be overwritten."""
        return self._exchange.add_up(sums)

    def gather(self, outputs: list[Tensor], like: Tensor, counts: list[int]) -> Tensor:
        """All rows [T * k, H], sorted by expert, of which `outputs` are those of the own experts; `counts` [E]."""
        part = torch.cat(outputs) if outputs else like[:0]
        return self._exchange.gather_rows(part, sum(counts[: self.share.first]), sum(counts))


class OwnRows:
    """An embedding of which each rank has some rows: those of other ranks are fetched from them."""

    def __init__(self, seat: Seat, share: Share) -> None:
        self._exchange, self._share = seat.exchange, share
        self._is_own: Tensor | None = None

    def look_up(self, ids: Tensor, table: Tensor) -> Tensor:
        """Rows [T, H] of ids int64 [T], in the whole table of which this rank has `table`."""
        local, is_own = self._local(ids)
        return self._exchange.merge_rows(F.embedding(local, table), is_own)

    def before(self, module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor]:
        """Hook before the forward of the embedding."""
        local, self._is_own = self._local(given[0])
        return (local,)

    def after(self, module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """Hook after it."""
        is_own, self._is_own = self._is_own, None
        assert is_own is not None, "the ids were seen before"
        return self._exchange.merge_rows(out.view(-1, out.shape[-1]), is_own.view(-1)).view(out.shape)

    def _local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(Places in the own table, whether they are of these ids)."""
        is_own = (ids >= self._share.first) & (ids < self._share.stop)
        return (ids - self._share.first).clamp(0, self._share.size - 1), is_own
