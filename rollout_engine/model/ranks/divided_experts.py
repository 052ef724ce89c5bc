"""Experts of a mixture that are divided over the engines of a group: each has some of every layer's, and all else."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_engine.model.modules.expert_patterns import EXPERT_BIASES, EXPERT_MATRICES
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.ranks.cut import ModelCut, replace_parameters
from rollout_engine.model.ranks.exchange import WINDOW_BYTES, Exchange
from rollout_engine.model.ranks.expert_group import ExpertGroup
from rollout_engine.model.ranks.group_memory import Part
from rollout_engine.model.ranks.seat import Seat
from rollout_engine.model.ranks.share import Share

_FORMS: tuple[dict[str, int], ...] = (
    EXPERT_MATRICES,
    EXPERT_MATRICES | EXPERT_BIASES,
    {"up_proj": 3, "down_proj": 3},
)
"""Parameters of modules of experts, and how many dimensions they have."""


class OwnOutputs(Protocol):
    """A module of experts that holds some of them."""

    def own_outputs(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Unweighted outputs of rows [n, H], which are sorted by expert; `counts`: the rows of each own expert."""
        ...


class DividedExperts:
    """The experts of one layer, as this engine computes them for all. Satisfies `expert_group.RoundLayer`."""

    def __init__(self, group: ExpertGroup, module: Any, share: Share) -> None:
        """`module`: an `OwnOutputs`, whose parameters hold the experts of `share`."""
        self._group, self._module, self.share = group, module, share
        self.dtype: torch.dtype = module.down_proj.dtype
        self._number = group.add_layer(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DividedExperts":
        """Copies of a module are of the same engine."""
        return self

    def outputs(self, rows: Tensor, experts: Tensor) -> Tensor:
        """Unweighted outputs [T * k, H] for rows [T, H] of experts int64 [T, k], which are ascending in each row.

        Those of experts behind the last of `share.whole` are left as they are.
        """
        return self._group.take_part(self._number, rows, experts)

    def compute(self, parts: list[Part]) -> None:
        """Write the outputs of the own experts for all engines' rows, all rows of an expert in one product."""
        if not parts:
            return
        flat = torch.cat([part.experts.flatten() for part in parts])
        own = ((flat >= self.share.first) & (flat < self.share.stop)).nonzero().flatten()
        if not len(own):
            return
        own = own[flat[own].argsort(stable=True)]
        num_chosen = parts[0].experts.shape[1]
        rows = torch.cat([part.rows for part in parts])[own // num_chosen]
        counts = torch.bincount(flat[own] - self.share.first, minlength=self.share.size).tolist()
        found = self._module.own_outputs(rows, counts).contiguous().view(torch.uint8).numpy()
        places, start = own.numpy(), 0
        for part in parts:
            here = (places >= start) & (places < start + len(part.outputs))
            part.outputs.view(torch.uint8).numpy()[places[here] - start] = found[here]
            start += len(part.outputs)


class Alone(Exchange):
    """The exchange of an engine that is not cut: with itself."""

    window_is_shared = True

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.window = torch.empty(WINDOW_BYTES, dtype=torch.uint8)

    def meet(self) -> None:
        pass

    def agree(self, number: int) -> list[int]:
        return [number]

    def break_(self) -> None:
        pass

    def gathering(self, share: Share) -> Any:
        return lambda part: part

    def gather_rows(self, part: Tensor, first: int, num_rows: int) -> Tensor:
        return part

    def merge_rows(self, rows: Tensor, own: Tensor) -> Tensor:
        return rows

    def add_up(self, part: Tensor) -> Tensor:
        return part


def divide_experts(
    module: PreTrainedModel, geometry: list[LayerGeometry], group: ExpertGroup, *, keep_values: bool = False
) -> ModelCut | None:
    """Replace the parameters of experts by this engine's, uninitialised unless `keep_values`; None if it has none."""
    found = [child for child in module.modules() if _are_experts(child)]
    if not found:
        return None
    experts: list[tuple[nn.Module, Share]] = []
    for child in found:
        whole = len(child.get_parameter("down_proj"))
        first, stop = (whole * rank // group.size for rank in (group.rank, group.rank + 1))
        experts.append((child, Share(first, stop, whole)))
    cut = ModelCut(Seat(Alone()), [], experts, [], None, {}, {}, list(geometry), {}, {}, group=group)
    replace_parameters(module, cut, keep_values=keep_values)
    return cut


def expert_weights(module: nn.Module) -> frozenset[str]:
    """Names of the weights that `divide_experts` divides."""
    experts = ((name, child) for name, child in module.named_modules() if _are_experts(child))
    return frozenset(f"{name}.{own}" for name, child in experts for own, _ in child.named_parameters(recurse=False))


def _are_experts(child: nn.Module) -> bool:
    dims = {name: parameter.dim() for name, parameter in child.named_parameters(recurse=False)}
    return dims in _FORMS
