"""One forward of a Hugging Face causal LM over paged KV on a device: a flat batch in, logits of chosen rows out."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rollout_engine.base.errors import LifecycleError
from rollout_engine.base.routed_experts import RoutingInfo
from rollout_engine.kernels.state_chunks import ChunkTensors
from rollout_engine.kernels.triton.paged_attention import Limits
from rollout_engine.model.cuda.adapters import CudaAdapterPool
from rollout_engine.model.cuda.attention import CudaAttention, CudaBatch, CudaKVPool, ModuleStep
from rollout_engine.model.cuda.decoder import CudaDecoder
from rollout_engine.model.cuda.decoder_parts import parts_of
from rollout_engine.model.modules.attention_interface import attending
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.layer_watch import LayerWatch
from rollout_engine.model.modules.routers import recording, replaying, routers_of
from rollout_engine.model.sampling.logit_rows import LogitRows
from rollout_engine.model.sampling.module_logits import module_logits


class CudaModel:
    """A module built with `ATTENTION_NAME`, on a device, and its pools of KV and of states.

    `fused`: its layers run by our kernels, not as modules, unless `layer_watch` has watchers; raises
    `UnsupportedStructure` if they cannot. `deterministic`: a row's bits do not depend on its batch, if layers are fused
    or `row_invariance` has replaced the module's parts. `adapters`: those that rows may have, of fused layers.
    `routing`: its routers, whose choices are kept; None if they are not.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        geometry: Sequence[LayerGeometry],
        *,
        num_blocks: int,
        block_size: int,
        limits: Limits,
        fused: bool,
        num_state_slots: int = 0,
        deterministic: bool = False,
        adapters: CudaAdapterPool | None = None,
        routing: RoutingInfo | None = None,
    ) -> None:
        weight = next(module.parameters())
        self.module, self.limits, self.device, self.adapters = module, limits, weight.device, adapters
        shape: dict[str, Any] = {
            "block_size": block_size,
            "dtype": weight.dtype,
            "device": weight.device,
            "routing": routing,
        }
        self.make_pool = partial(CudaKVPool, geometry, **shape)
        self.kv = self.make_pool(num_blocks=num_blocks, num_state_slots=num_state_slots)
        self.attention = CudaAttention(
            *(geometry, limits, weight.dtype, weight.device),
            deterministic=deterministic,
            block_size=block_size,
        )
        self.decoder = None
        if fused:
            parts = parts_of(module, list(geometry), limits.context)
            self.decoder = CudaDecoder(
                *(parts, self.attention),
                deterministic=deterministic,
                adapters=adapters,
            )
        self.routing = routing
        self._routers = [] if routing is None else routers_of(module)
        self.layer_watch = LayerWatch(module, len(geometry))

    def forward(self, batch: CudaBatch, rows: Tensor, pool: CudaKVPool | None = None) -> Tensor:
        """Compute `batch`, writing its KV; returns logits [len(rows), V] of rows int64. `pool` replaces `kv`."""
        logits: Tensor = self.forward_rows(batch, rows, pool).take(slice(None))
        return logits

    @torch.inference_mode()
    def forward_rows(self, batch: CudaBatch, rows: Tensor, pool: CudaKVPool | None = None) -> LogitRows:
        """Do as `forward`; the logits of many rows are left to be computed as they are taken, before the next step."""
        pool = pool or self.kv
        self.attention.plan(batch.attention)
        if self.runs_fused:
            assert self.decoder is not None
            return self.decoder.forward(batch, rows, pool)
        if batch.adapters is not None:
            raise LifecycleError(
                "Rows with adapters cannot be computed while layers are watched (watch_layers): watched layers run as "
                "modules, without adapters. End the watch, or let requests of adapters finish before it."
            )

        def forward(rows: Tensor) -> Any:
            assert not isinstance(batch.states, ChunkTensors), "batches of modules are not captured"
            states = pool.states.step(batch.states)
            with attending(ModuleStep(pool, self.attention, batch)), states, self._route_tokens(batch, pool):
                return self.module(
                    input_ids=batch.token_ids[None],
                    position_ids=batch.positions[None],
                    use_cache=False,
                    logits_to_keep=rows,
                )

        return module_logits(self.module, forward, rows, self.module.config.vocab_size)

    @contextmanager
    def _route_tokens(self, batch: CudaBatch, pool: CudaKVPool) -> Iterator[None]:
        """Inside, modules send tokens to the experts that the batch gives, and the pool keeps the routers' choices."""
        with ExitStack() as contexts:
            if batch.routed is not None:
                contexts.enter_context(replaying(self._routers, batch.routed.long()))
            if pool.routed is None:
                yield
                return
            chosen = contexts.enter_context(recording(self._routers))
            yield
        experts = torch.stack([each for each in chosen if each is not None], 1)
        pool.routed_rows[batch.slots] = experts.to(pool.routed.dtype)

    @property
    def runs_fused(self) -> bool:
        """Whether the next forward runs by `decoder`, whose layers cannot be watched."""
        return self.decoder is not None and not self.layer_watch.num_watchers
