"""All decoder layers of a step in one C++ call (`decoder.cpp`), instead of some twenty operations per layer.

The values equal, bit for bit, those of the Hugging Face modules with our linears, norms and attention in them.
"""

import ctypes
from collections.abc import Iterator, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.cpu import attention, build
from rollout_engine.kernels.cpu.adapters import AdapterRows, AdapterTable, RowsCall, TableCall
from rollout_engine.kernels.cpu.arguments import address
from rollout_engine.kernels.cpu.delta_net import DeltaNet, DeltaOperand
from rollout_engine.kernels.cpu.gemm import PackedWeight, addresses
from rollout_engine.kernels.cpu.mamba import Mamba, MambaOperand
from rollout_engine.kernels.cpu.short_convolution import ShortConvolution, ShortConvolutionOperand
from rollout_engine.kernels.cpu.state_chunks import ChunkTable
from rollout_engine.kernels.cpu.turns import BrokenTurnsError, Turns
from rollout_engine.kernels.routing_rule import Groups, RoutingRule
from rollout_engine.kernels.state_chunks import StateChunks

Mixer = DeltaNet | Mamba | ShortConvolution
"""Stands in place of attention, and keeps a state."""
MixerOperand = DeltaOperand | MambaOperand | ShortConvolutionOperand
"""A mixer as C++ reads it."""

_CACHE_LINE = 64
NUM_INPUTS = 4
"""Products of a layer's input at most; INPUTS of decoder.cpp."""


class Norm(NamedTuple):
    """RMSNorm: weight * round(x / rms(x)); with an offset round((1 + weight) * x / rms(x)).

    With `rounds_once` it is round(weight * x / rms(x)).
    """

    weight: Tensor
    epsilon: float
    has_offset: bool = False
    rounds_once: bool = False


class Product(NamedTuple):
    """Linear layer: x @ weight.T + bias."""

    weight: PackedWeight
    bias: Tensor | None


class MLP(NamedTuple):
    """down(silu(gate(x)) * up(x)), or down(max(up(x), 0)^2)."""

    gate_up: Product
    down: Product
    is_plain: bool = False
    """Whether `gate_up` is up alone."""


class Routing(NamedTuple):
    """The way a router chooses `top_k` experts by scores of its logits, and weights them."""

    top_k: int
    rule: RoutingRule
    bias: Tensor | None = None
    """[E], float32 or bfloat16, added to scores for the choice."""

    @property
    def groups(self) -> Groups:
        """The groups from which experts are chosen: all in one, unless the rule has some."""
        return self.rule.groups or Groups(1, 1, sums_two=False)


class Columns(NamedTuple):
    """Columns [first, first + size) of `whole`: those that a rank computes."""

    first: int
    size: int
    whole: int

    @classmethod
    def all(cls, count: int) -> "Columns":
        """All columns of a model that is not cut."""
        return cls(0, count, count)


class SharedExpert(NamedTuple):
    """An MLP of every token, whose output is added to that of the experts."""

    mlp: MLP
    gate: Product | None
    """Its one output by its sigmoid multiplies the MLP's; None: nothing does."""
    inner: Columns
    """The rank's columns of gate and up."""
    outer: Columns
    """The rank's columns of down: its own of the hidden size, or all."""


class Latents(NamedTuple):
    """Products before all experts but the shared one, and behind their weighted sum."""

    enter: Product
    leave: Product


class Mixture(NamedTuple):
    """A mixture of such MLPs, its experts; of their outputs a weighted sum."""

    router: Product
    experts: Sequence[MLP]
    """The experts that this rank computes."""
    first_expert: int
    """The number of the first of them."""
    routing: Routing
    shared: SharedExpert | None = None
    latents: Latents | None = None
    """The inputs of experts that do not read the layer's; only in a model that is not cut."""


class LayerWeights(NamedTuple):
    """One layer: attention, with RMSNorm of each q and k head, or of all together, if given, then an MLP or a mixture.

    Either may be left out: of attention then its norm and products, of the MLP its norm.
    """

    attention_norm: Norm | None
    inputs: Sequence[Product]
    """Products of the layer's input, side by side: of attention one, q, k and v."""
    q_norm: Norm | None
    k_norm: Norm | None
    out: Product | None
    mlp_norm: Norm | None
    mlp: MLP | Mixture | None
    num_heads: int
    attention_params: AttentionParams
    is_gated: bool = False
    """Whether a gate as large as the head follows each head of q, whose sigmoid multiplies the output of the head."""
    mixer: Mixer | None = None
    """In place of attention; None: the layer attends."""
    factor: float = 1.0
    """Multiplies the results of attention, or the mixer, and of the MLP before they are added."""
    norms_behind: bool = False
    """Whether norms are of these results, instead of the inputs."""

    @property
    def attends(self) -> bool:
        """Whether it has attention."""
        return self.out is not None and self.mixer is None


class DecoderRanks(NamedTuple):
    """A decoder's part of a model that is cut over processes with shared memory."""

    turns: Turns
    memory: Tensor
    """uint8, aligned to 64 bytes, shared by all ranks: activations that all read."""
    hidden: Columns
    intermediate: Columns
    """The rank's columns of gate and up, in layers without a mixture."""
    attended: Sequence[Columns]
    """The rank's columns of the heads' outputs, by layer."""


class DecoderEnds(NamedTuple):
    """Inputs before a decoder's layers and the norm behind them, of a step of T tokens."""

    token_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]."""
    embedding: Tensor
    """[V, hidden_size]."""
    cos: Tensor
    """[P, head_dim], of positions 0 to P - 1."""
    sin: Tensor
    """[P, head_dim]."""
    norm: Norm
    """The model's last norm."""
    factor: float = 1.0
    """Multiplies embeddings."""


class DecoderAdapters:
    """The adapters of a decoder's linears, ten tables a layer: four inputs, out, gate_up, down, shared_gate, latents.

    None: no adapter, or no such product; attention has one input, qkv. Of a layer with a mixture gate_up, down and
    shared_gate are of its shared expert, and the last two of its latents. It keeps addresses: make a new one when a
    table is set.
    """

    def __init__(self, tables: Sequence[AdapterTable | None]) -> None:
        self.tables = list(tables)
        self.calls = (TableCall * len(self.tables))(
            *(TableCall() if table is None else table.call for table in self.tables)
        )


class Decoder:
    """Runs all layers over their KV pools. It keeps addresses: make a new one when a weight or pool is replaced.

    `pool`: that of each layer which attends; at least one does. `ranks`: this process's part, if there are several.
    `rotary`: the first channels of a head, which are rotated, or 0; None: all. Raises `ValueError` if shapes or dtypes
    do not fit together.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        pool: Sequence[attention.KVLayer],
        ranks: DecoderRanks | None = None,
        rotary: int | None = None,
    ) -> None:
        self._held = (layers, pool)
        self._ranks = ranks
        self._pools = {(layer.num_blocks, layer.block_size) for layer in pool}
        norms = [norm for norm in (layers[0].attention_norm, layers[0].mlp_norm) if norm is not None]
        if not norms:
            raise ValueError("A layer should have attention, a mixer or an MLP, and the first has none.")
        self._dtype, self._hidden_size = norms[0].weight.dtype, norms[0].weight.numel()
        self._head_dim = pool[0].call.dk
        self._rotary = self._head_dim if rotary is None else rotary
        pools = _by_layer(layers, pool)
        if ranks is None:
            self._hidden = Columns.all(self._hidden_size)
            mlps = [layer.mlp for layer in layers if isinstance(layer.mlp, MLP)]
            self._intermediate = Columns.all(mlps[0].down.weight.in_features if mlps else 0)
            attended = [Columns.all(_num_attended(*pair)) for pair in zip(layers, pools, strict=True)]
        else:
            self._hidden, self._intermediate, attended = ranks.hidden, ranks.intermediate, list(ranks.attended)
        rows = list(zip(layers, pools, attended, strict=True))
        for row in rows:
            self._check(*row)
        self._mixers = [_mixer(layer.mixer, layer, self._dtype) for layer in layers if layer.mixer is not None]
        mixed = [layer.mlp for layer in layers if isinstance(layer.mlp, Mixture)]
        self._mixtures = [_mixture(each, place) for place, each in enumerate(mixed)]
        mixtures = iter(self._mixtures)
        self._layers = (_Layer * len(layers))(*(_layer(*row) for row in rows))
        mixers = iter(self._mixers)
        for each, layer in zip(self._layers, layers, strict=True):
            each.mixture = ctypes.addressof(next(mixtures).call) if isinstance(layer.mlp, Mixture) else None
            if layer.mixer is not None:
                setattr(each, _FIELDS[type(layer.mixer)], next(mixers).address)
        self._memory, self._exchanged = (torch.empty(0, dtype=torch.uint8) for _ in range(2))
        self._checked_adapters: DecoderAdapters | None = None
        self._call = _Call(
            layers=ctypes.addressof(self._layers),
            turns=None if ranks is None else ranks.turns.address,
            hidden_columns=_Columns(*self._hidden),
            intermediate=_Columns(*self._intermediate),
            num_mixtures=len(self._mixtures),
            rotary=self._rotary,
            num_layers=len(layers),
            is_bf16=self._dtype == torch.bfloat16,
            num_ranks=1 if ranks is None else ranks.turns.num_ranks,
        )
        """Arguments of a step; the step fills in those that differ from one to the next."""

    def run(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: Tensor,
        plan: attention.AttentionPlan,
        adapters: tuple[DecoderAdapters, AdapterRows] | None = None,
        routed: Tensor | None = None,
        q_factors: Tensor | None = None,
        chunks: StateChunks | None = None,
    ) -> None:
        """Turn embeddings `hidden` [T, hidden_size] into the last layer's output, in place; cos, sin [T, rotary].

        `rows`: int64 [n], those whose output is wanted; the others of `hidden` hold no output afterwards. `adapters`:
        those of rows that have one. `routed`: int32 [T, layers with mixtures, top_k], is filled with the experts that
        were chosen, the most probable first. `q_factors` [T]: of queries, after their rotation. `chunks`: the slots
        that layers with states read and write. Raises `ValueError` for tensors, adapters, rows and chunks that do not
        fit, `BrokenTurnsError` if another rank has ended or failed.
        """
        num_tokens, dtype = plan.num_tokens, self._dtype
        self._call.hidden = address("hidden", hidden, dtype, (num_tokens, self._hidden_size))
        self._call.cos = address("cos", cos, dtype, (num_tokens, self._rotary))
        self._call.sin = address("sin", sin, dtype, (num_tokens, self._rotary))
        self._call.ends = None
        self._launch(rows, plan, adapters, routed, q_factors, chunks)

    def run_between(
        self,
        ends: DecoderEnds,
        rows: Tensor,
        plan: attention.AttentionPlan,
        adapters: tuple[DecoderAdapters, AdapterRows] | None = None,
        routed: Tensor | None = None,
        q_factors: Tensor | None = None,
        chunks: StateChunks | None = None,
    ) -> Tensor:
        """Look up the tokens, run the layers, and return rows of the last one's output, behind the norm.

        `rows`: int64 [n]; the result is [n, hidden_size]. Raises as `run`, and `ValueError` for tokens, positions and
        rows that are not there.
        """
        count, dtype, dim = (plan.num_tokens,), self._dtype, self._rotary
        vocab_size = ends.embedding.numel() // self._hidden_size
        num_positions = ends.cos.numel() // dim if dim else len(ends.cos)
        states = torch.empty(rows.numel(), self._hidden_size, dtype=dtype)
        call = _Ends(
            address("token_ids", ends.token_ids, torch.int64, count),
            address("positions", ends.positions, torch.int64, count),
            address("embedding", ends.embedding, dtype, (vocab_size, self._hidden_size)),
            address("cos", ends.cos, dtype, (num_positions, dim)),
            address("sin", ends.sin, dtype, (num_positions, dim)),
            states.data_ptr(),
            vocab_size,
            num_positions,
            _norm(ends.norm, address("norm", ends.norm.weight, dtype, (self._hidden_size,))),
            ends.factor,
        )
        self._call.hidden = self._call.cos = self._call.sin = None
        self._call.ends = ctypes.addressof(call)
        self._launch(rows, plan, adapters, routed, q_factors, chunks)
        return states

    def _launch(
        self,
        rows: Tensor,
        plan: attention.AttentionPlan,
        adapters: tuple[DecoderAdapters, AdapterRows] | None,
        routed: Tensor | None,
        q_factors: Tensor | None,
        chunks: StateChunks | None,
    ) -> None:
        call, num_tokens = self._call, plan.num_tokens
        table = self._chunk_table(chunks, num_tokens)
        call.chunks = None if table is None else ctypes.addressof(table)
        call.routed = None
        call.q_factors = None if q_factors is None else address("q_factors", q_factors, self._dtype, (num_tokens,))
        if routed is not None:
            sizes = {each.call.routing.top_k for each in self._mixtures}
            if len(sizes) != 1:
                raise ValueError(f"Mixtures should choose as many experts as one another, and choose {sorted(sizes)}.")
            call.routed = address("routed", routed, torch.int32, (num_tokens, len(self._mixtures), *sizes))
        for pool in self._pools:
            plan.check_pool(*pool)
        call.plan, call.num_tokens, call.num_threads = plan.address, num_tokens, plan.num_threads
        call.rows, call.num_rows = address("rows", rows, torch.int64, (rows.numel(),)), rows.numel()
        call.adapters, call.adapter_rows = self._adapter_arguments(adapters, num_tokens)
        kept = adapters[1].among(rows.numpy(), num_tokens) if adapters and len(rows) < num_tokens else None
        call.kept_adapter_rows = RowsCall() if kept is None else kept.call
        place = ctypes.addressof(call)
        self._memory = _at_least(self._memory, _library().decoder_bytes(place))
        call.memory = _aligned(self._memory)
        call.exchanged = self._exchanged_address(_library().decoder_exchanged_bytes(place))
        if (wrong := _library().decoder_run(place)) >= 0:
            raise ValueError(
                f"token_ids, positions and rows should be within the embedding, the rotary table and the {num_tokens} "
                f"tokens, and are not at {wrong}."
            )
        if self._ranks is not None and self._ranks.turns.are_broken:
            raise BrokenTurnsError("a rank has ended or failed")

    def _chunk_table(self, chunks: StateChunks | None, num_tokens: int) -> ChunkTable | None:
        """The chunks as C++ reads them, and the weights of layers with states made ready."""
        if not self._mixers:
            return None
        if chunks is None:
            raise ValueError("Layers of this model keep states, and the batch names no slots of them.")
        chunks.check(num_tokens, min(each.num_slots for each in self._mixers))
        for each in self._mixers:
            each.read_vectors()
        return ChunkTable.of(chunks)

    def _exchanged_address(self, num_bytes: int) -> int:
        if self._ranks is None:
            self._exchanged = _at_least(self._exchanged, num_bytes)
            return _aligned(self._exchanged)
        memory = self._ranks.memory
        if num_bytes > len(memory):
            raise ValueError(f"The ranks should share {num_bytes} bytes for this step, and share {len(memory)}.")
        return address("the memory of the ranks", memory, torch.uint8, (len(memory),))

    def _adapter_arguments(
        self, adapters: tuple[DecoderAdapters, AdapterRows] | None, num_tokens: int
    ) -> tuple[int | None, RowsCall]:
        """Address of the tables of all layers, and the rows."""
        if adapters is None:
            return None, RowsCall()
        tables, rows = adapters
        if tables is not self._checked_adapters:
            self._check_adapters(tables)
            self._checked_adapters = tables
        if len(rows.rows) and int(rows.rows.max()) >= num_tokens:
            raise ValueError(f"Rows with adapters should be below {num_tokens}, and one is {int(rows.rows.max())}.")
        return ctypes.addressof(tables.calls), rows.call

    def _check_adapters(self, adapters: DecoderAdapters) -> None:
        products = [each for layer in self._held[0] for each in _products_of(layer)]
        if len(adapters.tables) != len(products):
            num_wanted = f"{len(products)} tables, one for each product"
            raise ValueError(f"Adapters should have {num_wanted}, and have {len(adapters.tables)}.")
        for table, product in zip(adapters.tables, products, strict=True):
            if table is None:
                continue
            weight = None if product is None else product.weight
            wanted = None if weight is None else (weight.in_features, weight.out_features, self._dtype)
            if (came := (table.in_features, sum(table.sizes), table.dtype)) != wanted:
                raise ValueError(
                    f"Adapters should be of (in_features, out_features, dtype) {wanted}, and are of {came}."
                )

    def _check(self, layer: LayerWeights, kv: attention.KVLayer | None, attended: Columns) -> None:
        hidden, num_attended = self._hidden_size, _num_attended(layer, kv)
        if attended.size != num_attended or self._hidden.whole != hidden:
            raise ValueError(f"{num_attended} outputs of heads and {hidden} are not {attended} and {self._hidden}.")
        norms = {"attention_norm": hidden, "mlp_norm": hidden}
        if kv is not None:
            norms |= dict(zip(("q_norm", "k_norm"), self._sizes_of_norms(layer, kv), strict=True))
            self._check_attention(layer, kv)
        elif len(layer.inputs) > NUM_INPUTS:
            raise ValueError(f"A layer with states should have {NUM_INPUTS} inputs at most, not {len(layer.inputs)}.")
        if (layer.out is None) != (layer.attention_norm is None) or (layer.mlp is None) != (layer.mlp_norm is None):
            raise ValueError("Attention or a mixer, and an MLP, should each have a norm before it, and only then.")
        for each in layer.inputs:
            _check_product("an input", each, (each.weight.out_features, hidden), self._dtype)
        if layer.out is not None:
            _check_product("out", layer.out, (self._hidden.size, attended.whole), self._dtype)
        if isinstance(layer.mlp, Mixture):
            _check_mixture(layer.mlp, self._hidden, self._dtype)
        elif layer.mlp is not None:
            inner = self._intermediate
            _check_product("gate_up", layer.mlp.gate_up, (_num_projected(layer.mlp, inner.size), hidden), self._dtype)
            _check_product("down", layer.mlp.down, (self._hidden.size, inner.whole), self._dtype)
        for name, size in norms.items():
            norm = getattr(layer, name)
            if norm is not None:
                address(name, norm.weight, self._dtype, (size,))

    def _sizes_of_norms(self, layer: LayerWeights, kv: attention.KVLayer) -> tuple[int, int]:
        """Channels that the norms of q and k should have: those of a head, or of all if q's has more than a head's."""
        dim, norm = kv.call.dk, layer.q_norm
        if norm is None or norm.weight.numel() <= dim:
            return dim, dim
        return layer.num_heads * dim, kv.call.num_kv_heads * dim

    def _check_attention(self, layer: LayerWeights, kv: attention.KVLayer) -> None:
        call = kv.call
        of_q = 2 * call.dk if layer.is_gated else call.dk
        qkv = layer.num_heads * of_q + call.num_kv_heads * (call.dk + call.dv)
        heads = self._sizes_of_norms(layer, kv) == (call.dk, call.dk)
        if not heads and layer.is_gated:
            raise ValueError("Queries with gates should be normed by heads.")
        if heads and any(norm is not None and norm.rounds_once for norm in (layer.q_norm, layer.k_norm)):
            raise ValueError("Norms of heads should round before the weight too, or have an offset.")
        (product,) = layer.inputs
        _check_product("qkv", product, (qkv, self._hidden_size), self._dtype)
        if self._rotary % 2 or not 0 <= self._rotary <= call.dk or (layer.is_gated and call.dk != call.dv):
            raise ValueError(
                f"{self._rotary} channels of a head should be rotated, an even number up to {call.dk}, and gates be as "
                f"large as heads, {call.dv}."
            )
        if kv.dtype != self._dtype or call.dk != self._head_dim or layer.num_heads % call.num_kv_heads:
            raise ValueError(
                f"The KV pool should be {self._dtype}, with heads of {self._head_dim} channels whose "
                f"number divides {layer.num_heads}; it is {kv.dtype} with {call.num_kv_heads} heads of {call.dk}."
            )


def _num_projected(mlp: MLP, size: int) -> int:
    """Columns of an MLP's first product, of which `size` are up's."""
    return size if mlp.is_plain else 2 * size


def _check_product(name: str, product: Product, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = product.weight
    came = (weight.out_features, weight.in_features)
    if came != shape or weight.dtype != dtype:
        raise ValueError(f"{name} should be {dtype} {shape}, and is {weight.dtype} {came}")
    addresses(name, weight)
    if product.bias is not None:
        address(f"the bias of {name}", product.bias, dtype, shape[:1])


def _check_mixture(mixture: Mixture, hidden_columns: Columns, dtype: torch.dtype) -> None:
    count, inner = mixture.router.weight.out_features, mixture.experts[0].down.weight.in_features
    stop, routing, hidden = mixture.first_expert + len(mixture.experts), mixture.routing, hidden_columns.whole
    if not 0 < routing.top_k <= count or not 0 <= mixture.first_expert < stop <= count:
        raise ValueError(
            f"{routing.top_k} of {count} experts should be chosen, and those from {mixture.first_expert} to "
            f"{stop - 1} be computed."
        )
    _check_routing(routing, count)
    if mixture.shared is not None:
        _check_shared(mixture.shared, hidden_columns, dtype)
    _check_product("router", mixture.router, (count, hidden), dtype)
    size = mixture.experts[0].down.weight.out_features
    if mixture.latents is not None:
        _check_product("enter", mixture.latents.enter, (size, hidden), dtype)
        _check_product("leave", mixture.latents.leave, (hidden, size), dtype)
    elif size != hidden:
        raise ValueError(f"Experts should have {hidden} outputs, as the layer, and have {size}.")
    if mixture.latents is not None and hidden_columns != Columns.all(hidden):
        raise ValueError("Experts with latents should not be cut.")
    for expert in mixture.experts:
        _check_product("gate_up", expert.gate_up, (_num_projected(expert, inner), size), dtype)
        _check_product("down", expert.down, (size, inner), dtype)
    if any(product.bias is not None for expert in mixture.experts for product in (expert.gate_up, expert.down)):
        raise ValueError("Experts should have no bias.")
    mlps = [*mixture.experts, *([] if mixture.shared is None else [mixture.shared.mlp])]
    if len({mlp.is_plain for mlp in mlps}) != 1:
        raise ValueError("All experts of a mixture should have gates, or none.")


def _check_routing(routing: Routing, num_experts: int) -> None:
    num, chosen, _ = routing.groups
    if not 0 < chosen <= num or num_experts % num or chosen * (num_experts // num) < routing.top_k:
        raise ValueError(f"{chosen} of {num} equal groups should have {routing.top_k} of {num_experts} experts.")
    if routing.bias is not None:
        dtype = torch.bfloat16 if routing.bias.dtype == torch.bfloat16 else torch.float32
        address("the bias of the router", routing.bias, dtype, (num_experts,))


def _check_shared(shared: SharedExpert, hidden: Columns, dtype: torch.dtype) -> None:
    if shared.outer not in (hidden, Columns.all(hidden.whole)):
        raise ValueError(f"A shared expert should have all columns or {hidden}, and has {shared.outer}.")
    _check_product("gate_up", shared.mlp.gate_up, (_num_projected(shared.mlp, shared.inner.size), hidden.whole), dtype)
    _check_product("down", shared.mlp.down, (shared.outer.size, shared.inner.whole), dtype)
    if shared.gate is not None:
        _check_product("shared_gate", shared.gate, (1, hidden.whole), dtype)


class _Norm(ctypes.Structure):
    _fields_ = [("weight", c_void_p), ("epsilon", c_float), ("has_offset", c_int32), ("rounds_once", c_int32)]


class _Product(ctypes.Structure):
    _fields_ = [(name, c_void_p) for name in ("packed", "bias", "scales")]


class _Columns(ctypes.Structure):
    _fields_ = [(name, c_int64) for name in ("first", "size", "whole")]


class _Routing(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("num_experts", "top_k", "num_groups", "top_groups")),
        ("bias", c_void_p),
        *((name, c_float) for name in ("scaling", "added", "least")),
        *((name, c_int32) for name in ("is_sigmoid", "is_precise", "is_normalised", "is_rounded")),
        *((name, c_int32) for name in ("is_bias_bf16", "sums_two", "is_stepwise")),
    ]


class _MixtureCall(ctypes.Structure):
    _fields_ = [
        ("router", _Product),
        *((name, c_void_p) for name in ("gate_up", "down")),
        *((name, c_int64) for name in ("first_expert", "num_own", "intermediate_size")),
        ("routing", _Routing),
        ("place", c_int64),
        *((name, _Product) for name in ("shared_gate_up", "shared_down", "shared_gate")),
        *((name, _Columns) for name in ("shared", "shared_out")),
        ("is_plain", c_int32),
        *((name, _Product) for name in ("latent_in", "latent_out")),
        ("expert_size", c_int64),
    ]


class _Mixture(NamedTuple):
    """A mixture as C++ reads it, and the arrays that it points to."""

    call: _MixtureCall
    products: tuple[ctypes.Array[_Product], ctypes.Array[_Product]]


_FIELDS: dict[type, str] = {DeltaNet: "delta", Mamba: "mamba", ShortConvolution: "convolution"}
"""Fields of `_Layer` that point to mixers, by the kinds of these."""


class _Layer(ctypes.Structure):
    _fields_ = [
        ("attention", attention.AttentionCall),
        ("attended", _Columns),
        ("attention_norm", _Norm),
        ("mlp_norm", _Norm),
        ("inputs", _Product * NUM_INPUTS),
        ("sizes", c_int64 * NUM_INPUTS),
        *((name, _Product) for name in ("out", "gate_up", "down")),
        *((name, c_void_p) for name in ("mixture", *_FIELDS.values())),
        ("is_gated", c_int32),
        ("factor", c_float),
        *((name, c_int32) for name in ("is_plain", "norms_behind")),
        *((name, _Norm) for name in ("q_norm", "k_norm")),
    ]


class _Ends(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("token_ids", "positions", "embedding", "cos", "sin", "states")),
        *((name, c_int64) for name in ("vocab_size", "num_positions")),
        ("norm", _Norm),
        ("factor", c_float),
    ]


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("layers", "plan", "adapters")),
        ("adapter_rows", RowsCall),
        ("kept_adapter_rows", RowsCall),
        *((name, c_void_p) for name in ("hidden", "cos", "sin", "q_factors", "ends")),
        *((name, c_void_p) for name in ("memory", "exchanged", "turns")),
        *((name, c_void_p) for name in ("routed", "rows")),
        *((name, c_int64) for name in ("num_tokens", "num_rows", "num_mixtures")),
        ("chunks", c_void_p),
        *((name, _Columns) for name in ("hidden_columns", "intermediate")),
        ("rotary", c_int64),
        *((name, c_int32) for name in ("num_layers", "num_threads", "is_bf16", "num_ranks")),
    ]


def _by_layer(layers: Sequence[LayerWeights], pool: Sequence[attention.KVLayer]) -> list[attention.KVLayer | None]:
    """The pool of each layer; None: it does not attend."""
    own = iter(pool)
    found = [next(own) if layer.attends else None for layer in layers]
    if next(own, None) is not None:
        raise ValueError(f"{len(pool)} KV pools should be those of the layers that attend, and are more.")
    return found


def _num_attended(layer: LayerWeights, kv: attention.KVLayer | None) -> int:
    """Columns that a layer gives its product `out`."""
    if layer.mixer is not None:
        return layer.mixer.attended
    if layer.out is None:
        return 0
    assert kv is not None, "a layer without another mixer attends"
    return int(layer.num_heads * kv.call.dv)


def _mixer(mixer: Mixer, layer: LayerWeights, dtype: torch.dtype) -> MixerOperand:
    num_columns = sum(each.weight.out_features for each in layer.inputs)
    match mixer:
        case DeltaNet():
            return DeltaOperand(mixer, dtype, num_columns)
        case Mamba():
            return MambaOperand(mixer, dtype, num_columns)
        case ShortConvolution():
            return ShortConvolutionOperand(mixer, dtype, num_columns)


def _layer(layer: LayerWeights, kv: attention.KVLayer | None, attended: Columns) -> _Layer:
    call = attention.AttentionCall() if kv is None else attention.AttentionCall.from_buffer_copy(kv.call)
    call.lse = call.sinks = None
    call.num_heads = layer.num_heads
    call.scale, call.sliding_window, call.softcap = layer.attention_params
    is_whole = kv is not None and layer.q_norm is not None and layer.q_norm.weight.numel() > kv.call.dk
    for name in ("q", "k"):
        norm = None if is_whole else getattr(layer, f"{name}_norm")
        setattr(call, f"{name}_weight", norm and norm.weight.data_ptr())
        setattr(call, f"{name}_epsilon", norm.epsilon if norm else 0.0)
        setattr(call, f"{name}_offset", norm.has_offset if norm else False)
    whole = (layer.q_norm, layer.k_norm) if is_whole else (None, None)
    *norms, q_norm, k_norm = (
        _Norm() if norm is None else _norm(norm, norm.weight.data_ptr())
        for norm in (layer.attention_norm, layer.mlp_norm, *whole)
    )
    of_mlp = (layer.mlp.gate_up, layer.mlp.down) if isinstance(layer.mlp, MLP) else (None, None)
    made = _Layer(call, _Columns(*attended), *norms)
    for number, product in enumerate(layer.inputs):
        made.inputs[number], made.sizes[number] = _product(product), product.weight.out_features
    made.out, made.gate_up, made.down = map(_product, (layer.out, *of_mlp))
    made.is_gated, made.factor = layer.is_gated, layer.factor
    made.is_plain, made.norms_behind = isinstance(layer.mlp, MLP) and layer.mlp.is_plain, layer.norms_behind
    made.q_norm, made.k_norm = q_norm, k_norm
    return made


def _norm(norm: Norm, weight: int) -> _Norm:
    """`weight`: the address of its weight."""
    return _Norm(weight, norm.epsilon, norm.has_offset, norm.rounds_once)


def _products_of(layer: LayerWeights) -> Iterator[Product | None]:
    """The products of a layer that may have adapters, as `DecoderAdapters` has their tables."""
    yield from (*layer.inputs, *[None] * (NUM_INPUTS - len(layer.inputs)), layer.out)
    yield from _mlp_products(layer.mlp)


def _mlp_products(mlp: MLP | Mixture | None) -> tuple[Product | None, ...]:
    """The products gate_up and down of a layer's MLP, or of a mixture's shared expert, that one's gate, and latents."""
    if isinstance(mlp, MLP):
        return mlp.gate_up, mlp.down, None, None, None
    shared, latents = (None, None) if mlp is None else (mlp.shared, mlp.latents)
    of_shared = (None, None, None) if shared is None else (shared.mlp.gate_up, shared.mlp.down, shared.gate)
    return *of_shared, *((None, None) if latents is None else latents)


def _product(product: Product | None) -> _Product:
    if product is None:
        return _Product()
    return _Product(*_addresses(product.weight.panels, product.bias, product.weight.scales))


def _mixture(mixture: Mixture, place: int) -> _Mixture:
    count = len(mixture.experts)
    gate_up = (_Product * count)(*(_product(expert.gate_up) for expert in mixture.experts))
    down = (_Product * count)(*(_product(expert.down) for expert in mixture.experts))
    call = _MixtureCall(
        router=_product(mixture.router),
        gate_up=ctypes.addressof(gate_up),
        down=ctypes.addressof(down),
        first_expert=mixture.first_expert,
        num_own=count,
        intermediate_size=mixture.experts[0].down.weight.in_features,
        routing=_routing(mixture.routing, mixture.router.weight.out_features),
        place=place,
        is_plain=mixture.experts[0].is_plain,
        expert_size=mixture.experts[0].down.weight.out_features,
    )
    if mixture.latents is not None:
        call.latent_in, call.latent_out = map(_product, mixture.latents)
    if (shared := mixture.shared) is not None:
        products = (shared.mlp.gate_up, shared.mlp.down, shared.gate)
        call.shared_gate_up, call.shared_down, call.shared_gate = map(_product, products)
        call.shared, call.shared_out = _Columns(*shared.inner), _Columns(*shared.outer)
    return _Mixture(call, (gate_up, down))


def _routing(routing: Routing, num_experts: int) -> _Routing:
    bias, rule, groups = routing.bias, routing.rule, routing.groups
    return _Routing(
        *(num_experts, routing.top_k, groups.num, groups.num_chosen),
        None if bias is None else bias.data_ptr(),
        *(rule.scaling, rule.added, rule.least),
        *(rule.sigmoid, rule.precise, rule.normalised, rule.rounded),
        *(bias is not None and bias.dtype == torch.bfloat16, groups.sums_two, rule.stepwise),
    )


def _addresses(*tensors: Tensor | None) -> Iterator[int | None]:
    yield from (None if tensor is None else tensor.data_ptr() for tensor in tensors)


def _at_least(memory: Tensor, num_bytes: int) -> Tensor:
    """The memory, if `num_bytes` fit into it behind `_aligned`, or more."""
    num_bytes += _CACHE_LINE
    return memory if len(memory) >= num_bytes else torch.empty(num_bytes, dtype=torch.uint8)


def _aligned(memory: Tensor) -> int:
    """Address of the first cache line."""
    return -(-memory.data_ptr() // _CACHE_LINE) * _CACHE_LINE


@cache
def _library() -> ctypes.CDLL:
    return build.declared(
        decoder_run=(c_int64, c_void_p),
        decoder_bytes=(c_int64, c_void_p),
        decoder_exchanged_bytes=(c_int64, c_void_p),
    )
