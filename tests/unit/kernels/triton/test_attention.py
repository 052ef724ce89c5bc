"""Attention over paged KV through work lists that cut items between programs, against plain softmax in float64.

What no row may read, in the pool and in the outputs, is no number.
"""

import pytest
import torch

from rollout_engine.kernels.attention_params import AttentionParams
from rollout_engine.kernels.triton.attention import Result, attend, empty_parts
from rollout_engine.kernels.triton.tiling import Tiling
from rollout_engine.kernels.triton.work import WorkList
from tests.unit.kernels.triton.paged import Contexts, starts_of

DECODE = Tiling(16, 16, 16, num_warps=4, num_stages=3, programs_per_processor=1)
PREFILL = Tiling(32, 16, 16, num_warps=4, num_stages=3, programs_per_processor=1, skips_masks=True)
DETERMINISTIC = Tiling(16, 16, 32, num_warps=4, num_stages=3, programs_per_processor=1, deterministic=True)


def run(contexts, ends, counts, tiling, params, *, tokens_per_item, programs, sinks=None, is_whole=False):
    """[T, H, Dv] and log-sum-exp [T, H] of the last `counts` tokens before `ends`."""
    device, group = contexts.device, contexts.num_heads // contexts.num_kv_heads
    q = contexts.flat_queries(ends, counts)
    work = WorkList(
        WorkList.items_needed(len(q), len(ends), tokens_per_item),
        tokens_per_item=tokens_per_item,
        unit=tiling.unit,
        num_kv_heads=contexts.num_kv_heads,
        num_programs=programs,
        is_whole=is_whole,
        device=device,
    )
    lens = torch.tensor(ends, dtype=torch.int32, device=device)
    work.fill(starts_of(counts, device), lens, sliding_window=params.sliding_window)
    slots = tiling.slots(max(ends), len(work.items), contexts.num_kv_heads, programs)
    workspace = empty_parts(programs, slots, tokens_per_item * group, dim_v=contexts.dim_v, device=device)
    out = q.new_full((len(q), contexts.num_heads, contexts.dim_v), torch.nan)
    lse = q.new_full(out.shape[:2], torch.nan, dtype=torch.float32)
    for memory in workspace:
        memory.fill_(torch.nan)
    attend(
        *(q, contexts.layer, contexts.tables, work, tiling, params, Result(out, lse), workspace),
        sinks=None if sinks is None else sinks.to(device),
    )
    return out, lse


def check(contexts, ends, counts, tiling, params, *, atol=2e-6, sinks=None, **how):
    out, lse = run(contexts, ends, counts, tiling, params, sinks=sinks, **how)
    expected, expected_lse = contexts.expected(ends, counts, params, sinks)
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, atol=max(atol, 1e-5), rtol=1e-5)


CASES = [
    pytest.param((4, 4), (16, 16), 16, AttentionParams(0.25), id="multi-head"),
    pytest.param((7, 1), (64, 64), 32, AttentionParams(0.125), id="seven heads of one KV head", marks=pytest.mark.slow),
    pytest.param((6, 2), (40, 24), 48, AttentionParams(0.2), id="odd head sizes, blocks of three tiles"),
    pytest.param((4, 2), (32, 32), 16, AttentionParams(0.2, sliding_window=21), id="window"),
    pytest.param((4, 2), (32, 32), 16, AttentionParams(0.4, softcap=2.0), id="soft cap"),
    pytest.param((2, 1), (256, 256), 64, AttentionParams(0.0625), id="256 channels", marks=pytest.mark.slow),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("heads", "dims", "block_size", "params"), CASES)
@pytest.mark.parametrize("tiling", [DECODE, DETERMINISTIC], ids=["fast", "deterministic"])
def test_decode_is_attention(heads, dims, block_size, params, tiling, device):
    ends = [1, 57, 16, 90]
    contexts = Contexts(ends, heads, dims, block_size=block_size, device=device)
    check(contexts, ends, [1] * 4, tiling, params, tokens_per_item=1, programs=5)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(0.2),
        AttentionParams(0.2, sliding_window=37),
        pytest.param(AttentionParams(0.2, sliding_window=3), marks=pytest.mark.slow),
        pytest.param(AttentionParams(0.4, softcap=2.0), marks=pytest.mark.slow),
    ],
    ids=["plain", "window", "narrow window", "soft cap"],
)
@pytest.mark.parametrize(
    ("tiling", "is_whole"), [(PREFILL, False), (DETERMINISTIC, True)], ids=["fast", "deterministic"]
)
def test_chunks_of_prompts_are_attention_beside_decoding_sequences(params, tiling, is_whole, device):
    ends, counts = [40, 60, 75], [1, 25, 5]
    contexts = Contexts(ends, (3, 1), (32, 24), device=device)
    tokens = tiling.block_m // 3
    check(contexts, ends, counts, tiling, params, tokens_per_item=tokens, programs=3, is_whole=is_whole)


@pytest.mark.quick(1)
@pytest.mark.parametrize("tiling", [DECODE, DETERMINISTIC], ids=["fast", "deterministic"])
def test_sinks_take_their_share_once_however_an_item_is_cut(tiling, device):
    ends = [5, 130]
    contexts = Contexts(ends, (6, 2), (16, 16), device=device)
    check(contexts, ends, [1, 1], tiling, AttentionParams(0.3), tokens_per_item=1, programs=7, sinks=torch.randn(6))


@pytest.mark.parametrize("tiling", [DECODE, DETERMINISTIC], ids=["fast", "deterministic"])
def test_half_precision_loses_no_more_than_its_rounding(tiling, device):
    ends = [33, 64]
    contexts = Contexts(ends, (4, 2), (32, 32), dtype=torch.bfloat16, device=device)
    check(contexts, ends, [1, 1], tiling, AttentionParams(0.2), tokens_per_item=1, programs=3, atol=8e-3)


def test_one_long_context_is_joined_from_many_programs(device):
    contexts = Contexts([400], (2, 1), (16, 16), device=device)
    check(contexts, [400], [1], DECODE, AttentionParams(0.25), tokens_per_item=1, programs=25)


def test_deterministic_bits_do_not_depend_on_cuts_neighbours_or_chunks(device):
    ends = [70, 36, 45]
    contexts = Contexts(ends, (3, 1), (32, 32), device=device)
    params = AttentionParams(0.2)
    whole, _ = run(contexts, ends, ends, DETERMINISTIC, params, tokens_per_item=5, programs=2, is_whole=True)
    last = whole[[69, 105, 150]]
    for programs in (1, 5):
        decoded, _ = run(contexts, ends, [1] * 3, DETERMINISTIC, params, tokens_per_item=1, programs=programs)
        assert torch.equal(decoded, last)
    chunk, _ = run(contexts, ends, [9, 1, 12], DETERMINISTIC, params, tokens_per_item=5, programs=3, is_whole=True)
    assert torch.equal(chunk, torch.cat([whole[61:70], whole[105:106], whole[139:151]]))


def test_padding_of_a_captured_batch_is_left_alone(device):
    contexts = Contexts([30, 16, 40], (2, 1), (16, 16), device=device)
    work = WorkList(3, tokens_per_item=1, unit=16, num_kv_heads=1, num_programs=4, is_whole=False, device=device)
    lens = torch.tensor([30, 0, 40], dtype=torch.int32, device=device)
    work.fill(starts_of([1, 1, 1], device), lens)
    q = contexts.flat_queries([30, 16, 40], [1, 1, 1])
    out = torch.full((3, 2, 16), 7.0, device=device)
    workspace = empty_parts(4, 2, 2, dim_v=16, device=device)
    params = AttentionParams(0.25)
    attend(q, contexts.layer, contexts.tables, work, DECODE, params, Result(out), workspace)
    expected, _ = contexts.expected([30, 16, 40], [1, 1, 1], params)
    torch.testing.assert_close(out[[0, 2]].double(), expected[[0, 2]], atol=2e-6, rtol=1e-5)
    assert (out[1] == 7.0).all()
