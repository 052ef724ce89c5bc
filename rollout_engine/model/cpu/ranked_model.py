"""The model of one rank on the CPU: rank 0 tells the others of each step, and all compute it together."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout_engine.errors import ConfigError
from rollout_engine.kernels import linear
from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.packing.linear_groups import linear_groups
from rollout_engine.model.ranks.cut import ModelCut
from rollout_engine.model.sampling.logit_rows import LogitRows


class RankedModel(CpuModel):
    """One rank's part of a model and of its KV pool. Its logits are good on rank 0."""

    def __init__(self, *args: Any, cut: ModelCut, **options: Any) -> None:
        super().__init__(*args, cut=cut, **options)
        self._seat = cut.seat
        self.kv.on_copy = self._announce_copies

    @torch.inference_mode()
    def forward_states(
        self,
        chunks: FlatBatch | Sequence[SequenceChunk],
        logit_rows: np.ndarray | Sequence[int],
        state_rows: np.ndarray | Sequence[int],
        adapter_rows: AdapterRows | None = None,
    ) -> tuple[LogitRows, Tensor]:
        if (followers := self._seat.alone) is None:
            return super().forward_states(chunks, logit_rows, state_rows, adapter_rows)
        batch = chunks if isinstance(chunks, FlatBatch) else FlatBatch.of(chunks)
        with self._seat.together():
            followers.forward(batch.token_ids, batch.columns, np.asarray(logit_rows, np.int64))
            return super().forward_states(batch, logit_rows, state_rows, adapter_rows)

    def follow_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do what `copy_blocks` tells this rank."""
        self.kv.copy_blocks(pairs)

    def _announce_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        if (followers := self._seat.alone) is not None:
            followers.copy_blocks(list(pairs))


def check_products(module: nn.Module, cut: ModelCut, *, is_deterministic: bool) -> None:
    """Raise `ConfigError` where products of some columns may have other bits than products of all."""
    size = cut.seat.num_ranks
    if not is_deterministic:
        raise ConfigError(
            f"tensor_parallel_size={size} needs deterministic products, whose columns do not depend on one another, "
            "and the model's are not (deterministic=False, or a part of it that was not replaced). Leave it out."
        )
    if any(group.plan.kernel != linear.OWN for group in linear_groups(module)):
        raise ConfigError(
            f"tensor_parallel_size={size} needs products by our own C++ kernel, and on this CPU another library "
            "multiplies. Leave it out."
        )
