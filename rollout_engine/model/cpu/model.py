"""One forward of a Hugging Face causal LM over paged KV on the CPU: chunks in, logits of chosen rows out."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout_engine.model.cpu.attention import CpuKVPool
from rollout_engine.model.cpu.decoder import CpuDecoder
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.modules.layer_watch import LayerWatch
from rollout_engine.model.sampling.logit_rows import LogitRows
from rollout_engine.model.sampling.module_logits import module_logits


class CpuModel:
    """A module built with `ATTENTION_NAME`, and its KV pool.

    `compiled`: its layers run as one C++ call instead of as modules, unless `layer_watch` has watchers; `decoder_trial`
    must have allowed it.
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
        self.kv = CpuKVPool(geometry, num_blocks=num_blocks, block_size=block_size, dtype=dtype)
        self.decoder = CpuDecoder(module, geometry, self.kv.layers) if compiled else None
        self.layer_watch = LayerWatch(module, len(geometry))

    def forward(self, chunks: FlatBatch | Sequence[SequenceChunk], logit_rows: np.ndarray | Sequence[int]) -> Tensor:
        """Compute `chunks`, writing their KV; return logits [len(logit_rows), V] of these rows of the flat batch."""
        return self.forward_rows(chunks, logit_rows).take(slice(None))

    @torch.inference_mode()
    def forward_rows(
        self, chunks: FlatBatch | Sequence[SequenceChunk], logit_rows: np.ndarray | Sequence[int]
    ) -> LogitRows:
        """Do as `forward`; the logits of many rows are left to be computed as they are taken, before the next step."""
        batch = chunks if isinstance(chunks, FlatBatch) else FlatBatch.of(chunks)
        token_ids, positions = torch.from_numpy(batch.token_ids), torch.from_numpy(batch.positions)
        rows = torch.from_numpy(np.asarray(logit_rows, np.int64))
        if self.decoder is not None and not self.layer_watch.num_watchers:
            return self.decoder.forward(token_ids, positions, self.kv.plan(batch), rows)

        def forward(rows: Tensor) -> Any:
            with self.kv.step(batch):
                return self.module(
                    input_ids=token_ids[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows
                )

        return module_logits(self.module, forward, rows, self.module.config.vocab_size, may_repeat=True)
