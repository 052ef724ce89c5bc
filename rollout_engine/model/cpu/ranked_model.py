"""The model of one rank on the CPU: rank 0 tells the others of each step, and all compute it together."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rollout_engine.base.errors import ConfigError
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
        self._dense: list[AbstractContextManager[None]] = []
        """The open context of `Seat.together`, while rank 0 runs the whole module over sequences, for scores."""
        self.module.register_forward_pre_hook(self._before_dense, with_kwargs=True)
        self.module.register_forward_hook(self._after_dense, always_call=True)

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
            followers.forward(batch.token_ids, batch.columns, np.asarray(logit_rows, np.int64), adapter_rows)
            return super().forward_states(batch, logit_rows, state_rows, adapter_rows)

    def follow_dense(self, input_ids: Tensor, adapter_rows: AdapterRows | None, experts: Tensor | None) -> None:
        """Do what `forward_dense` tells this rank."""
        replaying = nullcontext() if experts is None else self.replaying(experts)
        with torch.no_grad(), self.adapting(adapter_rows), replaying:
            self.module(input_ids=input_ids, use_cache=False)

    def follow_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Do what `copy_blocks` tells this rank."""
        self.kv.copy_blocks(pairs)

    def _announce_copies(self, pairs: Sequence[tuple[int, int]]) -> None:
        if (followers := self._seat.alone) is not None:
            followers.copy_blocks(list(pairs))

    def _before_dense(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (followers := self._seat.alone) is not None:
            adapter_rows = self.adapters.active_rows if self.adapters else None
            followers.forward_dense(kwargs["input_ids"], adapter_rows, self.replayed)
            self._dense.append(self._seat.together())
            self._dense[-1].__enter__()

    def _after_dense(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if self._dense:
            self._dense.pop().__exit__(None, None, None)


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
