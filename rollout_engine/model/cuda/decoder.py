"""Runs the layers of a module built as Llama is by Triton kernels around matrix products.

    residual ─┬─ norm ── q|k|v ── rotary, KV write ── attention ── out ──┐
              └────────────────────────────── add, norm ─┬───────────────┘
                                                         ├─ gate|up ── activation ── down ──┐
                                                         └────────────────────── add, norm ─┘

In a mixture of experts, `experts` computes the part between the last two norms, and a shared MLP is added to it. In
place of attention a layer may have the gated delta rule of `delta_net`, over states in slots.

Products are torch's. In deterministic mode they are those of `kernels.triton.matmul`, and heads are normed before they
are rotated, by the same kernel as in a trainer's modules.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from rollout_engine.kernels.activation import sigmoid
from rollout_engine.kernels.state_chunks import ChunkTensors
from rollout_engine.kernels.triton.activation import gated
from rollout_engine.kernels.triton.adapters import AdapterBatch
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.matmul import matmul
from rollout_engine.kernels.triton.norm import add_rms_norm, rms_norm
from rollout_engine.kernels.triton.rotary import HeadNorms, rotate_and_write
from rollout_engine.kernels.triton.routers import Routes
from rollout_engine.model.cuda.adapters import CudaAdapterPool
from rollout_engine.model.cuda.attention import CudaAttention, CudaBatch, CudaKVPool
from rollout_engine.model.cuda.decoder_parts import MLP, Attention, Layer, Linear, Mixer, Mixture, Norm, Parts
from rollout_engine.model.sampling.logit_rows import LogitRows


class CudaDecoder:
    """Forwards of one causal LM over any KV pool. It launches kernels without waiting, so graphs may capture it."""

    def __init__(
        self,
        parts: Parts,
        attention: CudaAttention,
        *,
        deterministic: bool,
        adapters: CudaAdapterPool | None = None,
    ) -> None:
        """`adapters`: those that rows may have."""
        self._parts, self._attention, self._adapters = parts, attention, adapters
        self._deterministic = deterministic

    @property
    def vocab_size(self) -> int:
        """Logits in a row, V."""
        return self._parts.head.num_outputs

    def forward(self, batch: CudaBatch, rows: Tensor, pool: CudaKVPool) -> LogitRows:
        """Logits of rows int64 of a planned `batch`. KV is written to `pool`."""
        return LogitRows(self._compute_hidden(batch, pool)[rows], self.head, self.vocab_size)

    def write_logits(self, batch: CudaBatch, pool: CudaKVPool, out: Tensor) -> None:
        """Write logits of all rows of a planned `batch` to `out` [T, V], of the model's dtype. KV goes to `pool`."""
        self._product(self._compute_hidden(batch, pool), self._parts.head, out)

    def _compute_hidden(self, batch: CudaBatch, pool: CudaKVPool) -> Tensor:
        parts = self._parts
        residual = self._embed(batch.token_ids)
        hidden = torch.empty_like(residual)
        norms = [*(layer.attention_norm for layer in parts.layers), parts.norm]
        _norm(residual, norms[0], hidden)
        for index, layer in enumerate(parts.layers):
            delta = self._mix(layer, hidden, batch, index, pool)
            _add_and_norm(residual, delta, layer.mlp_norm, hidden)
            delta = self._feed_forward(layer.mlp, hidden, batch, pool)
            _add_and_norm(residual, delta, norms[index + 1], hidden)
        return hidden

    def _embed(self, token_ids: Tensor) -> Tensor:
        parts = self._parts
        if parts.own_rows is not None:
            return parts.own_rows.look_up(token_ids, parts.embedding)
        return F.embedding(token_ids, parts.embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] of hidden states [R, H], behind the final norm."""
        return self._product(hidden, self._parts.head)

    def _mix(self, layer: Layer, hidden: Tensor, batch: CudaBatch, index: int, pool: CudaKVPool) -> Tensor:
        if isinstance(layer.mixing, Attention):
            out = self._attend(layer.mixing, hidden, batch, index, pool.layers[index])
        else:
            out = self._recur(layer.mixing, hidden, batch, index, pool)
        return self._multiply_adapted(out, layer.out, batch)

    def _recur(self, mixer: Mixer, hidden: Tensor, batch: CudaBatch, index: int, pool: CudaKVPool) -> Tensor:
        chunks, states = batch.states, pool.states.layers[index]
        assert chunks is not None and states is not None, "its sequences have slots"
        on_device = chunks if isinstance(chunks, ChunkTensors) else chunks.on(hidden.device)
        projected = [self._multiply_adapted(hidden, linear, batch) for linear in mixer.inputs]
        return mixer.delta.compute(torch.cat(projected, 1), states, on_device)

    def _attend(self, layer: Attention, hidden: Tensor, batch: CudaBatch, index: int, kv: KVLayer) -> Tensor:
        shape, gate = layer.geometry, None
        sizes = [(1 + layer.is_gated) * shape.num_heads * shape.head_dim_k]
        sizes += [shape.num_kv_heads * dim for dim in (shape.head_dim_k, shape.head_dim_v)]
        q, k, v = self._multiply_adapted(hidden, layer.qkv, batch).split(sizes, dim=1)
        q, k = (x.unflatten(1, (-1, shape.head_dim_k)) for x in (q, k))
        v = v.unflatten(1, (-1, shape.head_dim_v))
        if layer.is_gated:
            q, gate = q[:, ::2], q[:, 1::2]
        norms = None
        if layer.head_norms is not None:
            of_q, of_k = layer.head_norms
            if self._deterministic or of_q.has_offset:
                _norm(q, of_q, q)
                _norm(k, of_k, k)
            else:
                norms = HeadNorms(of_q.weight, of_k.weight, of_q.epsilon)
        rotate_and_write(q, k, v, batch.positions, batch.slots, self._parts.rotary, kv, q, norms)
        if self._parts.query_factors is not None:
            q.mul_(self._parts.query_factors[batch.positions][:, None, None])
        out = q.new_empty(len(q), shape.num_heads, shape.head_dim_v)
        self._attention.attend(index, q, kv, layer.params, out)
        mixed: Tensor = out.flatten(1)
        return mixed if gate is None else mixed * sigmoid(gate.flatten(1))

    def _feed_forward(self, mlp: MLP | Mixture, hidden: Tensor, batch: CudaBatch, pool: CudaKVPool) -> Tensor:
        if isinstance(mlp, MLP):
            gate, up = self._multiply_adapted(hidden, mlp.gate_up, batch).chunk(2, dim=1)
            return self._multiply_adapted(gated(gate, up, gate), mlp.down, batch)
        place = mlp.experts.place
        given = None if batch.routed is None else batch.routed[:, place]
        kept = None if pool.routed is None else pool.routed_rows[:, place]
        out = mlp.experts.forward(hidden, self._route(mlp, hidden), Routes(given, kept, batch.slots))
        if mlp.shared is None:
            return out
        shared = self._feed_forward(mlp.shared, hidden, batch, pool)
        if mlp.shared_gate is not None:
            shared = sigmoid(self._multiply_adapted(hidden, mlp.shared_gate, batch)) * shared
        return out + shared

    def _route(self, mixture: Mixture, hidden: Tensor) -> Tensor:
        """Logits [T, E] of the router: float32 sums if they are precise, by one kernel in every mode."""
        router = mixture.router
        if not mixture.experts.routing.precise:
            return self._product(hidden, router)
        out = hidden.new_empty(len(hidden), router.num_outputs, dtype=torch.float32)
        return matmul(hidden, router.weight, None, out, router.tile)

    def _multiply_adapted(self, x: Tensor, linear: Linear, batch: CudaBatch) -> Tensor:
        """A product of a layer, with the adapters of its rows."""
        return self._product(x, linear, adapted=batch.adapters)

    def _product(
        self, x: Tensor, linear: Linear, out: Tensor | None = None, adapted: AdapterBatch | None = None
    ) -> Tensor:
        """x [T, K] -> [T, N], written to `out` if it is given; joined with other ranks' parts of either."""
        joins = linear.joins
        if joins.input is not None:
            x = joins.input(x)
        part = self._multiply(x, linear, out if joins.output is None else None)
        if adapted is not None:
            assert self._adapters is not None, "no row has an adapter where there are none"
            self._adapters.add(linear.group, x, part, adapted)
        if joins.output is None:
            return part
        whole = joins.output(part)
        return whole if out is None else out.copy_(whole)

    def _multiply(self, x: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
        weight, bias = linear.weight, linear.bias
        if self._deterministic:
            given = x.new_empty(len(x), len(weight)) if out is None else out
            return matmul(x, weight, bias, given, linear.tile)
        if out is None:
            return F.linear(x, weight, bias)
        return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def _norm(x: Tensor, norm: Norm, out: Tensor) -> None:
    rms_norm(x, norm.weight, norm.epsilon, out, has_offset=norm.has_offset)


def _add_and_norm(residual: Tensor, delta: Tensor, norm: Norm, out: Tensor) -> None:
    add_rms_norm(residual, delta, norm.weight, norm.epsilon, out, has_offset=norm.has_offset)
