"""Runs the decoder layers of a Hugging Face module as one C++ call, if `decoder_trial` has proven the same bits."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.kernels.cpu import attention
from rollout_engine.kernels.cpu import decoder as compiled
from rollout_engine.kernels.cpu.decoder import (
    NUM_INPUTS,
    Columns,
    Decoder,
    DecoderAdapters,
    DecoderEnds,
    LayerWeights,
    Norm,
    Product,
)
from rollout_engine.kernels.cpu.gemm import PackedWeight
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.model.cpu.adapters import CpuAdapterPool
from rollout_engine.model.cpu.decoder_mixers import mixer_operands, mixer_owners
from rollout_engine.model.cpu.experts import ExpertsWithGate, RowInvariantExperts, RowInvariantRouter
from rollout_engine.model.cpu.ranked_decoder import SharedColumns, decoder_ranks, shared_columns
from rollout_engine.model.cpu.row_invariance import (
    RowInvariantGatedNorm,
    RowInvariantMLP,
    RowInvariantOffsetNorm,
    RowInvariantRMSNorm,
    RowInvariantSingleNorm,
)
from rollout_engine.model.modules.decoder_structure import DecoderLayer, decoder_structure
from rollout_engine.model.modules.feed_forwards import MLP, Mixture
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.mixer_functions import LayerStates
from rollout_engine.model.modules.passed_layers import AbsentEmbedding
from rollout_engine.model.modules.rotary import RotaryTable, rotary_limit
from rollout_engine.model.modules.structure_checks import UnsupportedStructure, require
from rollout_engine.model.packing.linear_groups import LinearGroup, RowInvariantLinear
from rollout_engine.model.packing.module_types import tensor_of
from rollout_engine.model.packing.packed_embedding import PackedEmbedding
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.ranks.pipe import Pipe
from rollout_engine.model.sampling.logit_rows import LogitRows


class CpuDecoder:
    """The layers of `module` over one KV pool. Raises `UnsupportedStructure` if the module is not built as Llama is.

    Weights may be written, replaced or repacked at any time: addresses are gathered anew at the next step. If groups
    do not follow writes, only the copies they run from may move. `adapters`: those of rows. `cut`: how each layer
    is cut over ranks. `states`: those of each layer that keeps some. `pipe`: this stage, of a module that is divided.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        geometry: Sequence[LayerGeometry],
        pool: Sequence[attention.KVLayer],
        adapters: CpuAdapterPool | None = None,
        cut: ModelCut | None = None,
        states: Sequence[LayerStates | None] = (),
        pipe: Pipe | None = None,
    ) -> None:
        self._structure, self._pool = decoder_structure(module, geometry, takes_mixers=cut is None), pool
        self._pipe = pipe
        self._states = [states[index] if states else None for index in self._structure.places]
        self._ranks = None if cut is None else decoder_ranks(cut, self._structure)
        self._shared_columns = [shared_columns(cut, layer.mlp) for layer in self._structure.layers]
        self._vocab_size = module.config.vocab_size
        rotary = self._structure.rotary
        self._rotary = None if rotary is None else RotaryTable(rotary, rotary_limit(module.config))
        embedding, head = self._structure.embedding, self._structure.head
        kinds = (nn.Embedding, PackedEmbedding, AbsentEmbedding)
        require(type(embedding) in kinds, "its embedding is more than a table")
        require(head is None or type(head) is RowInvariantLinear, "lm_head was not replaced by RowInvariantLinear")
        is_table = type(embedding) is nn.Embedding and embedding.max_norm is None
        self._has_plain_ends = cut is None and pipe is None and is_table and type(self._structure.norm) in _NORMS
        self._groups: list[LinearGroup] = []
        """Groups whose `packs` are compared at every step; one stands for all experts of a layer."""
        self._adapted: list[LinearGroup | None] = []
        """Groups that may have adapters, ten of each layer, as tables of `DecoderAdapters`; None: no such product."""
        self._owners: list[Mapping[str, Tensor | None]] = []
        for layer in self._structure.layers:
            _check_replaced(layer)
            mlp, norms = layer.mlp, _norms_of(layer)
            inputs: list[LinearGroup | None] = [_group(child) for child in _first_inputs(layer)]
            out = None if layer.out is None else _group(layer.out)
            adapted = [*inputs, *[None] * (NUM_INPUTS - len(inputs)), out, *_mlp_groups(mlp)]
            self._groups += [group for group in adapted if group is not None]
            self._adapted += adapted
            if isinstance(mlp, Mixture):
                self._groups += [part._groups[0] for part in _mixture_parts(mlp)]
                self._owners += [mlp.module._parameters, mlp.module._buffers, mlp.router._buffers]
            owners = [*norms, *layer.qkv, *_some(layer.out)]
            shared = mlp.shared if isinstance(mlp, Mixture) else None
            for each in (mlp, shared):
                owners += [] if each is None else [each.module, *each.module.modules()]
            self._owners += [child._parameters for child in owners]
            self._owners += [] if layer.mixer is None else mixer_owners(layer.mixer)
        self._stamp: list[int] = []
        self._decoder: Decoder | None = None
        self._pool_of_adapters = adapters
        self._adapters: tuple[int, DecoderAdapters] = (-1, DecoderAdapters([]))
        """The pool's number of changes, and its adapters at that number."""

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: attention.AttentionPlan,
        rows: Tensor,
        state_rows: Tensor,
        adapter_rows: AdapterRows | None = None,
        routed: Tensor | None = None,
        axes: Tensor | None = None,
        chunks: StateChunks | None = None,
    ) -> tuple[LogitRows, Tensor]:
        """Compute tokens at positions, int64 [T] each; KV is written by `plan`.

        `adapter_rows`: the rows that have an adapter. `routed`: int32 [T, layers with experts, k], is filled with the
        experts that tokens are sent to. `axes`: int64 [3, T], positions to rotate by, if they are on three axes.
        `chunks`: the slots of states that are read and written.
        Returns logits of `rows`, none if there is no output head, and hidden states of `state_rows` [n, H].
        """
        decoder, parts = self._current(), self._structure
        given = parts.query_factors
        factors = None if given is None else given.rows(positions, tensor_of(parts.norm))
        adapters = None if adapter_rows is None else (self._current_adapters(), adapter_rows)
        wanted = torch.cat([rows, state_rows]) if len(state_rows) else rows
        if parts.head is not None and axes is None and (ends := self._ends(token_ids, positions)) is not None:
            states = decoder.run_between(ends, wanted, plan, adapters, routed, factors, chunks)
            return LogitRows(states[: len(rows)], self._head, self._vocab_size), states[len(rows) :]
        hidden = self._enter(token_ids)
        cos, sin = self._rotations(positions, axes, hidden)
        decoder.run(hidden, cos, sin, wanted, plan, adapters, routed, factors, chunks)
        states = parts.norm(hidden.index_select(0, state_rows)) if len(state_rows) else hidden[:0]
        if parts.head is None:
            return LogitRows.of(states[:0]), states
        return LogitRows(parts.norm(hidden.index_select(0, rows)), self._head, self._vocab_size), states

    def forward_stage(
        self,
        token_ids: Tensor,
        positions: Tensor,
        plan: attention.AttentionPlan,
        adapter_rows: AdapterRows | None = None,
        routed: Tensor | None = None,
        chunks: StateChunks | None = None,
    ) -> Tensor:
        """Do as `forward` on a stage that is not the last; returns hidden states [T, H] of all rows, for the next."""
        decoder, given = self._current(), self._structure.query_factors
        hidden = self._enter(token_ids)
        factors = None if given is None else given.rows(positions, hidden)
        adapters = None if adapter_rows is None else (self._current_adapters(), adapter_rows)
        cos, sin = self._rotations(positions, None, hidden)
        every = torch.arange(len(token_ids))
        decoder.run(hidden, cos, sin, every, plan, adapters, routed, factors, chunks)
        return hidden

    def _enter(self, token_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of tokens, or the hidden states of the stage before; they may be written to."""
        parts, pipe = self._structure, self._pipe
        if pipe is not None and not pipe.is_first:
            like = tensor_of(parts.norm)
            return pipe.enter((len(token_ids), like.numel()), like.dtype)
        hidden: Tensor = parts.embedding(token_ids)
        return hidden if parts.embedding_factor == 1.0 else hidden * parts.embedding_factor

    def _head(self, states: Tensor) -> Tensor:
        """Logits [n, V] of states [n, H] behind the norm."""
        head, divisor = self._structure.head, self._structure.logit_divisor
        assert head is not None, "a model without a head has no logits"
        logits: Tensor = head(states)
        logits = logits if divisor == 1.0 else logits / divisor
        return logits.float() if self._structure.has_precise_logits else logits

    def _rotations(self, positions: Tensor, axes: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [T, rotary], of no channels if nothing is rotated."""
        if self._rotary is None:
            none = like.new_empty(len(positions), 0)
            return none, none
        return self._rotary.rows(positions, like) if axes is None else self._rotary.rows_on_axes(axes, like)

    def _ends(self, token_ids: Tensor, positions: Tensor) -> DecoderEnds | None:
        """Arguments of `Decoder.run_between`; None if modules have to compute embeddings, rotations or the norm."""
        embedding, norm = self._structure.embedding, self._structure.norm
        has_hooks = any((*_hooks(embedding), *_hooks(norm)))  # C++ would not call them
        if not self._has_plain_ends or has_hooks or not len(token_ids):
            return None
        assert isinstance(embedding, nn.Embedding), "it is a table"
        weight, count = embedding.weight.detach(), int(positions.numpy().max()) + 1
        none = weight.new_empty(count, 0)
        table = (none, none) if self._rotary is None else self._rotary.table(count, weight)
        if table is None:
            return None
        return DecoderEnds(token_ids, positions, weight, *table, _norm(norm), self._structure.embedding_factor)

    def release(self) -> None:
        """Release packed weights and the memory of activations until the next step."""
        self._decoder = None

    def _current(self) -> Decoder:
        follow = any(group.follows_writes for group in self._groups)
        tensors = [t for owner in self._owners for t in owner.values() if t is not None] if follow else []
        stamp = [part for t in tensors for part in (t.data_ptr(), t._version)]
        stamp += [group.packs.num_packs for group in self._groups]
        if self._decoder is None or stamp != self._stamp:
            parts = zip(self._structure.layers, self._shared_columns, self._states, strict=True)
            layers = [_weights(*each) for each in parts]
            stamp[-len(self._groups) :] = [group.packs.num_packs for group in self._groups]
            rotary = self._structure.rotary_size
            self._decoder, self._stamp = Decoder(layers, self._pool, self._ranks, rotary), stamp
        return self._decoder

    def _current_adapters(self) -> DecoderAdapters:
        pool = self._pool_of_adapters
        assert pool is not None, "rows have adapters only where there is a pool of them"
        if self._adapters[0] != pool.num_changes:
            self._adapters = (
                pool.num_changes,
                DecoderAdapters([None if group is None else pool.table_of(group) for group in self._adapted]),
            )
        return self._adapters[1]


_NORMS = (RowInvariantRMSNorm, RowInvariantOffsetNorm, RowInvariantSingleNorm)


def _norms_of(layer: DecoderLayer) -> list[nn.Module]:
    return [*_some(layer.attention_norm), *_some(layer.mlp_norm), *layer.head_norms]


def _some(child: nn.Module | None) -> list[nn.Module]:
    """The module in a list, or an empty one."""
    return [] if child is None else [child]


def _first_inputs(layer: DecoderLayer) -> list[nn.Module]:
    """The first linear of each product of the layer's input: attention has one product, of q, k and v."""
    return [child for child in layer.qkv if _group(child).children[0] is child]


def _check_replaced(layer: DecoderLayer) -> None:
    """Raise `UnsupportedStructure` unless `make_row_invariant` has replaced every part of `layer`."""
    mlp = layer.mlp
    for norm in _norms_of(layer):
        require(type(norm) in _NORMS, f"{type(norm).__name__} was not replaced by {_NORMS[0].__name__}")
    expected: dict[nn.Module, type[nn.Module]] = {}
    if layer.mixer is not None and layer.mixer.norm is not None:
        expected[layer.mixer.norm] = RowInvariantGatedNorm
    expected.update(dict.fromkeys((*layer.qkv, *_some(layer.out)), RowInvariantLinear))
    dense = mlp.shared if isinstance(mlp, Mixture) else mlp
    if isinstance(mlp, Mixture):
        expected |= {mlp.router: RowInvariantRouter}
        expected |= {mlp.experts: ExpertsWithGate if mlp.is_plain else RowInvariantExperts}
        expected |= {} if mlp.shared_gate is None else {mlp.shared_gate: RowInvariantLinear}
        expected |= dict.fromkeys(mlp.latents or (), RowInvariantLinear)
    if dense is not None:
        expected |= {} if dense.is_plain else {dense.module: RowInvariantMLP}
        expected.update(dict.fromkeys((*dense.gate_up, dense.down), RowInvariantLinear))
    for child, kind in expected.items():
        require(type(child) is kind, f"{type(child).__name__} was not replaced by {kind.__name__}")
    stacked = [child for first in _first_inputs(layer) for child in _group(first).children]
    is_one = not layer.attends or len(_first_inputs(layer)) == 1
    require(is_one and stacked == layer.qkv, "q_proj, k_proj and v_proj are not fused")
    if dense is not None:
        require(_group(dense.gate_up[0]).children == dense.gate_up, "gate_proj and up_proj are not fused")


def _group(child: nn.Module) -> LinearGroup:
    return child._group  # type: ignore[return-value]


def _weights(layer: DecoderLayer, shared_columns: SharedColumns | None, states: LayerStates | None) -> LayerWeights:
    """`shared_columns`: those of a mixture's shared expert on this rank; None: all. `states`: those of this layer."""
    q_norm, k_norm = map(_norm, layer.head_norms) if layer.head_norms else (None, None)
    return LayerWeights(
        attention_norm=None if layer.attention_norm is None else _norm(layer.attention_norm),
        inputs=[_product(child) for child in _first_inputs(layer)],
        q_norm=q_norm,
        k_norm=k_norm,
        out=None if layer.out is None else _product(layer.out),
        mlp_norm=None if layer.mlp_norm is None else _norm(layer.mlp_norm),
        mlp=None if layer.mlp is None else _mlp(layer.mlp, shared_columns),
        num_heads=layer.geometry.num_heads,
        attention_params=layer.geometry.attention_params,
        is_gated=layer.is_gated,
        mixer=None if layer.mixer is None else mixer_operands(layer.mixer, states),
        factor=layer.factor,
        norms_behind=layer.norms_behind,
    )


def _hooks(child: nn.Module) -> tuple[dict[int, Any], ...]:
    """Hooks of a module's forward, before and behind it."""
    return child._forward_pre_hooks, child._forward_hooks


def _norm(child: nn.Module) -> Norm:
    assert isinstance(child, _NORMS), "the norms were replaced"
    kind = type(child)
    return Norm(child.weight.detach(), child._epsilon, kind is RowInvariantOffsetNorm, kind is RowInvariantSingleNorm)


def _mlp_groups(mlp: MLP | Mixture | None) -> list[LinearGroup | None]:
    """Groups of gate_up and down, of a mixture its shared MLP's, and of that one's gate; None: no such product."""
    dense = mlp.shared if isinstance(mlp, Mixture) else mlp
    gate = mlp.shared_gate if isinstance(mlp, Mixture) else None
    of_dense = [None, None] if dense is None else [_group(dense.gate_up[0]), _group(dense.down)]
    latents = mlp.latents if isinstance(mlp, Mixture) else None
    of_latents = [None, None] if latents is None else [_group(child) for child in latents]
    return [*of_dense, None if gate is None else _group(gate), *of_latents]


def _mlp(mlp: MLP | Mixture, shared_columns: SharedColumns | None) -> compiled.MLP | compiled.Mixture:
    if isinstance(mlp, MLP):
        return compiled.MLP(_product(mlp.gate_up[0]), _product(mlp.down), mlp.is_plain)
    router, experts = _mixture_parts(mlp)
    own = experts._own_experts
    products = [_operand(group) for group in experts._groups]
    halves = zip(products[: len(products) // 2], products[len(products) // 2 :], strict=True)
    pairs = [compiled.MLP(*pair, mlp.is_plain) for pair in halves]
    first = 0 if own is None else own.share.first
    shared = None if mlp.shared is None else _shared_expert(mlp.shared, mlp.shared_gate, shared_columns)
    latents = None if mlp.latents is None else compiled.Latents(*(_product(child) for child in mlp.latents))
    return compiled.Mixture(_operand(router._groups[0]), pairs, first, _routing(mlp, router), shared, latents)


def _shared_expert(mlp: MLP, gate: nn.Module | None, columns: SharedColumns | None) -> compiled.SharedExpert:
    made = compiled.MLP(_product(mlp.gate_up[0]), _product(mlp.down), mlp.is_plain)
    by_gate = None if gate is None else _product(gate)
    if columns is None:
        weight = made.down.weight
        columns = SharedColumns(Columns.all(weight.in_features), Columns.all(weight.out_features))
    return compiled.SharedExpert(made, by_gate, *columns)


def _routing(mixture: Mixture, router: RowInvariantRouter) -> compiled.Routing:
    pattern, bias = router._pattern, None
    if pattern.has_bias:
        owner, name = (mixture.module, mixture.bias_name) if pattern.bias_name is None else (router, pattern.bias_name)
        require(name is not None, "its router chooses with a bias, which its caller does not give")
        bias = tensor_of(owner, str(name)).detach()
    return compiled.Routing(router.top_k, pattern.routing, bias)


def _mixture_parts(mixture: Mixture) -> tuple[RowInvariantRouter, RowInvariantExperts]:
    router, experts = mixture.router, mixture.experts
    assert isinstance(router, RowInvariantRouter) and isinstance(experts, RowInvariantExperts), "both were replaced"
    return router, experts


def _product(child: nn.Module) -> Product:
    return _operand(_group(child))


def _operand(group: LinearGroup) -> Product:
    operand, bias, _ = group.operand()
    if not isinstance(operand, PackedWeight):
        raise UnsupportedStructure("another library multiplies")
    return Product(operand, bias)
