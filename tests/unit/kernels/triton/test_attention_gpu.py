"""Attention at real sizes on a CUDA device: values, bits, captured graphs, and what it may not do."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton.dense import attend_dense
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention, Prefixes
from rollout_engine.kernels.triton.shared_prefix import shared_prefixes
from tests.unit.kernels.triton.paged import starts_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

DEVICE = "cuda"
DTYPE = torch.bfloat16
BLOCK_SIZE = 16
SHAPES = [(32, 8, 128), (16, 8, 128), (14, 2, 64), (32, 8, 64), (8, 1, 256)]


class Serving:
    """A pool of random KV, and one batch of sequences over random blocks."""

    def __init__(self, shape, lengths, counts, *, deterministic, shared_blocks=0):
        num_heads, num_kv_heads, dim = shape
        self.heads = Heads(num_heads, num_kv_heads, dim, dim, DTYPE)
        self.params = AttentionParams(dim**-0.5)
        self.lengths, self.counts = lengths, counts
        most = -(-max(lengths) // BLOCK_SIZE)
        blocks = torch.randperm(len(lengths) * most, dtype=torch.int32).view(len(lengths), most)
        blocks[:, :shared_blocks] = blocks[0, :shared_blocks]
        self.tables = blocks.to(DEVICE)
        self.layer = KVLayer.zeros(blocks.numel(), num_kv_heads, BLOCK_SIZE, dim, dim, dtype=DTYPE, device=DEVICE)
        for pool in self.layer:
            pool.normal_()
        self.q = torch.randn(sum(counts), num_heads, dim, dtype=DTYPE, device=DEVICE)
        limits = Limits(sum(counts), len(lengths), max(lengths))
        self.attention = PagedAttention(self.heads, limits, DEVICE, deterministic=deterministic)
        self.lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.starts = starts_of(counts, DEVICE)
        self.num_decodes = next((i for i, count in enumerate(counts) if count > 1), len(counts))

    def plan(self, prefixes=None):
        batch = Batch(self.starts, self.lens, self.tables, self.num_decodes, prefixes)
        self.attention.plan(batch, {0})

    def prefixes(self):
        found = shared_prefixes(
            self.tables.cpu().numpy(),
            self.lens.cpu().numpy(),
            block_size=BLOCK_SIZE,
            unit=self.attention.prefix.tiling.unit,
            tokens_per_item=self.attention.prefix.tokens_per_item,
        )
        return Prefixes(
            *(torch.from_numpy(column).to(DEVICE) for column in (found.items, found.units, found.num_items))
        )

    def attend(self, out=None):
        out = torch.full_like(self.q, torch.nan) if out is None else out
        self.attention.attend(self.q, self.layer, self.params, out)
        return out

    def dense(self, sequence):
        """Keys and values [1, Hk, length, D]."""
        length = self.lengths[sequence]
        table = self.tables[sequence].long()
        return tuple(pool[table].transpose(1, 2).flatten(0, 1)[:length].transpose(0, 1)[None] for pool in self.layer)

    def expected(self):
        """[T, H, D] in float32."""
        rows = []
        for sequence, (length, q) in enumerate(zip(self.lengths, self.q.split(self.counts), strict=True)):
            k, v = (x.float() for x in self.dense(sequence))
            places = torch.arange(length - len(q), length, device=DEVICE)[:, None]
            mask = torch.arange(length, device=DEVICE) <= places
            q = q.float().transpose(0, 1)[None]
            rows.append(scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
        return torch.cat(rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_mixed_batches_are_attention(shape, deterministic):
    serving = Serving(shape, [1, 5000, 17, 900, 64, 700, 300], [1, 1, 1, 1, 1, 500, 300], deterministic=deterministic)
    serving.plan()
    torch.testing.assert_close(serving.attend().float(), serving.expected(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_groups_are_attention_and_in_order_the_same_bits(deterministic):
    serving = Serving(
        (32, 8, 128), [2100 + i for i in range(16)], [1] * 16, deterministic=deterministic, shared_blocks=130
    )
    serving.plan()
    alone = serving.attend()
    serving.plan(serving.prefixes())
    together = serving.attend()
    torch.testing.assert_close(together.float(), serving.expected(), atol=2e-2, rtol=2e-2)
    if deterministic:
        assert torch.equal(alone, together)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_deterministic_bits_are_the_trainers_in_any_batch(shape):
    lengths = [3000, 1, 1800, 513, 2500]
    serving = Serving(shape, lengths, [1, 1, 1, 1, 700], deterministic=True)
    serving.plan()
    out = serving.attend()
    for sequence, q in enumerate(serving.q.split(serving.counts)):
        length = lengths[sequence]
        whole = torch.randn(length, *q.shape[1:], dtype=DTYPE, device=DEVICE)
        whole[length - len(q) :] = q
        trained, _ = attend_dense(whole.transpose(0, 1)[None], *serving.dense(sequence), serving.params)
        assert torch.equal(trained[0, length - len(q) :], out.split(serving.counts)[sequence])


@pytest.mark.parametrize("deterministic", [False, True], ids=["fast", "deterministic"])
def test_a_captured_graph_serves_other_context_lengths(deterministic):
    serving = Serving((16, 8, 128), [4000, 3000, 2000, 1000], [1] * 4, deterministic=deterministic)
    out = torch.empty_like(serving.q)
    serving.plan()
    serving.attend(out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        serving.plan()
        serving.attend(out)
    for lengths in ([4000, 3000, 2000, 1000], [7, 3500, 1, 999], [4000, 1, 1, 1]):
        serving.lengths = lengths
        serving.lens.copy_(torch.tensor(lengths))
        graph.replay()
        torch.testing.assert_close(out.float(), serving.expected(), atol=2e-2, rtol=2e-2)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_neither_waits_for_the_device_nor_allocates():
    serving = Serving((16, 8, 128), [4000, 3000, 600], [1, 1, 500], deterministic=False)
    out = torch.empty_like(serving.q)
    serving.plan()
    serving.attend(out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        serving.plan()
        serving.attend(out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_blocks_far_into_a_large_pool_are_found():
    serving = Serving((4, 2, 128), [100, 70], [1, 1], deterministic=False)
    far = (1 << 31) // (2 * BLOCK_SIZE * 128) + 1  # elements past what 32 bits count
    pools = [torch.zeros(far + len(pool), *pool.shape[1:], dtype=DTYPE, device=DEVICE) for pool in serving.layer]
    for large, pool in zip(pools, serving.layer, strict=True):
        large[far:] = pool
    expected = serving.expected()
    serving.layer, serving.tables = KVLayer(*pools), serving.tables + far
    serving.plan()
    torch.testing.assert_close(serving.attend().float(), expected, atol=2e-2, rtol=2e-2)
