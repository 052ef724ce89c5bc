"""Recurrences on a device: right, the same bits however sequences are cut, batched and forked, and differentiable."""

from functools import partial

import pytest
import torch

from rollout_engine.kernels import recurrence as twin
from rollout_engine.kernels.recurrence import gated_recurrence, l2_normalised
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.kernels.state_kernels import TokenKernel
from rollout_engine.kernels.triton import recurrence, recurrence_backward
from rollout_engine.kernels.triton.gated_norm import l2_normalise
from tests.unit.kernels.test_recurrence import DTYPES, FORMS, assert_close, chunks_of, draw, loop, part

recur = partial(gated_recurrence, kernel=TokenKernel(recurrence.recur, recurrence_backward.find_gradients))
OTHER_FORMS = ("delta by channel", "mamba")
SMALL = dict(groups=1, heads=2, key=5, value=11)
"""Two blocks of columns, the second cut short."""


def inputs_on(device, form, num_tokens, dtype=torch.float32, **sizes):
    inputs, rule = draw(form, num_tokens, **(SMALL | sizes), dtype=dtype)
    return {name: x.to(device) for name, x in inputs.items()}, rule


def pool_on(device, num_slots, heads=2, key=5, value=11):
    generator = torch.Generator().manual_seed(num_slots)
    return torch.randn(num_slots, heads, key, value, generator=generator).to(device)


@pytest.mark.quick(1)
@DTYPES
@FORMS
def test_outputs_and_states_are_those_of_the_formula(device, form, dtype):
    lengths = [4, 1, 3]
    inputs, rule = inputs_on(device, form, 8, dtype)
    pool = pool_on(device, 6)
    before = pool.clone()
    chunks = chunks_of(lengths, [-1, 3, 2], [{2: 0, 4: 1}, {1: 3}, {3: 4}])
    wanted, states = loop(**inputs, **rule, lengths=lengths, starts=[torch.zeros_like(pool[0]), before[3], before[2]])
    found = recur(**inputs, **rule, chunks=chunks, states=pool)
    assert found.dtype is dtype
    assert_close(found, wanted, 5e-6 if dtype is torch.float32 else 0.005)
    for slot, token in {0: 1, 1: 3, 3: 4, 4: 7}.items():
        assert_close(pool[slot], states[token], 5e-6)
    assert torch.equal(pool[[2, 5]], before[[2, 5]])


@pytest.mark.slow
@FORMS
def test_gradients_of_groups_and_of_a_whole_grid_step_are_those_of_the_twin(device, form):
    lengths = [65, 1]
    inputs, rule = inputs_on(device, form, 66, groups=2, heads=4, key=3, value=2)
    grad = torch.randn(66, 4, 2, generator=torch.Generator().manual_seed(1)).to(device)
    found = gradients(lambda x: recur(**x, **rule, chunks=StateChunks.whole(lengths)), inputs, grad)
    wanted = gradients(lambda x: gated_recurrence(**x, **rule, chunks=StateChunks.whole(lengths)), inputs, grad)
    for mine, right in zip(found, wanted, strict=True):
        assert_close(mine, right, 2e-5)


@pytest.mark.slow
@FORMS
def test_wide_heads_in_groups_are_those_of_the_twin(device, form):
    inputs, rule = inputs_on(device, form, 3, groups=2, heads=4, key=128, value=20)
    chunks = StateChunks.whole([2, 1])
    assert_close(recur(**inputs, **rule, chunks=chunks), gated_recurrence(**inputs, **rule, chunks=chunks), 5e-6)


@pytest.mark.quick(1)
@DTYPES
@FORMS
def test_chunks_batches_and_drafts_change_no_bit(device, form, dtype):
    """One sequence alone as a trainer has it, token by token, and in chunks with others that write more slots."""
    inputs, rule = inputs_on(device, form, 7, dtype)
    wanted = recur(**inputs, **rule, chunks=StateChunks.whole([7]))
    pool, out = pool_on(device, 4), []
    for t in range(7):
        chunks = chunks_of([1], [0 if t else -1], [{1: 0}])
        out.append(recur(**part(inputs, slice(t, t + 1)), **rule, chunks=chunks, states=pool))
    assert torch.equal(torch.cat(out), wanted)
    others, _ = inputs_on(device, form, 3, dtype, seed=1)
    mixed = {name: x if name == "skip" else torch.cat((others[name], x[:4])) for name, x in inputs.items()}
    chunks = chunks_of([3, 4], [3, -1], [{}, {1: 1, 4: 2}])
    assert torch.equal(recur(**mixed, **rule, chunks=chunks, states=pool)[3:], wanted[:4])
    chunks = chunks_of([3], [2], [{1: 2, 3: 3}])  # the first over the slot that is read
    assert torch.equal(recur(**part(inputs, slice(4, 7)), **rule, chunks=chunks, states=pool), wanted[4:])
    assert torch.equal(pool[3], pool[0])


def test_slices_of_a_projection_are_read_in_place(device):
    inputs, rule = inputs_on(device, "delta", 4, groups=2, heads=2)
    wide = torch.randn(4, 2, 21, generator=torch.Generator().manual_seed(0)).to(device)
    split = dict(zip("qkv", wide.split([5, 5, 11], -1), strict=True))
    chunks = StateChunks.whole([3, 1])
    wanted = recur(**inputs | {name: x.contiguous() for name, x in split.items()}, **rule, chunks=chunks)
    assert torch.equal(recur(**inputs | split, **rule, chunks=chunks), wanted)
    turned = {name: x.transpose(0, 2).contiguous().transpose(0, 2) for name, x in split.items()}
    assert torch.equal(recur(**inputs | turned, **rule, chunks=chunks), wanted)


def test_no_tokens_are_no_work(device):
    inputs, rule = inputs_on(device, "delta", 0)
    for lengths in ([], [0]):
        assert recur(**inputs, **rule, chunks=StateChunks.whole(lengths)).shape == (0, 2, 11)


def gradients(compute, inputs, grad):
    leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
    return torch.autograd.grad(compute(leaves), list(leaves.values()), grad)


@pytest.mark.parametrize("form", ["delta", *(pytest.param(x, marks=pytest.mark.slow) for x in OTHER_FORMS)])
def test_gradients_are_those_of_the_formula(device, monkeypatch, form, grid=3):
    """Of sequences of less than a grid step, of whole ones, and of one token more, by fewer programs than work."""
    for module in (recurrence_backward, twin):
        monkeypatch.setattr(module, "GRID", grid)
    monkeypatch.setattr(recurrence_backward, "_PROGRAMS", 3)
    monkeypatch.setattr(recurrence_backward, "_COLUMNS", 8)
    lengths = [grid - 1, grid, 2 * grid + 1, 0, 1]
    inputs, rule = inputs_on(device, form, sum(lengths))
    grad = torch.randn(sum(lengths), 2, 11, generator=torch.Generator().manual_seed(1)).to(device)
    found = gradients(lambda x: recur(**x, **rule, chunks=StateChunks.whole(lengths)), inputs, grad)
    wide = {name: x.double().cpu() for name, x in inputs.items()}
    wanted = gradients(lambda x: loop(**x, **rule, lengths=lengths)[0], wide, grad.double().cpu())
    for name, mine, right in zip(inputs, found, wanted, strict=True):
        assert mine.dtype is torch.float32 and mine.shape == inputs[name].shape, name
        assert_close(mine.cpu(), right, 2e-5)


def test_outputs_with_gradients_have_the_bits_of_those_without(device):
    inputs, rule = inputs_on(device, "delta", 5, torch.bfloat16)
    chunks = StateChunks.whole([2, 3])
    wanted = recur(**inputs, **rule, chunks=chunks)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    out = recur(**leaves, **rule, chunks=chunks)
    assert torch.equal(out, wanted)
    grads = torch.autograd.grad(out.sum(), [*leaves.values()])
    assert [x.dtype for x in grads] == [x.dtype for x in leaves.values()]


@DTYPES
@pytest.mark.parametrize("size", [1, 15, 128, 300])
def test_l2_normalised_rows_are_right_and_do_not_depend_on_one_another(device, dtype, size):
    x = torch.randn(9, 3, 2 * size, generator=torch.Generator().manual_seed(0)).to(device, dtype)[..., size:]
    found = l2_normalised(x, 1e-6, l2_normalise)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, l2_normalised(x, 1e-6), rtol=1e-6, atol=0)
    for rows in (slice(0, 1), slice(4, 8)):
        assert torch.equal(l2_normalised(x[rows], 1e-6, l2_normalise), found[rows])
    assert l2_normalise(x[:0], 1e-6).shape == (0, 3, size)
