"""The copies that linears run from: made beside those in use, swapped at once, and the way back."""

import copy
import weakref

import pytest
import torch

from rollout_engine.kernels import linear
from rollout_engine.kernels.cpu import build
from rollout_engine.model.fusion import fuse_projections, linear_groups
from rollout_engine.model.packed_weights import PackedWeights
from rollout_engine.model.row_invariance import make_row_invariant
from rollout_engine.testing import tiny_model

IDS = torch.arange(3, 43).view(2, 20)
KINDS = [("llama", {}), ("qwen2", {}), ("qwen3", {"tie_word_embeddings": True})]
needs_compiler = pytest.mark.skipif(build.load_kernels() is None, reason="no C++ compiler")


def served(kind="qwen2", plan=None, **changes):
    """(module as an engine holds it, its packed copies)."""
    module = tiny_model(kind, **changes)
    fuse_projections(module)
    make_row_invariant(module)
    return module, packed_by(module, plan)


def packed_by(module, plan):
    for group in linear_groups(module):
        group.prove()
        group.plan = plan or group.plan
    return PackedWeights(module)


def halved(weight):
    return weight * 0.5


@torch.no_grad()
def logits(module):
    return module(IDS).logits


@torch.no_grad()
def write(module, packed, *, read):
    """Halve the plain parameters that forwards do, or do not, read in place."""
    seen = set()
    for parameter in module.parameters():
        storage = parameter.untyped_storage().data_ptr()
        if packed.reads(parameter) == read and (storage, parameter.storage_offset()) not in seen:
            seen.add((storage, parameter.storage_offset()))
            parameter.mul_(0.5)


@needs_compiler
@pytest.mark.parametrize("kind,changes", KINDS)
def test_steps_do_not_see_what_is_written_or_packed_before_the_swap(kind, changes):
    module, packed = served(kind, **changes)
    before = logits(module)
    write(module, packed, read=False)
    assert torch.equal(logits(module), before)
    packed.pack(lambda weight: weight)
    assert torch.equal(logits(module), before)
    packed.swap()
    assert not torch.equal(logits(module), before)


@pytest.mark.parametrize("plan", [None, linear.PLAIN, linear._BORROWED[0]])
@pytest.mark.parametrize("kind,changes", KINDS)
def test_after_a_swap_the_module_is_the_one_with_those_weights(kind, changes, plan):
    module, packed = served(kind, plan, **changes)
    for _ in range(3):
        before = logits(module)
        packed.pack(halved)
        write(module, packed, read=True)
        write(module, packed, read=False)
        packed.swap()
        fresh = copy.deepcopy(module)
        packed_by(fresh, plan)
        assert torch.equal(logits(module), logits(fresh))
        assert not torch.equal(logits(module), before)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind,changes", KINDS)
def test_plain_weights_come_back_from_the_copies_bit_for_bit(kind, changes, dtype):
    module, packed = served(kind, dtype=dtype, **changes)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    write(module, packed, read=False)
    assert not all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    packed.restore()
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@needs_compiler
def test_a_weight_that_an_embedding_reads_too_is_read_in_place():
    module, packed = served("qwen3", tie_word_embeddings=True)
    assert packed.reads(module.lm_head.weight)
    assert packed.reads(module.model.norm.weight)
    assert not packed.reads(module.model.layers[0].self_attn.k_proj.weight)


def test_a_borrowed_product_reads_in_place():
    module, packed = served("llama", linear.PLAIN)
    assert all(packed.reads(parameter) for parameter in module.parameters())


@needs_compiler
def test_an_update_packs_over_what_the_one_before_stopped_using():
    module, packed = served()
    places = []
    for _ in range(4):
        places.append([group.packed.panels.data_ptr() for group in linear_groups(module)])
        packed.pack(lambda weight: weight)
        packed.swap()
    assert places[0] == places[2] and places[1] == places[3] and places[0] != places[1]


def test_a_swap_is_counted_by_every_group():
    module, packed = served()
    before = [group.num_packs for group in linear_groups(module)]
    packed.pack(lambda weight: weight)
    assert [group.num_packs for group in linear_groups(module)] == before
    packed.swap()
    assert [group.num_packs for group in linear_groups(module)] == [count + 1 for count in before]


def test_released_copies_are_freed_and_can_be_made_again():
    module, packed = served()
    before = logits(module)
    panels = [weakref.ref(group.operand()[0]) for group in linear_groups(module) if group.packed is None]
    panels += [weakref.ref(group.packed.panels) for group in linear_groups(module) if group.packed is not None]
    packed.release()
    assert all(reference() is None for reference in panels)
    packed.restore()  # nothing to restore from
    packed.make()
    assert torch.equal(logits(module), before)


def test_a_module_without_linears_of_ours_has_nothing_to_pack():
    packed = PackedWeights(tiny_model())
    packed.pack(lambda weight: weight)
    packed.swap()
    packed.restore()
    assert packed.reads(torch.ones(1))
