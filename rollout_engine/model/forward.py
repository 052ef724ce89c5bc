"""One forward of a Hugging Face causal LM over the paged KV pool: chunks in, logits of chosen rows out."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rollout_engine.model.attention import PagedKV, SequenceChunk
from rollout_engine.model.geometry import LayerGeometry


class PagedModel:
    """A module built with `ATTENTION_NAME`, and its KV pool."""

    def __init__(
        self, module: nn.Module, geometry: Sequence[LayerGeometry], *, num_blocks: int, block_size: int
    ) -> None:
        dtype = next(module.parameters()).dtype
        self.module = module
        self.kv = PagedKV(geometry, num_blocks=num_blocks, block_size=block_size, dtype=dtype)

    @torch.inference_mode()
    def forward(self, chunks: Sequence[SequenceChunk], logit_rows: Sequence[int]) -> Tensor:
        """Compute `chunks`, writing their KV; return logits [len(logit_rows), V] of these rows of the flat batch."""
        token_ids = torch.tensor([[t for chunk in chunks for t in chunk.token_ids]], dtype=torch.int64)
        positions = [chunk.num_computed_tokens + i for chunk in chunks for i in range(len(chunk.token_ids))]
        with self.kv.step(chunks):
            out = self.module(
                input_ids=token_ids,
                position_ids=torch.tensor([positions], dtype=torch.int64),
                use_cache=False,
                logits_to_keep=torch.tensor(logit_rows, dtype=torch.int64),
            )
        return out.logits[0]
