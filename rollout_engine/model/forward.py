"""One forward of a Hugging Face causal LM over the paged KV pool: chunks in, logits of chosen rows out."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout_engine.errors import LifecycleError
from rollout_engine.model.attention import PagedKV
from rollout_engine.model.chunk import FlatBatch, SequenceChunk
from rollout_engine.model.decoder import DecoderStack
from rollout_engine.model.geometry import LayerGeometry


class PagedModel:
    """A module built with `ATTENTION_NAME`, and its KV pool.

    With `compiled`, which `decoder_trial` must have allowed, its layers run as one call instead of as modules.
    """

    def __init__(
        self,
        module: nn.Module,
        geometry: Sequence[LayerGeometry],
        *,
        num_blocks: int,
        block_size: int,
        compiled: bool = False,
    ) -> None:
        dtype = next(module.parameters()).dtype
        self.module = module
        self.kv = PagedKV(geometry, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self.decoder = DecoderStack(module, geometry, self.kv.layers) if compiled else None
        self._layers = _layers_of(module, len(geometry))
        self._num_watchers = 0

    @torch.inference_mode()
    def forward(self, chunks: FlatBatch | Sequence[SequenceChunk], logit_rows: np.ndarray | Sequence[int]) -> Tensor:
        """Compute `chunks`, writing their KV; return logits [len(logit_rows), V] of these rows of the flat batch."""
        batch = chunks if isinstance(chunks, FlatBatch) else FlatBatch.of(chunks)
        token_ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        rows = torch.from_numpy(np.asarray(logit_rows, np.int64))
        with self.kv.step(batch) as step:
            if self.decoder is not None and not self._num_watchers:
                return self.decoder.forward(token_ids, positions, step.plan, rows)
            out = self.module(
                input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
            )
        return out.logits[0]

    def watch_layers(self, watcher: Callable[[int, Tensor], None]) -> Callable[[], None]:
        """Call `watcher(layer, hidden)` with every decoder layer's output [T, H]; returns what ends it.

        Compiled layers, of which nothing can be seen, run as modules meanwhile.
        """
        if not self._layers:
            raise LifecycleError(f"watch_layers: {type(self.module).__name__} has no list of decoder layers to watch.")
        hooks = [layer.register_forward_hook(_hook(watcher, i)) for i, layer in enumerate(self._layers)]
        self._num_watchers += 1

        def stop() -> None:
            if hooks:
                self._num_watchers -= 1
            while hooks:
                hooks.pop().remove()

        return stop


def _hook(watcher: Callable[[int, Tensor], None], index: int) -> Callable[[nn.Module, Any, Any], None]:
    def show(layer: nn.Module, given: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        watcher(index, hidden.flatten(0, -2))

    return show


def _layers_of(module: nn.Module, count: int) -> list[nn.Module]:
    """The list of `count` decoder layers; empty where there is no such list."""
    lists = (child for child in module.modules() if isinstance(child, nn.ModuleList))
    return next((list(found) for found in lists if len(found) == count), [])
