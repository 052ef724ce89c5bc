"""A module cut over ranks computes the bits of the whole one, and each rank holds its part alone."""

import os
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.messages import SchedulerOutput
from rollout_engine.kernels.cpu import turns
from rollout_engine.model.loading.weight_table import WeightTable
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.ranks.cut import cut_module
from rollout_engine.model.ranks.part import Region, part_of
from rollout_engine.model.ranks.seat import Seat, preparing, score_together
from rollout_engine.model.ranks.share import Share, share_of
from rollout_engine.model.ranks.shared_exchange import TOTAL_BYTES, SharedExchange
from rollout_engine.testing import tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import HYBRID_SIZES, SIZES
from tests.unit.model.ranked import Partner, backend_of, logits_of

pytestmark = [
    pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here"),
    pytest.mark.usefixtures("own_products"),
]
LATENTS = SIZES["deepseek_v3"] | dict(first_k_dense_replace=2)
ODD_MAMBA = HYBRID_SIZES["bamba"] | dict(num_attention_heads=4, mamba_n_heads=3, mamba_d_head=32, mamba_n_groups=1)
MODELS = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "mixtral": ("mixtral", {}),
    "gpt_neox": ("gpt_neox", {}),
    "one key head": ("qwen3", dict(num_key_value_heads=1)),
    "latents": ("deepseek_v3", LATENTS | dict(num_attention_heads=4, num_key_value_heads=4)),
    "latents of odd heads": ("deepseek_v2", LATENTS),
    "odd sizes": ("llama", dict(hidden_size=56, intermediate_size=75, head_dim=18, vocab_size=301)),
    "tied": ("qwen3", dict(tie_word_embeddings=True)),
    "biases": ("llama", dict(attention_bias=True, mlp_bias=True)),
    "a shared expert cut by columns": ("dots1", SIZES["dots1"]),
    "a shared expert on every rank": ("qwen2_moe", SIZES["qwen2_moe"] | dict(num_experts=6)),
    "a router that is given its bias": ("hy_v3", SIZES["hy_v3"]),
    "shared keys": ("gemma4_text", SIZES["gemma4_text"]),
    "gated delta nets": ("qwen3_5_text", HYBRID_SIZES["qwen3_5_text"]),
    "mamba": ("nemotron_h", HYBRID_SIZES["nemotron_h"]),
    "mamba of odd heads": ("bamba", ODD_MAMBA),
    "short convolutions": ("lfm2", HYBRID_SIZES["lfm2"] | dict(num_attention_heads=4, num_key_value_heads=2)),
}

FAST = ("qwen3", "mixtral", "latents", "gated delta nets")
HYBRIDS = ("gated delta nets", "mamba", "mamba of odd heads", "short convolutions")
AS_MODULES = ("gpt_neox", "latents", "latents of odd heads", "shared keys", *HYBRIDS)


@pytest.fixture(scope="module")
def partner():
    partner = Partner()
    yield partner
    partner.end()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [*FAST, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MODELS if kind not in FAST)]
)
def test_logits_have_the_bits_of_one_rank(tmp_path, partner, kind, dtype):
    architecture, overrides = MODELS[kind]
    path = tiny_checkpoint(tmp_path, architecture, **overrides)
    whole = logits_of(backend_of(path, dtype=dtype))
    backend = backend_of(path, partner.begin(path, dtype=dtype), dtype=dtype)
    assert all(map(torch.equal, logits_of(backend), whole))
    assert ("decoder compiled" in backend.choices) == (kind not in AS_MODULES)
    assert ("MiB a rank" in backend.choices) == (kind in HYBRIDS)
    assert ("recurrences whole on every rank" in backend.choices) == (kind == "mamba of odd heads")


class Told(list):
    """The messages of a seat to its followers."""

    def step(self, work, token_ids):
        self.append((work, token_ids.tolist()))

    def take_logits(self, rows):
        self.append(rows)

    def begin_score(self, arguments):
        self.append(arguments)
        return 7

    def score_piece(self, number):
        self.append(number)

    def end_score(self, number):
        self.append(-number)


def seat_of(followers):
    broken = []
    return Seat(SimpleNamespace(rank=0, num_ranks=2, break_=lambda: broken.append(True)), followers), broken


def test_followers_are_told_before_rank_0_computes_once_it_serves():
    told = Told()
    seat, broken = seat_of(told)
    with seat.lead(lambda followers: followers.take_logits([1])):
        assert told == []
    seat.serve()
    with seat.lead_logits(range(2, 4)):
        assert told == [[2, 3]]
    assert not broken
    with pytest.raises(ValueError, match="half-way"), seat.lead_logits([5]):
        raise ValueError("half-way")
    assert broken


def test_each_piece_of_a_score_is_announced_and_its_end_too():
    told = Told()
    seat, _ = seat_of(told)
    seat.serve()
    pieces = score_together(seat, lambda *given: iter([{0: given}, {1: given}]), "a", "b")
    assert next(pieces) == {0: ("a", "b")} and told == [("a", "b"), 7]
    assert list(pieces) == [{1: ("a", "b")}] and told == [("a", "b"), 7, 7, 7, -7]
    abandoned = score_together(seat, lambda: iter([{0: 0}, {1: 1}]))
    next(abandoned)
    abandoned.close()
    assert told[-1] == -7


def test_followers_note_the_changes_of_a_step_that_cannot_be_prepared():
    told = Told()
    seat, broken = seat_of(told)
    seat.serve()
    work = SchedulerOutput(3, 0, [1], [], [(1, 2)], ["a chunk"], ["a sample"])
    with pytest.raises(MemoryError), preparing(seat, work):
        raise MemoryError
    [(changes, token_ids)] = told
    assert changes == SchedulerOutput(3, 0, [1], [], [], [], []) and token_ids == [] and not broken


def test_parts_are_added_up_on_every_rank():
    memory = os.memfd_create("ranks")
    os.ftruncate(memory, TOTAL_BYTES)
    ends = [SharedExchange(memory, rank, 2) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            found = list(pool.map(lambda end: end.add_up(torch.full((2, 3), 1.0 + end.rank)), ends))
            assert [each.tolist() for each in found] == [[[3.0] * 3] * 2] * 2
    os.close(memory)


def test_shares_hold_every_row_once_at_panels_where_there_are_enough():
    for whole, ranks in ((7, 2), (64, 2), (75, 2), (301, 4), (151936, 3)):
        shares = [share_of(whole, rank, ranks) for rank in range(ranks)]
        assert [s.first for s in shares] == [0, *(s.stop for s in shares[:-1])] and shares[-1].stop == whole
        assert whole < 32 * ranks or all(s.first % 32 == 0 for s in shares)
    with pytest.raises(ValueError, match="3 rows cannot be divided among 4 ranks"):
        share_of(3, 0, 4)
    assert Share(1, 3, 4).times(8) == Share(8, 24, 32)


@pytest.mark.parametrize("architecture, overrides, num_ranks, match", [
    ("gpt2", {}, 2, "no tensor-parallel plan"),
    ("qwen3", dict(num_attention_heads=3, num_key_value_heads=3), 2, "its 3 query heads and 3 key/value heads"),
    ("qwen3", dict(num_attention_heads=8, num_key_value_heads=4), 3, "Give a number that divides 8"),
    ("mixtral", dict(num_attention_heads=16, num_local_experts=8), 16, "is too many: its experts: 8 rows"),
])  # fmt: skip
def test_models_that_cannot_be_cut_are_refused_with_the_reason(architecture, overrides, num_ranks, match):
    module = tiny_model(architecture, attn_implementation=ATTENTION_NAME, **overrides)
    with pytest.raises(ConfigError, match=match):
        cut_module(
            module, probe_geometry(module), SimpleNamespace(rank=0, num_ranks=num_ranks, splits_sums=False, pipe=None)
        )


@pytest.mark.quick(1)
@pytest.mark.parametrize("splits_sums", [False, True])
@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_ranks_together_hold_every_named_value_once(num_ranks, splits_sums):
    module = tiny_model("qwen3_moe", num_key_value_heads=4)
    table = WeightTable.of(module)
    geometry, seen = probe_geometry(module), {name: [] for name in table.views}
    for rank in range(num_ranks):
        module = tiny_model("qwen3_moe", num_key_value_heads=4)
        whole = WeightTable.of(module)
        seat = SimpleNamespace(rank=rank, num_ranks=num_ranks, splits_sums=splits_sums, pipe=None)
        cut = cut_module(module, geometry, seat, keep_values=True)
        assert len(cut.columns) == (len(geometry) if splits_sums else 0)
        live = module.state_dict()
        for name, view in whole.views.items():
            owner = whole.owners[name]
            rows, columns = cut.shares.get(owner), cut.columns.get(owner)
            part = part_of(name, view, whole.views[owner], live[owner], rows, columns)
            assert torch.equal(part.view.reshape(-1), part.region.of(view.reshape(-1), 0).reshape(-1)), name
            if rows or columns:
                seen[name].append(part.view.numel())
    assert all(sum(sizes) == table.views[name].numel() for name, sizes in seen.items() if sizes)


@pytest.mark.parametrize("columns", [None, Share(3, 8, 11)])
def test_pieces_of_a_region_are_found_wherever_they_are_cut(columns):
    whole = torch.arange(7 * 11)
    region = Region(0, 77, columns) if columns else Region(13, 64)
    held = region.of(whole, 0).clone()
    for start, stop in ((0, 77), (11, 33), (22, 22), (66, 77), (0, 11)):
        window, seen = whole[start:stop], 0
        for view, inside in region.pieces(held, start, stop):
            assert torch.equal(view, inside.of(window, start).view(view.shape))
            seen += view.numel()
        assert seen == region.within(start, stop).of(window, start).numel()


def test_a_product_with_a_bias_is_cut_by_its_outputs_where_sums_are_split():
    module = tiny_model("llama", attention_bias=True)
    seat = SimpleNamespace(rank=1, num_ranks=2, splits_sums=True, pipe=None)
    cut = cut_module(module, probe_geometry(module), seat)
    assert all("down_proj" in name for name in cut.columns) and any("o_proj.bias" in name for name in cut.shares)
