"""Mixtures of experts on a device: a step's, by kernels around two grouped products, and a trainer's modules.

    router ── choose ── group ── gate|up of the rows of each expert ── activation ── down ── weighted sum

Both give the same bits. Which experts a token goes to is known to the device alone, so steps are launched without
waiting, and graphs may capture them.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rollout_engine.kernels import activation
from rollout_engine.kernels.triton.activation import gated
from rollout_engine.kernels.triton.experts import Groups, add_weighted, multiply
from rollout_engine.kernels.triton.matmul import tile_for
from rollout_engine.kernels.triton.routers import Routes, choose
from rollout_engine.model.cuda.gradients import ExpertProduct, Product, gated_rows, scores
from rollout_engine.model.modules import experts as formulas
from rollout_engine.model.modules.expert_patterns import ExpertForm, RouterPattern
from rollout_engine.model.modules.experts import Routing
from rollout_engine.model.modules.own_forwards import RowInvariantElements
from rollout_engine.model.packing.module_types import become, tensor_of
from rollout_engine.model.ranks.wiring import OwnExperts


class Experts(NamedTuple):
    """The experts of one layer, and the choice among them."""

    gate_up: Tensor
    """[E, 2I, H], of which this rank may have only some."""
    down: Tensor
    """[E, H, I]."""
    top_k: int
    routing: Routing
    bias: Tensor | None
    """[E], added to scores for the choice alone."""
    own: OwnExperts | None
    """The experts that this rank computes; None if it computes all."""
    place: int
    """The layer's number among those that have experts."""

    def forward(self, x: Tensor, logits: Tensor, routes: Routes | None = None) -> Tensor:
        """x [T, H] and the router's logits [T, E], float32 if these are precise -> [T, H]."""
        shape = len(x), self.top_k
        weights = x.new_empty(shape, dtype=x.dtype if self.routing.rounded else torch.float32)
        experts = x.new_empty(shape, dtype=torch.int32)
        choose(logits, weights, experts, self.routing, bias=self.bias, routes=routes)
        groups = Groups.of(experts, logits.shape[1])
        if self.own is not None:
            groups = groups.part(self.own.share.rows)
        projected = x.new_empty(experts.numel(), self.gate_up.shape[1])
        gate, up = multiply(x, self.gate_up, groups, projected, top_k=self.top_k).chunk(2, dim=1)
        outputs = x.new_empty(experts.numel(), x.shape[1])
        if self.own is not None and self.own.splits_sums:
            multiply(gated(gate, up, gate), self.down, groups, outputs.zero_(), by_entry=True)
            return self.own.add_up(add_weighted(outputs.view(*shape, -1), weights, torch.empty_like(x)))
        multiply(gated(gate, up, gate), self.down, groups, outputs, by_entry=True)
        if self.own is not None:
            outputs = self.own.merge(outputs, experts)
        return add_weighted(outputs.view(*shape, -1), weights, torch.empty_like(x))


class TrainedRouter(nn.Module):
    """A router with one `weight` [E, H]: x [..., H] -> (logits [T, E], weights [T, k], experts int64 [T, k])."""

    weight: Tensor
    top_k: int
    _pattern: RouterPattern

    def forward(self, hidden_states: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """`bias` [E] of the choice, if the module that calls has it."""
        pattern, rows = self._pattern, hidden_states.reshape(-1, hidden_states.shape[-1])
        tile = tile_for(len(self.weight), self.weight.shape[1], self.weight.dtype)
        logits = Product.apply(rows, self.weight, None, tile, pattern.routing.precise)
        if pattern.bias_name is not None:
            bias = getattr(self, pattern.bias_name)
        chosen = pattern.routing.select(logits, self.top_k, scores, bias=bias, dtype=self.weight.dtype)
        return logits.to(pattern.logits_dtype), *chosen


class TrainedExperts(nn.Module):
    """Experts down(silu(gate(x)) * up(x)) with `gate_up_proj` [E, 2I, H] and `down_proj` [E, H, I].

    Or in another `_form`.
    """

    gate_up_proj: Tensor
    down_proj: Tensor
    _form: ExpertForm
    _is_expert_parallel: bool
    _own_experts: OwnExperts | None = None
    """The experts that this rank has, if the model is cut; the parameters hold these alone."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """x [T, H], experts int64 [T, k] and their weights [T, k] -> [T, H]."""
        index, slots = top_k_index.sort(dim=-1)
        own = self._own_experts
        groups = Groups.of(index.int(), len(self.down_proj) if own is None else own.share.whole)
        if own is not None:
            groups = groups.part(own.share.rows)
        order = groups.order.long()
        rows, experts = hidden_states[order // index.shape[1]], index.flatten()[order]
        activated = self._activate(self._multiply("gate_up_proj", rows, groups, experts))
        outputs = self._multiply("down_proj", activated, groups, experts)
        by_entry = outputs[order.argsort()]
        if own is not None:
            by_entry = own.merge(by_entry, index)
        return formulas.add_weighted(by_entry.view(*index.shape, -1), top_k_weights.gather(1, slots))

    def _multiply(self, name: str, x: Tensor, groups: Groups, experts: Tensor) -> Tensor:
        """The product of x [N, K], in the order of `groups`, of `experts` [N], with a parameter, plus its bias."""
        weight = tensor_of(self, name)
        out: Tensor = ExpertProduct.apply(x, weight.mT if self._form.is_transposed else weight, groups)
        if not self._form.has_bias:
            return out
        assert self._own_experts is None, "experts with biases are not cut over devices"
        return out + tensor_of(self, f"{name}_bias")[experts]

    def _activate(self, projected: Tensor) -> Tensor:
        """The input [N, I] of the second product, from the output [N, 2I] of the first."""
        if self._form.gate is None:
            gate, up = projected.chunk(2, dim=1)
            return activation.gated_silu(gate, up, gated_rows)
        with RowInvariantElements():
            return self._form.gate(self, projected)


def swap_router(module: nn.Module, pattern: RouterPattern) -> None:
    """Make `module`, which `expert_patterns.router_pattern` recognised, compute as steps do; in place."""
    become(module, TrainedRouter)._pattern = pattern


def swap_experts(module: nn.Module, form: ExpertForm) -> None:
    """Make `module`, which `expert_patterns.expert_form` recognised, compute as steps do; in place."""
    experts = become(module, TrainedExperts)
    experts._form, experts._is_expert_parallel = form, False
