"""Inspect a worker: digests and norms of its live weights, KV block tables."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sync.manifest import counted, describe_all, first_names
from worker_ext.base import WorkerExtension, rpc


class InspectExtension(WorkerExtension):
    """Reads and changes nothing. `names` are the module's own; None means all."""

    @rpc
    def get_tensor_digests(self, names: list[str] | None = None) -> dict[str, str]:
        """Name -> digest of the values, as a weight manifest has it."""
        return {spec.name: spec.digest for spec in describe_all(self._choose_tensors(names).items())}

    @rpc
    def get_weight_norms(self, names: list[str] | None = None) -> dict[str, float]:
        """Name -> Euclidean norm, summed in float64."""
        norms = torch.linalg.vector_norm
        return {n: norms(t, dtype=torch.float64).item() for n, t in self._choose_tensors(names).items()}

    @rpc
    def get_weight_rows(self, name: str, count: int = 100) -> list[Any]:
        """The first `count` rows of one weight as lists of numbers; of a vector, its first values."""
        return self._choose_tensors([name])[name][:count].tolist()

    @rpc
    def get_block_tables(self) -> dict[int, list[int]]:
        """Sequence id -> KV blocks, in the order of its tokens. `engine.get_sequence_ids` gives a request's ids."""
        return self.worker.block_tables()

    def _choose_tensors(self, names: list[str] | None) -> Mapping[str, Tensor]:
        live = self.worker.live_weights()
        if names is None:
            return live
        if unknown := [name for name in names if name not in live]:
            what = counted(unknown, "name is", "names are")
            raise KeyError(f"{what} not among the module's weights: {first_names(unknown)}")
        return {name: live[name] for name in names}
