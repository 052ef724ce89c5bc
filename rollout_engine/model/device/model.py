"""One forward of a causal LM on a device over its paged KV: a flat batch in, logits of chosen rows out."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from rollout_engine.kernels.triton.paged_attention import Limits
from rollout_engine.model.decoder import NotOurs
from rollout_engine.model.device.compiled import CompiledLayers
from rollout_engine.model.device.decoder import DeviceDecoder
from rollout_engine.model.device.parts import parts_of
from rollout_engine.model.device.pool import DeviceAttention, DeviceBatch, DevicePool, ModuleStep
from rollout_engine.model.geometry import LayerGeometry
from rollout_engine.model.layer_watch import LayerWatch


class DeviceModel:
    """A module built with `ATTENTION_NAME`, on a device, and its KV pool.

    `fused`: its layers run by our kernels, not as modules. Raises `NotOurs` where they cannot. `is_ordered`: a row's
    bits do not depend on its batch; fused layers alone can keep that. `compiled` runs them in place of the module.
    """

    def __init__(
        self,
        module: nn.Module,
        geometry: Sequence[LayerGeometry],
        *,
        num_blocks: int,
        block_size: int,
        limits: Limits,
        fused: bool,
        is_ordered: bool = False,
        compiled: CompiledLayers | None = None,
    ) -> None:
        weight = next(module.parameters())
        self.module, self.limits, self.device = module, limits, weight.device
        self.kv = DevicePool(
            geometry, num_blocks=num_blocks, block_size=block_size, dtype=weight.dtype, device=weight.device
        )
        self.attention = DeviceAttention(geometry, limits, weight.dtype, weight.device, is_ordered=is_ordered)
        if is_ordered and not fused:
            raise NotOurs("its layers run as modules")
        self.decoder = None
        if fused:
            parts = parts_of(module, list(geometry), limits.context)
            self.decoder = DeviceDecoder(parts, self.attention, is_ordered=is_ordered)
        self._compiled = compiled
        self._watch = LayerWatch(module, len(geometry))

    @torch.inference_mode()
    def forward(self, batch: DeviceBatch, rows: Tensor, pool: DevicePool | None = None) -> Tensor:
        """Compute `batch`, writing its KV; logits [len(rows), V] of these rows, int64 on the device.

        `pool`: another than `kv`.
        """
        pool = pool or self.kv
        self.attention.plan(batch.attention)
        if self.runs_fused:
            assert self.decoder is not None
            return self.decoder.forward(batch, rows, pool)
        module = self.module
        if self._compiled is not None and not self._watch.num_watchers:
            module = self._compiled.module
        with ModuleStep(pool, self.attention, batch).serving():
            out = module(
                input_ids=batch.token_ids[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=rows,
            )
        logits: Tensor = out.logits[0]
        return logits

    @property
    def runs_fused(self) -> bool:
        """Whether the next forward is `decoder`'s: nothing of it can be watched."""
        return self.decoder is not None and not self._watch.num_watchers

    def watch_layers(self, watcher: Callable[[int, Tensor], None]) -> Callable[[], None]:
        """Call `watcher(layer, hidden)` with every decoder layer's output [T, H]; returns what ends it."""
        return self._watch.watch(watcher)
