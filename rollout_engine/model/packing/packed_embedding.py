"""An embedding tied to the head that reads rows from the head's packed weight, the only copy."""

import torch
from torch import Tensor, nn

from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.packing.linear_groups import LinearGroup
from rollout_engine.model.packing.module_types import become


class PackedEmbedding(nn.Embedding):
    """token_ids int64 [...] -> [..., H], without autograd."""

    _group: LinearGroup
    """The group of the head."""

    def forward(self, input: Tensor) -> Tensor:
        if self._group.gives_zeros:
            return torch.zeros(*input.shape, self.embedding_dim, dtype=self.weight.dtype)
        operand = self._group.packed
        assert operand is not None, "an embedding without values is read"
        return gemm.select_rows(operand, input)


def read_from_head(embedding: nn.Embedding, group: LinearGroup) -> None:
    """Make `embedding`, which shares its parameter with `group`, read the group's operand; in place."""
    become(embedding, PackedEmbedding)._group = group
