"""Mixtures of experts (`modules.experts`) in which a token's bits do not depend on the other tokens of its experts.

Products are those of `kernels.linear`, whose rows do not depend on how many tokens an expert gets.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rollout_engine.kernels.activation import gated_silu
from rollout_engine.kernels.cpu import experts as kernels
from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.modules.expert_patterns import EXPERT_BIASES, ExpertForm, RouterPattern
from rollout_engine.model.modules.experts import add_weighted
from rollout_engine.model.modules.own_forwards import RowInvariantElements
from rollout_engine.model.packing.linear_groups import LinearGroup
from rollout_engine.model.packing.module_types import become, tensor_of
from rollout_engine.model.ranks.divided_experts import DividedExperts
from rollout_engine.model.ranks.share import Share
from rollout_engine.model.ranks.wiring import OwnExperts


class WeightSlice:
    """A parameter of `module`, or one expert's part of it, with the attributes of a linear without bias.

    `is_transposed`: the parameter is [..., in, out].
    """

    bias = None

    def __init__(self, module: nn.Module, name: str, index: int | None = None, *, is_transposed: bool = False) -> None:
        self._module, self._name, self._index, self._is_transposed = module, name, index, is_transposed
        self.out_features = self.weight.shape[0]

    @property
    def weight(self) -> Tensor:
        """[out_features, in_features], read each time, because the parameter may have been replaced."""
        whole: Tensor = getattr(self._module, self._name)
        part = whole if self._index is None else whole[self._index]
        return part.mT if self._is_transposed else part


class RowInvariantRouter(nn.Module):
    """A router with one `weight` [E, H]: x [..., H] -> (logits [T, E], weights [T, k], experts [T, k])."""

    weight: Tensor
    top_k: int
    _groups: list[LinearGroup]
    _pattern: RouterPattern

    def forward(self, hidden_states: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`bias` [E] of the choice, if the module that calls has it."""
        (logits,) = self._groups[0].product(hidden_states.reshape(-1, hidden_states.shape[-1]), [self.weight])
        pattern, kernel = self._pattern, kernels.scores if kernels.supports(logits) else None
        if pattern.bias_name is not None:
            bias = getattr(self, pattern.bias_name)
        chosen = pattern.routing.select(logits, self.top_k, kernel, bias=bias, dtype=self.weight.dtype)
        return logits.to(pattern.logits_dtype), *chosen


class RowInvariantExperts(nn.Module):
    """Experts down(silu(gate(x)) * up(x)) with `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I].

    Or in another `_form`.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    _form: ExpertForm
    _groups: list[LinearGroup]
    """Gate and up of every expert, then down of every expert."""
    _own_experts: OwnExperts | None = None
    """The experts that this rank has, if the model is cut; the parameters hold these alone."""
    _divided: DividedExperts | None = None
    """The experts that this engine has, if a group of engines divides them; the parameters hold these alone."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x [T, H], experts int64 [T, k] and their weights [T, k] -> [T, H]."""
        index, slots = top_k_index.sort(dim=-1)
        if self._divided is not None:
            by_token = self._outputs_of_group(self._divided, hidden_states, index)
            return add_weighted(by_token, top_k_weights.gather(1, slots))
        by_expert = index.flatten().argsort(stable=True)
        outputs = self._outputs(hidden_states[by_expert // index.shape[1]], index)
        by_token = outputs[by_expert.argsort()].view(*index.shape, hidden_states.shape[1])
        return add_weighted(by_token, top_k_weights.gather(1, slots))

    def _outputs(self, rows: Tensor, index: Tensor) -> Tensor:
        """Unweighted outputs of `rows` [T * k, H], which are sorted by expert."""
        own = self._own_experts
        share = Share.all(len(tensor_of(self, self._form.matrices[1]))) if own is None else own.share
        counts = torch.bincount(index.flatten(), minlength=share.whole).tolist()
        counts, num_passed = counts[: share.whole], sum(counts[share.whole :])
        rows, passed = rows.split([len(rows) - num_passed, num_passed])  # the last experts return their input
        outputs = self._outputs_by_expert(rows.split(counts)[share.rows])
        if own is not None:
            outputs = [own.gather(outputs, rows, counts)]
        if num_passed or not outputs:
            outputs.append(passed)
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0]

    def _outputs_by_expert(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Unweighted outputs of the rows of each expert that has some, in their order."""
        # Unbound, the backward stacks the gradients of all experts once; indexed, it fills a whole tensor for each.
        gate_up, down = (self._unbind_matrices(name) for name in self._form.matrices)
        biases = [tensor_of(self, name).unbind() for name in EXPERT_BIASES] if self._form.has_bias else None
        outputs: list[Tensor] = []
        for expert, part in enumerate(parts):
            if len(part):
                (projected,) = self._groups[expert].product(part, [gate_up[expert]])
                activated = self._activate(projected if biases is None else projected + biases[0][expert])
                (output,) = self._groups[len(gate_up) + expert].product(activated, [down[expert]])
                outputs.append(output if biases is None else output + biases[1][expert])
        return outputs

    def own_outputs(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Unweighted outputs of `rows` [n, H], n > 0, sorted by expert; `counts`: the rows of each own expert."""
        return torch.cat(self._outputs_by_expert(rows.split(list(counts))))

    def _outputs_of_group(self, divided: DividedExperts, rows: Tensor, index: Tensor) -> Tensor:
        """Unweighted outputs [T, k, H] for `rows` [T, H] of their experts [T, k], computed by all engines together."""
        found = divided.outputs(rows, index).view(*index.shape, rows.shape[1])
        return rows[:, None].where(index[..., None] >= divided.share.whole, found)  # the last ones return their input

    def _unbind_matrices(self, name: str) -> tuple[Tensor, ...]:
        """The matrices [out, in] of all experts."""
        whole = tensor_of(self, name)
        return (whole.mT if self._form.is_transposed else whole).unbind()

    def _activate(self, projected: Tensor) -> Tensor:
        """The input [n, I] of the second product, from the output [n, 2I] of the first."""
        gate, up = projected.chunk(2, dim=-1)
        return gated_silu(gate, up)


class ExpertsWithGate(RowInvariantExperts):
    """Experts with a gate of their own between the two products."""

    def _activate(self, projected: Tensor) -> Tensor:
        assert self._form.gate is not None, "the others are not of this class"
        with RowInvariantElements():
            return self._form.gate(self, projected)


def has_product(pattern: RouterPattern, module: nn.Module) -> bool:
    """Whether a kernel returns the logits of such a router: float32 sums of another dtype only our own does."""
    return not pattern.routing.precise or gemm.supports(tensor_of(module).dtype)


def swap_router(module: nn.Module, pattern: RouterPattern) -> None:
    """Make `module`, which `expert_patterns.router_pattern` recognised, row-invariant; in place."""
    router = become(module, RowInvariantRouter)
    router._pattern, router._groups = pattern, [_group_of(module, "weight")]
    router._groups[0].float32_out = pattern.routing.precise


def swap_experts(module: nn.Module, form: ExpertForm) -> None:
    """Make `module`, which `expert_patterns.expert_form` recognised, row-invariant; in place."""
    experts = become(module, RowInvariantExperts if form.gate is None else ExpertsWithGate)
    experts._form = form
    experts._groups = [
        _group_of(module, name, index, is_transposed=form.is_transposed)
        for name in form.matrices
        for index in range(len(tensor_of(module, name)))
    ]
    for group in experts._groups:
        group.packs = experts._groups[0].packs


def _group_of(module: nn.Module, name: str, index: int | None = None, *, is_transposed: bool = False) -> LinearGroup:
    child = WeightSlice(module, name, index, is_transposed=is_transposed)
    return LinearGroup([child])  # type: ignore[list-item]  # has all that groups read
