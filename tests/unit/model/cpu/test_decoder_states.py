"""Layers that keep states as one C++ call: the modules' bits in chunks, forks and drafts, and of new weights."""

import random

import numpy as np
import pytest
import torch

from rollout_engine.kernels.adapters import AdapterRows
from rollout_engine.kernels.cpu.build import load_kernels
from rollout_engine.kernels.state_chunks import StateChunks
from rollout_engine.model.cpu import decoder_trial
from rollout_engine.model.cpu.adapters import CpuAdapterPool
from rollout_engine.model.cpu.deterministic import make_deterministic
from rollout_engine.model.cpu.flat_batch import FlatBatch
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.modules.mixers import swap_mixers
from rollout_engine.model.packing.linear_groups import fuse_projections
from rollout_engine.testing import random_adapter, tiny_model
from rollout_engine.testing.architectures import HYBRID_SIZES
from tests.unit.model.cpu.test_decoder import DTYPES, paged, random_steps

pytestmark = [
    pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler here"),
    pytest.mark.usefixtures("own_products"),
]
ODD_HEADS = dict(intermediate_size=75, head_dim=18, num_attention_heads=3, num_key_value_heads=1)
ODD_SIZES = ODD_HEADS | dict(
    hidden_size=56,
    linear_num_key_heads=3,
    linear_num_value_heads=3,
    linear_key_head_dim=20,
    linear_value_head_dim=70,
    linear_conv_kernel_dim=3,
)
NOT_ROTATED = dict(rope_parameters=dict(rope_type="default", rope_theta=None))
MODELS = {
    "qwen3_5_text": {},
    "qwen3_5_text of odd sizes": ODD_SIZES,
    "qwen3_next": {},
    "qwen3_next of odd sizes": ODD_SIZES | dict(num_experts=0, linear_num_value_heads=6),
    "qwen3_5_moe_text": {},
    "lfm2": {},
    "lfm2 of odd sizes": ODD_HEADS | dict(conv_L_cache=4, conv_bias=False, hidden_size=57),
    "lfm2_moe": {},
    "bamba": {},
    "bamba of odd sizes": ODD_HEADS
    | dict(mamba_n_heads=7, mamba_d_head=18, mamba_n_groups=1, mamba_d_state=19, mamba_d_conv=3, hidden_size=63),
    "bamba with limits": dict(time_step_limit=(0.3, 0.9), mamba_conv_bias=False, mamba_proj_bias=True),
    "granitemoehybrid": dict(embedding_multiplier=12, attention_multiplier=0.1),
    "granitemoehybrid without experts and rotations": dict(num_local_experts=0, position_embedding_type="nope"),
    "olmo_hybrid without rotations": NOT_ROTATED,
    "olmo_hybrid of odd sizes": ODD_SIZES | NOT_ROTATED | dict(linear_allow_neg_eigval=False),
    "nemotron_h": {},
    "nemotron_h with latents": dict(moe_latent_size=24),
    "nemotron_h that ends with an MLP": dict(
        num_hidden_layers=4, layers_block_type=["mlp", "linear_attention", "full_attention", "moe"]
    ),
}
NUM_SLOTS = 40
QUICK = [
    "qwen3_5_text",
    "qwen3_next of odd sizes",
    "lfm2 of odd sizes",
    "bamba of odd sizes",
    "nemotron_h with latents",
]
"""The others are as many variants of the same layers."""


def prepared(name, dtype=torch.float32):
    """(module, geometry) as an engine has them, with no vector left at its start."""
    architecture = name.split()[0]
    sizes = HYBRID_SIZES[architecture] | MODELS[name]
    module = tiny_model(architecture, dtype=dtype, attn_implementation=ATTENTION_NAME, **sizes).requires_grad_(False)
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    swap_mixers(module)
    geometry = probe_geometry(module)
    fuse_projections(module)
    assert make_deterministic(module, geometry) is None
    return module, geometry


def both_ways(module, geometry, **options):
    """The model with layers as one call, and as modules."""
    options |= dict(num_state_slots=NUM_SLOTS)
    return [paged(module, geometry, compiled=way, **options) for way in (True, False)]


def steps_with_slots(rng):
    """Batches of `random_steps`, which write states behind some tokens of each chunk, in place or to free slots."""
    current = {}
    for step in random_steps(rng, 16):
        batch = FlatBatch.of(step)
        names = [chunk.block_ids[0] for chunk in step]
        sources = [
            current.get(name, -1) if chunk.num_computed_tokens else -1 for name, chunk in zip(names, step, strict=True)
        ]
        free = [slot for slot in rng.sample(range(NUM_SLOTS), NUM_SLOTS) if slot not in current.values()]
        starts, counts, ends, slots = batch.columns.token_starts.tolist(), [0], [], []
        for number, name in enumerate(names):
            inside = range(starts[number] + 1, starts[number + 1])
            behind = sorted(rng.sample(inside, min(len(inside), rng.choice([0, 0, 1, 3])))) + [starts[number + 1]]
            ends += behind
            slots += [free.pop() for _ in behind]
            if sources[number] >= 0 and rng.random() < 0.5:
                slots[-1] = sources[number]
            current[name] = slots[-1]
            counts.append(len(ends))
        yield batch._replace(states=StateChunks(*map(np.array, (starts, sources, counts, ends, slots))))


def assert_same_states(ours, theirs):
    for mine, other in ((ours.kv, theirs.kv), (ours.kv.states, theirs.kv.states)):
        assert all(torch.equal(a, b) for a, b in zip(mine.tensors(), other.tensors(), strict=True))


@pytest.mark.quick(1)
@DTYPES
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in QUICK)]
)
def test_every_bit_is_that_of_the_modules(name, dtype):
    module, geometry = prepared(name, dtype)
    assert decoder_trial.unsupported_reason(module, geometry) is None
    rng, (ours, theirs) = random.Random(f"{name} {dtype}"), both_ways(module, geometry)
    for batch in steps_with_slots(rng):
        count = len(batch.token_ids)
        rows = rng.sample(range(count), rng.choice([count, rng.randrange(1, count + 1), 0]))
        torch.set_num_threads(rng.choice([1, 2]))
        mine = ours.forward(batch, rows)
        torch.set_num_threads(rng.choice([1, 2]))
        assert torch.equal(mine, theirs.forward(batch, rows))
    assert_same_states(ours, theirs)


@DTYPES
def test_adapters_of_the_projections_change_the_same_bits(dtype):
    module, geometry = prepared("qwen3_next", dtype)
    pool = CpuAdapterPool(module, max_loras=2, max_rank=64)
    for slot, targets in enumerate((["in_proj_qkvz", "out_proj", "q_proj", "down_proj"], ["in_proj_ba"])):
        pool.install(slot, pool.prepare_adapter(random_adapter(module, seed=slot, rank=20, targets=targets)))
    rng, (ours, theirs) = random.Random(f"{dtype}"), both_ways(module, geometry, adapters=pool)
    changed = False
    for batch in steps_with_slots(rng):
        sizes = np.diff(batch.columns.token_starts).tolist()
        rows = AdapterRows.of([rng.choice([-1, 0, 1]) for _ in sizes], sizes)
        mine, other = (model.forward_rows(batch, range(sum(sizes)), rows).take(slice(None)) for model in (ours, theirs))
        assert torch.equal(mine, other)
        changed |= rows is not None
    assert changed
    assert_same_states(ours, theirs)


def test_the_next_step_sees_every_tensor_of_a_mixer_that_is_written_in_place():
    module, geometry = prepared("qwen3_5_text")
    ours, theirs = both_ways(module, geometry)
    mixer = module.model.layers[0].linear_attn
    tensors = [mixer.A_log, mixer.dt_bias, mixer.norm.weight, mixer.conv1d.weight]
    batch = next(batch for batch in steps_with_slots(random.Random(0)) if len(batch.token_ids) > 3)
    seen = [ours.forward(batch, range(len(batch.token_ids)))]
    for tensor in tensors:
        tensor.data.mul_(1.5)  # leaves its version as it is
        seen.append(ours.forward(batch, range(len(batch.token_ids))))
        assert torch.equal(seen[-1], theirs.forward(batch, range(len(batch.token_ids))))
        assert not torch.equal(seen[-1], seen[-2])


@pytest.mark.parametrize("name", ["lfm2", "bamba"])
def test_the_next_step_sees_every_tensor_of_other_mixers_too(name):
    module, geometry = prepared(name)
    ours, theirs = both_ways(module, geometry)
    layer = module.model.layers[0]
    mixer = layer.conv if name == "lfm2" else layer.mamba
    tensors = [parameter for path, parameter in mixer.named_parameters() if "proj" not in path]
    batch = next(batch for batch in steps_with_slots(random.Random(0)) if len(batch.token_ids) > 3)
    seen = [ours.forward(batch, range(len(batch.token_ids)))]
    for tensor in tensors:
        tensor.data.mul_(1.5)  # leaves its version as it is
        seen.append(ours.forward(batch, range(len(batch.token_ids))))
        assert torch.equal(seen[-1], theirs.forward(batch, range(len(batch.token_ids))))
        assert not torch.equal(seen[-1], seen[-2])


@DTYPES
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("lfm2", ["in_proj", "w1", "w2"]),
        pytest.param("granitemoehybrid", ["in_proj", "out_proj", "input_linear"], marks=pytest.mark.slow),
        pytest.param(
            "nemotron_h with latents", ["in_proj", "q_proj", "up_proj", "fc1_latent_proj"], marks=pytest.mark.slow
        ),
    ],
)
def test_adapters_of_other_mixers_change_the_same_bits(name, targets, dtype):
    module, geometry = prepared(name, dtype)
    pool = CpuAdapterPool(module, max_loras=1, max_rank=32)
    pool.install(0, pool.prepare_adapter(random_adapter(module, seed=0, rank=20, targets=targets)))
    ours, theirs = both_ways(module, geometry, adapters=pool)
    for batch in steps_with_slots(random.Random(f"{dtype}")):
        sizes = np.diff(batch.columns.token_starts).tolist()
        rows = AdapterRows.of([number % 2 - 1 for number in range(len(sizes))], sizes)
        mine, other = (model.forward_rows(batch, range(sum(sizes)), rows).take(slice(None)) for model in (ours, theirs))
        assert torch.equal(mine, other)
    assert_same_states(ours, theirs)


def test_a_batch_without_slots_is_refused():
    module, geometry = prepared("qwen3_5_text")
    ours, _ = both_ways(module, geometry)
    batch = next(steps_with_slots(random.Random(0)))
    with pytest.raises(ValueError, match="the batch names no slots"):
        ours.forward(batch._replace(states=None), [0])
    short = paged(module, geometry, compiled=True, num_state_slots=batch.states.num_slots - 1)
    with pytest.raises(ValueError, match="slots of chunks should be below"):
        short.forward(batch, [0])
