"""The copies that linears run from: gathered and packed beside those in use, swapped at once, and the way back."""

import weakref

import pytest
import torch

from rollout_engine.base.errors import LifecycleError
from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import build
from rollout_engine.model.cpu.row_invariance import RowInvariantMLP, make_row_invariant
from rollout_engine.model.packing import packed_weights
from rollout_engine.model.packing.linear_groups import fuse_projections, linear_groups
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.testing import tiny_model

IDS = torch.arange(3, 43).view(2, 20)
KINDS = [
    ("llama", {}),
    ("qwen2", {}),
    ("qwen3", {"tie_word_embeddings": True}),
    ("qwen3", {"tie_word_embeddings": True, "hidden_size": 56, "intermediate_size": 75, "vocab_size": 101}),
    ("qwen3_moe", {"moe_intermediate_size": 41}),
    ("gpt_oss", {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 41}),
]
PLANS = [None, linear.PLAIN, linear._LIBRARY_PLANS[0]]
pytestmark = pytest.mark.usefixtures("own_products")
needs_compiler = pytest.mark.skipif(build.load_kernels() is None, reason="no C++ compiler")


class Served:
    """A module as an engine holds it, with its packed copies."""

    def __init__(self, kind="qwen2", plan=None, num_ranks=1, **changes):
        self.module = tiny_model(kind, **changes)
        fuse_projections(self.module)
        make_row_invariant(self.module)
        for group in linear_groups(self.module):
            group.prove()
            group.plan = plan or group.plan
        self.packed = PackedWeights(self.module, num_ranks)
        state = self.module.state_dict(keep_vars=True)
        self.views = self.packed.take_over({name: tensor.detach() for name, tensor in state.items()})

    @torch.no_grad()
    def logits(self):
        return self.module(IDS).logits

    def values(self):
        held = self.packed.holds
        return {name: self.packed.plain(name) if held(name) else view.clone() for name, view in self.views.items()}

    @torch.no_grad()
    def gather(self, source):
        for name in filter(self.packed.holds, source):
            self.packed.staging(name).copy_(source[name])

    @torch.no_grad()
    def update(self, source):
        """As a transaction does it; parameters that are not held are not looked for elsewhere."""
        self.gather(source)
        for name, view in self.views.items():
            if not self.packed.holds(name):
                view.copy_(source[name])
        self.packed.pack(lambda parameter: parameter)
        self.packed.swap()
        self.packed.settle()


def halves(values):
    return {name: value * 0.5 for name, value in values.items()}


def equal(values, others):
    return values.keys() == others.keys() and all(torch.equal(value, others[name]) for name, value in values.items())


@pytest.mark.quick(2)
@needs_compiler
@pytest.mark.parametrize("kind,changes", KINDS)
def test_steps_do_not_see_what_is_staged_or_packed_before_the_swap(kind, changes):
    served = Served(kind, **changes)
    before, values = served.logits(), served.values()
    served.gather(halves(values))
    assert torch.equal(served.logits(), before) and equal(served.values(), values)
    served.packed.pack(lambda parameter: parameter)
    assert torch.equal(served.logits(), before) and equal(served.values(), values)
    served.packed.swap()
    assert not torch.equal(served.logits(), before)


@pytest.mark.quick(1)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind,changes", KINDS)
def test_after_an_update_the_module_is_the_one_with_those_weights(kind, changes, plan):
    served, fresh = Served(kind, plan, **changes), tiny_model(kind, **changes)
    assert equal(served.values(), dict(fresh.state_dict()))
    for _ in range(3):
        before, source = served.logits(), halves(served.values())
        served.update(source)
        other = Served(kind, plan, **changes)
        other.update(source)
        assert torch.equal(served.logits(), other.logits())
        assert equal(served.values(), source)
        assert not torch.equal(served.logits(), before)


@pytest.mark.quick(4)
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind,changes", KINDS)
def test_bits_are_those_of_a_module_that_keeps_its_plain_weights(kind, changes, plan):
    trainer = tiny_model(kind, **changes)
    fuse_projections(trainer)
    make_row_invariant(trainer)
    for group in linear_groups(trainer):
        group.plan, group.prove = plan or linear.plan_for(group.weight()), lambda: None
    with torch.no_grad():
        served, plain = Served(kind, plan, **changes).logits(), trainer(IDS).logits
    if plan == linear.PLAIN:  # the bits of a library's product may depend on the places of its operands in memory
        torch.testing.assert_close(served, plain, rtol=0, atol=1e-5)
    else:
        assert torch.equal(served, plain)


@pytest.mark.quick(5)
@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind,changes", KINDS)
def test_an_update_called_off_leaves_every_bit(kind, changes, dtype):
    served = Served(kind, dtype=dtype, **changes)
    before, values = served.logits(), served.values()
    for packs in (False, True):
        served.gather(halves(values))
        if packs:
            served.packed.pack(lambda parameter: parameter)
        served.packed.settle()
        assert torch.equal(served.logits(), before) and equal(served.values(), values)


@pytest.mark.quick(2)
@needs_compiler
@pytest.mark.parametrize("kind,changes", KINDS)
def test_a_value_staged_after_packing_joins_those_before_it(kind, changes):
    served = Served(kind, **changes)
    source = halves(served.values())
    served.gather(source)
    served.packed.pack(lambda parameter: parameter)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert torch.equal(served.packed.staging(name), source[name])
    source[name] = source[name] * 3
    served.gather({name: source[name]})
    served.packed.pack(lambda parameter: parameter)
    served.packed.swap()
    assert all(torch.equal(served.packed.plain(name), source[name]) for name in filter(served.packed.holds, source))


@needs_compiler
def test_a_parameter_that_exists_packed_alone_cannot_be_read():
    module = Served("qwen3", tie_word_embeddings=True).module
    assert not module.model.norm.weight.is_meta
    assert module.lm_head.weight is module.model.embed_tokens.weight
    for weight in (module.lm_head.weight, module.model.layers[0].self_attn.k_proj.weight):
        with pytest.raises(RuntimeError, match="meta"):
            weight.sum().item()


@pytest.mark.quick(2)
@needs_compiler
@pytest.mark.parametrize("kind,changes", KINDS)
def test_parameters_can_be_made_readable_for_a_while(kind, changes):
    served, expected = Served(kind, **changes), dict(tiny_model(kind, **changes).state_dict())
    before = served.logits()
    with served.packed.readable():
        assert equal(dict(served.module.state_dict()), expected)
        assert list(served.module.state_dict()) == list(expected)
        tied = served.module.lm_head.weight is served.module.model.embed_tokens.weight
        assert tied == changes.get("tie_word_embeddings", False)
        with torch.no_grad():
            served.module.lm_head.weight.zero_()
    assert served.module.lm_head.weight.is_meta
    assert torch.equal(served.logits(), before) and equal(served.values(), expected)


@needs_compiler
def test_what_something_else_reads_stays_where_it_is():
    module = tiny_model("qwen3", tie_word_embeddings=True)
    module.model.embed_tokens.max_norm = 1e9  # an embedding that is more than a table
    make_row_invariant(module)
    for group in linear_groups(module):
        group.prove()
    packed = PackedWeights(module)
    views = packed.take_over({"head": module.lm_head.weight, "out": module.model.layers[0].self_attn.o_proj.weight})
    assert (packed.holds("head"), views["head"].is_meta) == (False, False)
    assert (packed.holds("out"), views["out"].is_meta) == (True, True)


@needs_compiler
@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_that_a_forward_multiplies_by_itself_keeps_its_plain_values(tied, monkeypatch):
    def forward(mlp, x):
        up = torch.nn.functional.linear(x, mlp.up_proj.weight)  # and never calls the linear
        return mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(x)) * up)

    monkeypatch.setattr(RowInvariantMLP, "forward", forward)
    served, plain = Served("qwen3", tie_word_embeddings=tied), tiny_model("qwen3", tie_word_embeddings=tied)
    held = {part: served.packed.holds(f"model.layers.0.mlp.{part}_proj.weight") for part in ("gate", "up", "down")}
    assert held == {"gate": False, "up": False, "down": True}  # gate and up are one matrix
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(served.logits(), plain(IDS).logits)
        source = halves(served.values())
        served.update(source)
        plain.load_state_dict(source)


def test_a_borrowed_product_keeps_its_plain_weight():
    served = Served("llama", linear.PLAIN)
    assert not any(map(served.packed.holds, served.views))


@needs_compiler
def test_an_update_packs_over_what_the_one_before_stopped_using():
    served = Served()
    places = []
    for _ in range(4):
        places.append([group.packed.panels.data_ptr() for group in linear_groups(served.module)])
        served.update(halves(served.values()))
    assert places[0] == places[2] and places[1] == places[3] and places[0] != places[1]


@needs_compiler
def test_much_memory_is_given_back_between_updates_and_serves_the_next(monkeypatch):
    given_back = []
    monkeypatch.setattr(packed_weights, "_KEPT_BYTES", 0)
    release_pages = packed_weights.release_pages
    monkeypatch.setattr(
        packed_weights, "release_pages", lambda panels: given_back.append(len(panels)) or release_pages(panels)
    )
    served = Served()
    for _ in range(3):
        source = halves(served.values())
        served.update(source)
        assert equal(served.values(), source)
    assert given_back == [len(linear_groups(served.module))] * 3


@needs_compiler
def test_what_is_kept_between_updates_is_counted_over_all_ranks(monkeypatch):
    sizes = []
    for num_ranks in (1, 2):
        served = Served(num_ranks=num_ranks)
        served.update(halves(served.values()))
        if num_ranks == 1:
            monkeypatch.setattr(packed_weights, "_KEPT_BYTES", served.packed.num_spare_bytes)
        served.packed.settle()
        sizes.append(served.packed.num_spare_bytes)
    assert sizes == [packed_weights._KEPT_BYTES, 0] and sizes[0] > 0


def test_a_swap_is_counted_by_every_group():
    served = Served()
    before = [group.packs.num_packs for group in linear_groups(served.module)]
    served.gather(served.values())
    served.packed.pack(lambda parameter: parameter)
    assert [group.packs.num_packs for group in linear_groups(served.module)] == before
    served.packed.swap()
    assert [group.packs.num_packs for group in linear_groups(served.module)] == [count + 1 for count in before]


@pytest.mark.parametrize("plan", PLANS)
def test_what_can_be_made_again_is_freed_and_made_again(plan):
    served = Served("qwen2", plan)
    before = served.logits()
    derived = [weakref.ref(group.operand()[0]) for group in linear_groups(served.module) if plan == PLANS[2]]
    served.packed.release()
    assert all(reference() is None for reference in derived)
    served.packed.make()
    assert torch.equal(served.logits(), before)


@needs_compiler
def test_forgotten_values_are_freed_and_an_update_brings_others():
    served = Served()
    values = served.values()
    panels = [weakref.ref(group.packed.panels) for group in linear_groups(served.module)]
    served.packed.release(forget=True)
    served.packed.make()
    assert all(reference() is None for reference in panels)
    with pytest.raises(LifecycleError, match="Send a complete update"):
        served.packed.plain("lm_head.weight")
    served.update(values)
    assert equal(served.values(), values)


def test_a_module_without_linears_has_nothing_to_pack():
    packed = PackedWeights(torch.nn.Embedding(3, 2))
    views = {"weight": torch.ones(3, 2)}
    assert packed.take_over(views) == views
    packed.pack(lambda parameter: parameter)
    packed.swap()
    packed.settle()
    assert not packed.holds("weight")


@pytest.mark.quick(1)
@needs_compiler
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("kind,changes", KINDS)
def test_what_a_partial_update_does_not_send_keeps_its_bits(kind, changes, in_place):
    served, whole = Served(kind, **changes), Served(kind, **changes)
    before = served.values()
    name = next(name for name in before if "k_proj.weight" in name)
    whole.update(before | {name: before[name] * 0.5})
    if in_place:
        served.packed.surrender()
    served.packed.carry()
    served.gather({name: before[name] * 0.5})
    served.packed.pack(lambda parameter: parameter)
    served.packed.swap()
    assert equal(served.values(), whole.values()) and torch.equal(served.logits(), whole.logits())
