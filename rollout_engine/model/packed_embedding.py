"""An embedding tied to a head: rows are read from the head's packed weight, the only copy there is."""

import torch
from torch import Tensor, nn

from rollout_engine.kernels.cpu import gemm
from rollout_engine.model.fusion import LinearGroup


class PackedEmbedding(nn.Embedding):
    """token_ids int64 [...] -> [..., H], without autograd."""

    _group: LinearGroup
    """The head's."""

    def forward(self, input: Tensor) -> Tensor:
        if self._group.gives_zeros:
            return torch.zeros(*input.shape, self.embedding_dim, dtype=self.weight.dtype)
        operand = self._group.packed
        assert operand is not None, "an embedding without values is read"
        return gemm.select_rows(operand, input)


def read_from_head(embedding: nn.Embedding, group: LinearGroup) -> None:
    """Make `embedding`, whose parameter `group` multiplies by, read from the group's operand; in place."""
    embedding.__class__, embedding._group = PackedEmbedding, group
