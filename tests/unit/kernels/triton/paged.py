"""Sequences with KV in a paged pool that is NaN elsewhere, and the expected attention over them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton.layout import KVLayer


class Contexts:
    """Random KV of N sequences, equal in their first `num_shared` positions, which share blocks."""

    def __init__(
        self,
        lengths: Sequence[int],
        heads: tuple[int, int],
        dims: tuple[int, int],
        *,
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        num_shared: int = 0,
        device: str = "cpu",
        has_latents: bool = False,
    ) -> None:
        """`has_latents`: values are the first channels of the one key head."""
        self.num_heads, self.num_kv_heads = heads
        self.dim_k, self.dim_v = dims
        self.block_size, self.dtype, self.device, self.has_latents = block_size, dtype, device, has_latents
        self.keys = [torch.randn(length, self.num_kv_heads, self.dim_k).to(dtype) for length in lengths]
        self.values = [torch.randn(length, self.num_kv_heads, self.dim_v).to(dtype) for length in lengths]
        if has_latents:
            self.values = [keys[..., : self.dim_v] for keys in self.keys]
        self.queries = [torch.randn(length, self.num_heads, self.dim_k).to(dtype) for length in lengths]
        for rows in (self.keys, self.values):
            for row in rows[1:]:
                row[:num_shared] = rows[0][:num_shared]
        self._fill(lengths, num_shared // block_size)

    def _fill(self, lengths: Sequence[int], shared_blocks: int) -> None:
        counts = [-(-length // self.block_size) for length in lengths]
        free = torch.randperm(sum(counts) + 1).tolist()
        tables = torch.full((len(counts), max(counts)), 1 << 30, dtype=torch.int32)
        shape = len(free), self.num_kv_heads, self.block_size, self.dim_k, self.dim_v
        self.layer = KVLayer.zeros(*shape, dtype=self.dtype, device="cpu")
        for pool in self.layer:
            pool.fill_(float("nan"))
        shared = [free.pop() for _ in range(shared_blocks)]
        for sequence, count in enumerate(counts):
            blocks = shared[:count] + [free.pop() for _ in range(count - shared_blocks)]
            tables[sequence, :count] = torch.tensor(blocks)
            for pool, rows in zip(self.layer, (self.keys[sequence], self.values[sequence]), strict=True):
                for index, rows_of_block in enumerate(rows.split(self.block_size)):
                    pool[blocks[index], :, : len(rows_of_block)] = rows_of_block.transpose(0, 1)
        self.tables = tables.to(self.device)
        keys, values = (pool.to(self.device) for pool in self.layer)
        self.layer = KVLayer(keys, keys[..., : self.dim_v] if self.has_latents else values)

    def flat_queries(self, ends: Sequence[int], counts: Sequence[int]) -> Tensor:
        """[T, H, Dk]: of each sequence the last `counts` tokens before `ends`."""
        chunks = [q[end - n : end] for q, end, n in zip(self.queries, ends, counts, strict=True)]
        return torch.cat(chunks).to(self.device)

    def expected(
        self, ends: Sequence[int], counts: Sequence[int], params: AttentionParams, sinks: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """float64 [T, H, Dv] and log-sum-exp [T, H] for `flat_queries`."""
        rows = [self._expected(i, end, n, params, sinks) for i, (end, n) in enumerate(zip(ends, counts, strict=True))]
        out, lse = zip(*rows, strict=True)
        return torch.cat(out).to(self.device), torch.cat(lse).to(self.device)

    def _expected(
        self, sequence: int, end: int, count: int, params: AttentionParams, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        group = self.num_heads // self.num_kv_heads
        k, v = (
            x[sequence][:end].double().repeat_interleave(group, 1).transpose(0, 1) for x in (self.keys, self.values)
        )
        q = self.queries[sequence][end - count : end].double().transpose(0, 1)
        scores = q @ k.transpose(1, 2) * params.scale
        if params.softcap:
            scores = params.softcap * torch.tanh(scores / params.softcap)
        distance = torch.arange(end - count, end)[:, None] - torch.arange(end)
        hidden = distance < 0
        if params.sliding_window:
            hidden |= distance >= params.sliding_window
        scores = scores.masked_fill(hidden, -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.cpu().double()[:, None, None].expand(-1, count, 1)], -1)
        weights = scores.softmax(-1)[..., :end]
        return (weights @ v).transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)


def starts_of(counts: Sequence[int], device: str) -> Tensor:
    """int32 [N + 1]: starts of chunks of these lengths in a flat batch, and the end."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
