"""Whole batches: decoding groups, then chunks; and the trainer's attention with the same bits."""

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton import tiling
from rollout_engine.kernels.triton.dense import attend_dense
from rollout_engine.kernels.triton.layout import KVLayer
from rollout_engine.kernels.triton.paged_attention import Batch, Heads, Limits, PagedAttention, Prefixes
from rollout_engine.kernels.triton.rotary import Rotary, rotate_and_write
from rollout_engine.kernels.triton.shared_prefix import shared_prefixes
from tests.unit.kernels.triton.paged import Contexts, starts_of

HEADS = (6, 2)
DIM = 16
PARAMS = AttentionParams(0.25)
ENDS, COUNTS, NUM_DECODES = [140, 133, 150, 20, 90], [1, 1, 1, 1, 12], 4
"""The first three are a group."""


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Several units in a short context."""
    monkeypatch.setattr(tiling, "_DETERMINISTIC_UNIT", 64)


@pytest.fixture
def contexts(device):
    made = Contexts([150] * 5, HEADS, (DIM, DIM), num_shared=128, device=device)
    made.tables[3:, :8] = made.tables[3:, :8].flip(1)  # shared memory, but another prefix
    for rows, pool in zip((made.keys, made.values), made.layer, strict=True):
        for sequence in (3, 4):
            blocks = pool[made.tables[sequence].long()].transpose(1, 2).flatten(0, 1)
            rows[sequence] = blocks[:150].cpu()
    return made


def run(contexts, *, deterministic, params=PARAMS, grouped=False, sinks=None, num_processors=2):
    device = contexts.device
    heads = Heads(*HEADS, DIM, DIM, torch.float32)
    limits, how = Limits(64, 5, 150), {"deterministic": deterministic, "num_processors": num_processors}
    attention = PagedAttention(heads, limits, device, **how)
    prefixes = None
    if grouped:
        shared = shared_prefixes(
            contexts.tables[:NUM_DECODES].cpu().numpy(),
            np.array(ENDS[:NUM_DECODES], np.int32),
            block_size=16,
            unit=attention.prefix.tiling.unit,
            tokens_per_item=attention.prefix.tokens_per_item,
        )
        assert shared.units.tolist() == [2, 2, 2, 0]
        prefixes = Prefixes(
            *(torch.from_numpy(column).to(device) for column in (shared.items, shared.units, shared.num_items))
        )
    lens = torch.tensor(ENDS, dtype=torch.int32, device=device)
    batch = Batch(starts_of(COUNTS, device), lens, contexts.tables, NUM_DECODES, prefixes)
    attention.plan(batch, {params.sliding_window})
    q = contexts.flat_queries(ENDS, COUNTS)
    out = torch.full_like(q, torch.nan)
    attention.attend(q, contexts.layer, params, out, sinks=sinks)
    return out


@pytest.mark.parametrize(
    "deterministic", [pytest.param(False, marks=pytest.mark.slow), True], ids=["fast", "deterministic"]
)
def test_groups_read_their_prefix_together_and_each_its_own(contexts, deterministic):
    sinks = torch.randn(6)
    out = run(contexts, deterministic=deterministic, grouped=True, sinks=sinks.to(contexts.device))
    expected, _ = contexts.expected(ENDS, COUNTS, PARAMS, sinks)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


def test_layers_with_a_window_read_their_prefixes_alone(contexts):
    params = AttentionParams(0.25, sliding_window=70)
    out = run(contexts, deterministic=False, params=params, grouped=True)
    expected, _ = contexts.expected(ENDS, COUNTS, params)
    torch.testing.assert_close(out.double(), expected, atol=2e-6, rtol=1e-5)


def test_in_order_groups_change_no_bit(contexts):
    assert torch.equal(run(contexts, deterministic=True, grouped=True), run(contexts, deterministic=True))


def test_in_order_engine_and_trainer_compute_the_same_bits(contexts):
    served = run(contexts, deterministic=True)
    places = [(3, 20, 1), (4, 90, 12)]
    for sequence, end, count in places:
        rows = (x[sequence][:end][None].transpose(1, 2) for x in (contexts.queries, contexts.keys, contexts.values))
        out, lse = attend_dense(*(x.to(contexts.device) for x in rows), PARAMS)
        start = sum(COUNTS[:sequence])
        assert torch.equal(out[0, end - count :], served[start : start + count])
        ends = [end if i == sequence else 1 for i in range(5)]
        expected = contexts.expected(ends, ends, PARAMS)[1][sequence : sequence + end]
        torch.testing.assert_close(lse[0].double(), expected, atol=1e-5, rtol=1e-5)


def test_packed_sequences_are_computed_as_if_each_were_alone(device):
    lengths = [20, 1, 70, 9]
    q, k, v = (torch.randn(1, heads, sum(lengths), DIM, device=device) for heads in (6, 2, 2))
    out, lse = attend_dense(q, k, v, PARAMS, None, lengths)
    parts = [x.split(lengths, 2) for x in (q, k, v)]
    alone = [attend_dense(*part, PARAMS) for part in zip(*parts, strict=True)]
    assert torch.equal(out, torch.cat([one for one, _ in alone], 1))
    assert torch.equal(lse, torch.cat([one for _, one in alone], 1))


def test_a_sequence_is_written_and_read_chunk_by_chunk(device):
    length, block_size = 45, 16
    q, k, v = (torch.randn(length, heads, DIM, device=device) for heads in (6, 2, 2))
    angles = torch.arange(length, device=device)[:, None] * 0.9 ** torch.arange(DIM // 2, device=device)
    rotary = Rotary(*(table.repeat(1, 2) for table in (angles.cos(), angles.sin())))
    table = torch.tensor([[4, 1, 3]], dtype=torch.int32, device=device)
    layer = KVLayer.zeros(5, 2, block_size, DIM, DIM, dtype=torch.float32, device=device)
    attention = PagedAttention(
        Heads(*HEADS, DIM, DIM, torch.float32), Limits(length, 1, length), device, num_processors=2
    )
    outs = []
    for start, end in ((0, 30), (30, 44), (44, 45)):
        positions = torch.arange(start, end, device=device)
        slots = table[0, positions // block_size] * block_size + positions % block_size
        rotated = torch.empty_like(q[start:end])
        rotate_and_write(q[start:end], k[start:end], v[start:end], positions, slots, rotary, layer, rotated)
        lens = torch.tensor([end], dtype=torch.int32, device=device)
        attention.plan(Batch(starts_of([end - start], device), lens, table, int(end - start == 1)), {0})
        outs.append(torch.empty_like(rotated))
        attention.attend(rotated, layer, PARAMS, outs[-1])
    expected = plain(rotate(q, rotary), rotate(k, rotary), v)
    torch.testing.assert_close(torch.cat(outs), expected, atol=2e-6, rtol=1e-5)


def rotate(x, rotary):
    low, high = x.chunk(2, -1)
    return x * rotary.cos[:, None] + torch.cat([-high, low], -1) * rotary.sin[:, None]


def plain(q, k, v):
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=PARAMS.scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def test_tilings_fit_a_multiprocessor_and_hold_every_group():
    for group in (1, 2, 7, 16, 24, 71):
        for dim, element_bytes in ((32, 2), (64, 2), (128, 2), (256, 2), (128, 4), (256, 4)):
            heads = Heads(group, 1, dim, dim, torch.bfloat16 if element_bytes == 2 else torch.float32)
            for kind in ("decode", "shared_prefix", "prefill", "deterministic"):
                chosen = heads.tiling(kind)
                assert chosen.block_m >= max(16, group) and chosen.unit % chosen.tile == 0
                assert chosen.tile * 2 * dim * element_bytes <= 32 * 1024 or chosen.tile == 16


def test_decode_has_a_third_program_only_where_tiles_are_within_a_block_and_all_three_fit():
    narrow = Heads(16, 8, 128, 128, torch.bfloat16)
    assert narrow.tiling("decode", block_size=64).programs_per_processor == 3
    assert narrow.tiling("decode", block_size=64).max_registers == 168
    others = {
        "blocks of 16": narrow.tiling("decode", block_size=16),
        "99 KiB of shared memory": narrow.tiling("decode", 99 * 1024, block_size=64),
        "wide heads": Heads(16, 8, 256, 256, torch.bfloat16).tiling("decode", block_size=64),
        "float32": Heads(16, 8, 128, 128, torch.float32).tiling("decode", block_size=64),
        "many heads of one KV head": Heads(32, 1, 64, 64, torch.bfloat16).tiling("decode", block_size=64),
    }
    for name, chosen in others.items():
        assert (chosen.programs_per_processor, chosen.max_registers) == (2, None), name


def test_nothing_but_decode_depends_on_the_size_of_a_block():
    for kind in ("shared_prefix", "prefill", "deterministic"):
        for dim in (64, 128, 256):
            heads = Heads(16, 8, dim, dim, torch.bfloat16)
            assert heads.tiling(kind, block_size=64) == heads.tiling(kind, block_size=16)
            assert heads.tiling(kind).max_registers is None


@pytest.mark.slow
def test_bits_of_the_fast_mode_depend_on_the_number_of_programs_and_those_in_order_do_not(contexts):
    """Where the line of units is cut, two softmaxes are merged. So only the exact mode promises bits."""
    fast, exact = (
        [run(contexts, deterministic=mode, num_processors=count) for count in (2, 3)] for mode in (False, True)
    )
    assert not torch.equal(*fast)
    torch.testing.assert_close(*fast, atol=2e-6, rtol=1e-5)
    assert torch.equal(*exact)
