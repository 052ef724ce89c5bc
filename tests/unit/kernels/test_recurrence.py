"""Recurrences with a state: right, the same bits however sequences are cut, batched and forked, and differentiable."""

import itertools
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.models.bamba.modeling_bamba import mamba2_chunk_scan
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from rollout_engine.kernels.cpu import build
from rollout_engine.kernels.recurrence import GRID, gated_recurrence, l2_normalised
from rollout_engine.kernels.state_chunks import StateChunks

FORMS = pytest.mark.parametrize("form", ["delta", "delta by channel", "mamba"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
SIZES = pytest.mark.parametrize(
    ("groups", "heads", "key", "value"), [(2, 4, 16, 64), (1, 3, 20, 40), (2, 2, 128, 128), (3, 3, 5, 1)]
)
needs_compiler = pytest.mark.skipif(build.load_kernels() is None, reason="no C++ compiler here")


def draw(form, num_tokens, groups=2, heads=4, key=20, value=40, dtype=torch.float32, seed=0):
    """Arguments of `gated_recurrence` without its chunks and states."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(num_tokens, *shape, generator=generator)

    q, k = normal(groups, key), normal(groups, key)
    if form != "mamba":
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    decay = normal(heads, key) if form == "delta by channel" else normal(heads)
    inputs = {
        "q": q.to(dtype),
        "k": k.to(dtype),
        "v": normal(heads, value).to(dtype),
        "log_decay": -F.softplus(decay),
        "beta": normal(heads).sigmoid(),
    }
    if form == "mamba":
        inputs["skip"] = torch.randn(heads, generator=generator)
    return inputs, {"delta": form != "mamba", "scale": key**-0.5}


def part(inputs, tokens):
    return {name: x if name == "skip" else x[tokens] for name, x in inputs.items()}


def loop(q, k, v, log_decay, beta, *, delta, scale, lengths, skip=None, starts=None):
    """The formula in float64: outputs, and the state behind each token."""
    q, k, v, log_decay, beta = (x.double() for x in (q, k, v, log_decay, beta))
    (_, groups, key), (_, heads, value) = q.shape, v.shape
    group = [head // (heads // groups) for head in range(heads)]
    out, states, tokens = [], [], iter(range(len(v)))
    for n, length in enumerate(lengths):
        state = torch.zeros(heads, key, value, dtype=torch.float64) if starts is None else starts[n].double()
        for t in itertools.islice(tokens, length):
            decay = log_decay[t].exp()
            state = state * (decay[:, None, None] if log_decay.dim() == 2 else decay[..., None])
            error = v[t] - torch.einsum("hkv,hk->hv", state, k[t, group]) if delta else v[t]
            state = state + torch.einsum("hk,hv->hkv", k[t, group], beta[t][:, None] * error)
            read = torch.einsum("hkv,hk->hv", state, q[t, group] * scale)
            out.append(read if skip is None else read + skip.double()[:, None] * v[t])
            states.append(state)
    return torch.stack(out), states


def chunks_of(lengths, sources, writes):
    """Chunks of these lengths; `writes` has a dict for each, from the number of its tokens to the slot."""
    starts = np.cumsum([0, *lengths])
    ends = [start + number for start, each in zip(starts, writes, strict=False) for number in each]
    slots = [slot for each in writes for slot in each.values()]
    return StateChunks(starts, sources, np.cumsum([0, *map(len, writes)]), ends, slots)


def assert_close(found, wanted, relative):
    assert (found.double() - wanted.double()).abs().max() <= relative * wanted.double().abs().max()


@pytest.mark.quick(36)
@DTYPES
@SIZES
@FORMS
def test_outputs_and_states_are_those_of_the_formula(side, form, dtype, groups, heads, key, value):
    lengths = [7, 1, 5]
    inputs, rule = draw(form, 13, groups, heads, key, value, dtype)
    pool = torch.randn(5, heads, key, value)
    chunks = chunks_of(lengths, [-1, 3, 2], [{3: 0, 7: 1}, {1: 3}, {5: 4}])
    starts = [torch.zeros_like(pool[0]), pool[3].clone(), pool[2].clone()]
    wanted, states = loop(**inputs, **rule, lengths=lengths, starts=starts)
    found = gated_recurrence(**inputs, **rule, chunks=chunks, states=pool)
    assert found.dtype is dtype
    assert_close(found, wanted, 5e-6 if dtype is torch.float32 else 0.005)
    for slot, token in {0: 2, 1: 6, 3: 7, 4: 12}.items():
        assert_close(pool[slot], states[token], 5e-6)
    assert torch.equal(pool[2], starts[2])


def test_it_is_the_gated_delta_rule_of_transformers(side):
    inputs, rule = draw("delta", 70, 2, 4, 16, 24)
    found = gated_recurrence(**inputs, **rule, chunks=StateChunks.whole([70]))
    q, k, v, g, beta = (inputs[name][None] for name in ("q", "k", "v", "log_decay", "beta"))
    assert_close(found, torch_chunk_gated_delta_rule(q, k, v, g, beta)[0][0], 2e-5)


def test_it_is_the_kimi_delta_attention_of_transformers(side):
    inputs, rule = draw("delta by channel", 70, 4, 4, 16, 24)
    inputs["log_decay"] /= 4  # else the chunks of transformers overflow
    found = gated_recurrence(**inputs, **rule, chunks=StateChunks.whole([70]))
    q, k, v, g, beta = (inputs[name][None] for name in ("q", "k", "v", "log_decay", "beta"))
    theirs = chunk_kimi_delta_attention(q, k, v, g, beta)[0][0]
    assert_close(found, theirs.view_as(found), 2e-5)


def test_it_is_the_scan_of_mamba_2_of_transformers(side):
    inputs, _ = draw("mamba", 70, 2, 4, 16, 24)
    dt, a = inputs["beta"], -torch.arange(1.0, 5)
    inputs["log_decay"] = dt * a
    found = gated_recurrence(**inputs, delta=False, scale=1.0, chunks=StateChunks.whole([70]))
    x, b, c = (inputs[name][None] for name in ("v", "k", "q"))
    theirs = mamba2_chunk_scan(x, dt[None], a, b, c, 32, D=inputs["skip"])
    assert_close(found, theirs[0], 2e-5)


def run_in_steps(inputs, rule, sizes, pool, slots):
    """One sequence from zeros in chunks of `sizes`, each of which writes the next of `slots` and is read from there."""
    out, first, source = [], 0, -1
    for size, slot in zip(sizes, slots, strict=True):
        chunks = chunks_of([size], [source], [{size: slot}])
        out.append(gated_recurrence(**part(inputs, slice(first, first + size)), **rule, chunks=chunks, states=pool))
        first, source = first + size, slot
    return torch.cat(out)


@pytest.mark.quick(9)
@DTYPES
@FORMS
@pytest.mark.parametrize(("key", "value"), [(16, 64), (20, 40), (33, 130)])
def test_any_cut_of_a_sequence_gives_the_same_bits(side, form, dtype, key, value):
    inputs, rule = draw(form, 23, key=key, value=value, dtype=dtype)
    pool = torch.full((4, 4, key, value), torch.nan)
    wanted = gated_recurrence(**inputs, **rule, chunks=chunks_of([23], [-1], [{23: 3}]), states=pool)
    assert torch.equal(gated_recurrence(**inputs, **rule, chunks=StateChunks.whole([23])), wanted)
    rng = random.Random(0)
    for _ in range(4):
        cuts = sorted({0, 23, *rng.sample(range(1, 23), rng.randrange(1, 8))})
        sizes = [end - start for start, end in zip(cuts, cuts[1:], strict=False)]
        slots = [rng.randrange(3) for _ in sizes]
        assert torch.equal(run_in_steps(inputs, rule, sizes, pool, slots), wanted)
        assert torch.equal(pool[slots[-1]], pool[3])
    assert torch.equal(run_in_steps(inputs, rule, [1] * 23, pool, [0] * 23), wanted)


@DTYPES
@FORMS
def test_a_sequence_has_the_same_bits_in_any_batch_and_thread_count(side, thread_count, form, dtype):
    lengths = [1, 30, 1, 1, 9]
    inputs, rule = draw(form, 42, key=64, value=72, dtype=dtype)
    wanted = gated_recurrence(**inputs, **rule, chunks=StateChunks.whole(lengths))
    for threads in (1, 2):
        thread_count(threads)
        assert torch.equal(gated_recurrence(**inputs, **rule, chunks=StateChunks.whole(lengths)), wanted)
        first = 0
        for length in lengths:
            own = slice(first, first + length)
            alone = gated_recurrence(**part(inputs, own), **rule, chunks=StateChunks.whole([length]))
            assert torch.equal(alone, wanted[own])
            first += length


@FORMS
def test_states_behind_tokens_inside_a_chunk_are_those_of_shorter_chunks(side, form):
    inputs, rule = draw(form, 9, value=64)
    pool = torch.randn(12, 4, 20, 64)
    start = pool[11].clone()
    writes = {1: 11, 2: 0, 3: 1, 7: 2, 9: 3}  # the first of them over the source
    gated_recurrence(**inputs, **rule, chunks=chunks_of([9], [11], [writes]), states=pool)
    for number, slot in writes.items():
        alone = torch.stack((start, start))
        short = chunks_of([number], [0], [{number: 1}])
        gated_recurrence(**part(inputs, slice(number)), **rule, chunks=short, states=alone)
        assert torch.equal(pool[slot], alone[1])
        assert torch.equal(alone[0], start)


@FORMS
def test_forks_read_one_state_and_write_their_own(side, form):
    inputs, rule = draw(form, 6, value=64)
    pool = torch.randn(4, 4, 20, 64)
    parent = pool[1].clone()
    chunks = chunks_of([1, 2, 3], [1, 1, 1], [{1: 0}, {2: 2}, {3: 3}])
    found = gated_recurrence(**inputs, **rule, chunks=chunks, states=pool)
    assert torch.equal(pool[1], parent)
    for own, slot in ((slice(0, 1), 0), (slice(1, 3), 2), (slice(3, 6), 3)):
        alone, length = parent[None].clone(), own.stop - own.start
        lone = gated_recurrence(
            **part(inputs, own), **rule, chunks=chunks_of([length], [0], [{length: 0}]), states=alone
        )
        assert torch.equal(found[own], lone)
        assert torch.equal(pool[slot], alone[0])


@FORMS
def test_zeros_are_a_slot_of_zeros(side, form):
    inputs, rule = draw(form, 5, value=64)
    pool = torch.zeros(2, 4, 20, 64)
    from_slot = gated_recurrence(**inputs, **rule, chunks=chunks_of([5], [0], [{5: 1}]), states=pool)
    assert torch.equal(from_slot, gated_recurrence(**inputs, **rule, chunks=StateChunks.whole([5])))


def test_other_slots_are_left_alone(side):
    inputs, rule = draw("delta", 3)
    pool = torch.full((5, 4, 20, 40), torch.nan)
    gated_recurrence(**inputs, **rule, chunks=chunks_of([3], [-1], [{2: 1, 3: 3}]), states=pool)
    assert pool.isnan().flatten(1).all(1).tolist() == [True, False, True, False, True]
    assert not pool[[1, 3]].isnan().any()


def test_slices_of_a_projection_are_read_in_place(side):
    inputs, rule = draw("delta", 7, 2, 2, 16, 64)
    wide = torch.randn(7, 2, 16 + 16 + 64)
    split = dict(zip(("q", "k", "v"), wide.split([16, 16, 64], -1), strict=True))
    chunks = StateChunks.whole([4, 3])
    wanted = gated_recurrence(**inputs | {name: x.contiguous() for name, x in split.items()}, **rule, chunks=chunks)
    assert torch.equal(gated_recurrence(**inputs | split, **rule, chunks=chunks), wanted)
    turned = {name: x.transpose(0, 2).contiguous().transpose(0, 2) for name, x in split.items()}
    assert torch.equal(gated_recurrence(**inputs | turned, **rule, chunks=chunks), wanted)


@FORMS
def test_operands_have_dtypes_of_their_own(side, form):
    inputs, rule = draw(form, 6, dtype=torch.bfloat16)
    chunks = StateChunks.whole([6])
    wanted = gated_recurrence(**inputs, **rule, chunks=chunks)
    wide = inputs | {"q": inputs["q"].float(), "k": inputs["k"].float()}
    assert torch.equal(gated_recurrence(**wide, **rule, chunks=chunks), wanted)
    precise = gated_recurrence(**inputs | {"v": inputs["v"].float()}, **rule, chunks=chunks)
    assert precise.dtype is torch.float32 and torch.equal(precise.bfloat16(), wanted)


def test_no_tokens_give_no_outputs(side):
    inputs, rule = draw("delta by channel", 0)
    for lengths in ([], [0]):
        assert gated_recurrence(**inputs, **rule, chunks=StateChunks.whole(lengths)).shape == (0, 4, 40)
    inputs, rule = draw("delta", 3)
    pool = torch.randn(1, 4, 20, 40)
    chunks = chunks_of([0, 3, 0], [0, -1, -1], [{}, {}, {}])
    wanted = gated_recurrence(**inputs, **rule, chunks=StateChunks.whole([3]))
    assert torch.equal(gated_recurrence(**inputs, **rule, chunks=chunks, states=pool), wanted)


LENGTHS = [GRID + 3, 3, GRID, 1, 2 * GRID + 1, 0]


@pytest.mark.quick(1)
@FORMS
@pytest.mark.parametrize(("groups", "heads", "key", "value"), [(2, 4, 20, 40), (2, 2, 16, 64)])
def test_gradients_are_those_of_the_formula(side, form, groups, heads, key, value):
    inputs, rule = draw(form, sum(LENGTHS), groups, heads, key, value)
    grad = torch.randn(sum(LENGTHS), heads, value)
    leaves = {name: x.requires_grad_() for name, x in inputs.items()}
    out = gated_recurrence(**leaves, **rule, chunks=StateChunks.whole(LENGTHS))
    found = torch.autograd.grad(out, list(leaves.values()), grad)
    wide = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    plain, _ = loop(**wide, **rule, lengths=LENGTHS)
    wanted = torch.autograd.grad(plain, list(wide.values()), grad.double())
    for name, mine, right in zip(inputs, found, wanted, strict=True):
        assert mine.dtype is torch.float32 and mine.shape == inputs[name].shape
        assert_close(mine, right, 1e-5)


@needs_compiler
@FORMS
def test_gradients_of_bfloat16_are_those_of_the_same_numbers_in_float32(form):
    inputs, rule = draw(form, 80, dtype=torch.bfloat16)
    chunks, grad = StateChunks.whole([70, 10]), torch.randn(80, 4, 40).bfloat16()

    def gradients(inputs):
        leaves = [x.detach().clone().requires_grad_() for x in inputs.values()]
        out = gated_recurrence(**dict(zip(inputs, leaves, strict=True)), **rule, chunks=chunks)
        return torch.autograd.grad(out, leaves, grad.to(out.dtype))

    for mine, right in zip(gradients(inputs), gradients({n: x.float() for n, x in inputs.items()}), strict=True):
        assert torch.equal(mine, right.to(mine.dtype))


@needs_compiler
@FORMS
def test_outputs_with_gradients_are_those_without_and_gradients_depend_on_no_thread_count(thread_count, form):
    inputs, rule = draw(form, 140, value=72)
    chunks = StateChunks.whole([100, 40])
    wanted, grad, found = gated_recurrence(**inputs, **rule, chunks=chunks), torch.randn(140, 4, 72), []
    for threads in (1, 2, 3):
        thread_count(threads)
        leaves = {name: x.detach().clone().requires_grad_() for name, x in inputs.items()}
        out = gated_recurrence(**leaves, **rule, chunks=chunks)
        assert torch.equal(out, wanted)
        found.append(torch.autograd.grad(out, list(leaves.values()), grad))
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


def test_gradients_of_some_inputs_only_are_found(side):
    inputs, rule = draw("mamba", 5)
    chunks, whole = StateChunks.whole([5]), {}
    leaves = {name: x.clone().requires_grad_() for name, x in inputs.items()}
    out = gated_recurrence(**leaves, **rule, chunks=chunks)
    whole = dict(zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True))
    for name in inputs:
        leaf = inputs[name].clone().requires_grad_()
        out = gated_recurrence(**inputs | {name: leaf}, **rule, chunks=chunks)
        (found,) = torch.autograd.grad(out.sum(), leaf)
        torch.testing.assert_close(found, whole[name])


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("q", (6, 2), torch.float32),
        ("k", (6, 2, 19), torch.float32),
        ("v", (5, 4, 40), torch.float32),
        ("v", (6, 3, 40), torch.float32),
        ("log_decay", (6, 4, 19), torch.float32),
        ("log_decay", (6, 4), torch.bfloat16),
        ("beta", (6, 2), torch.float32),
        ("beta", (6, 4), torch.bfloat16),
        ("skip", (2,), torch.float32),
    ],
)
def test_other_shapes_and_dtypes_are_refused(side, name, shape, dtype):
    inputs, rule = draw("mamba", 6)
    with pytest.raises(ValueError, match=f"{name} should be"):
        gated_recurrence(**inputs | {name: torch.zeros(shape, dtype=dtype)}, **rule, chunks=StateChunks.whole([6]))


def test_states_that_do_not_fit_are_refused(side):
    inputs, rule = draw("delta", 6)
    with pytest.raises(ValueError, match="chunks should have 6 tokens"):
        gated_recurrence(**inputs, **rule, chunks=StateChunks.whole([5]))
    chunks = chunks_of([6], [-1], [{6: 1}])
    with pytest.raises(ValueError, match="pass `states` too"):
        gated_recurrence(**inputs, **rule, chunks=chunks)
    with pytest.raises(ValueError, match="below 1"):
        gated_recurrence(**inputs, **rule, chunks=chunks, states=torch.zeros(1, 4, 20, 40))
    for wrong in (torch.zeros(2, 4, 20, 39), torch.zeros(2, 4, 20, 40).bfloat16(), torch.zeros(2, 4, 40, 20).mT):
        with pytest.raises(ValueError, match="states should be"):
            gated_recurrence(**inputs, **rule, chunks=chunks, states=wrong)
    inputs["v"].requires_grad_()
    with pytest.raises(ValueError, match="has no gradients"):
        gated_recurrence(**inputs, **rule, chunks=chunks, states=torch.zeros(2, 4, 20, 40))


@DTYPES
@pytest.mark.parametrize("size", [1, 15, 64, 128, 300])
def test_l2_normalised_rows_are_right_and_do_not_depend_on_one_another(side, thread_count, dtype, size):
    wide = torch.randn(90, 3, 2 * size).to(dtype)
    x = wide[..., size:]
    found = l2_normalised(x, 1e-6)
    assert found.dtype is torch.float32 and found.is_contiguous()
    x64 = x.double()
    wanted = x64 / (x64.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=0)
    for threads in (1, 2):
        thread_count(threads)
        for rows in (slice(0, 1), slice(4, 80), slice(None)):
            assert torch.equal(l2_normalised(x[rows], 1e-6), found[rows])
            assert torch.equal(l2_normalised(x[rows].contiguous(), 1e-6), found[rows])


def test_l2_normalised_rows_have_gradients(side):
    x, grad = torch.randn(5, 3, 20, requires_grad=True), torch.randn(5, 3, 20)
    (found,) = torch.autograd.grad(l2_normalised(x, 1e-6), x, grad)
    x64 = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(x64 / (x64.square().sum(-1, keepdim=True) + 1e-6).sqrt(), x64, grad.double())
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
