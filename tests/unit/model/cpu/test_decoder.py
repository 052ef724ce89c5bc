"""Layers as one C++ call: the modules' bits in every case it takes, the modules themselves in every other."""

import random
import weakref

import pytest
import torch

from rollout_engine.kernels.cpu.build import load_kernels
from rollout_engine.model.cpu import decoder_trial
from rollout_engine.model.cpu.deterministic import make_deterministic
from rollout_engine.model.cpu.flat_batch import FlatBatch, SequenceChunk
from rollout_engine.model.cpu.model import CpuModel
from rollout_engine.model.cpu.weight_memory import CpuWeightMemory
from rollout_engine.model.modules import block_patterns, layer_patterns
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.packing.linear_groups import fuse_projections, repack
from rollout_engine.model.packing.packed_weights import PackedWeights
from rollout_engine.testing import tiny_model
from rollout_engine.testing.architectures import SIZES

pytestmark = [
    pytest.mark.skipif(load_kernels() is None, reason="no C++ compiler here"),
    pytest.mark.usefixtures("own_products"),
]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
EXPERTS = dict(num_experts=9, num_local_experts=9, num_experts_per_tok=3, moe_intermediate_size=40)
ODD_SIZES = dict(hidden_size=56, intermediate_size=75, head_dim=18, num_hidden_layers=3, vocab_size=101)
MODELS = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": dict(sliding_window=70),
    "qwen2 with a window in some layers": dict(
        use_sliding_window=True, sliding_window=9, layer_types=["full_attention", "sliding_attention"]
    ),
    "qwen3 of odd sizes": ODD_SIZES,
    "llama of odd sizes": ODD_SIZES | dict(hidden_size=57, num_attention_heads=3, num_key_value_heads=1),
    "llama with biases": dict(attention_bias=True, mlp_bias=True),
    "qwen3_moe": EXPERTS,
    "qwen3_moe of odd sizes": ODD_SIZES | EXPERTS | dict(moe_intermediate_size=24, norm_topk_prob=False),
    "qwen3_moe with MLPs between": EXPERTS | dict(mlp_only_layers=[1], num_hidden_layers=3),
    "mixtral": EXPERTS,
    "qwen2_moe with a gated shared expert": SIZES["qwen2_moe"] | dict(shared_expert_intermediate_size=56),
    "dots1 with groups and a shared expert": SIZES["dots1"],
    "hy_v3 with a bias of its mixture": SIZES["hy_v3"],
    "minimax_m2 with norms of all heads": SIZES["minimax_m2"],
    "arcee without gates": SIZES["llama"],
    "granite with numbers": dict(
        residual_multiplier=0.22, embedding_multiplier=12, logits_scaling=6.5, attention_multiplier=0.1
    ),
    "llama with scaled positions": dict(
        rope_parameters=dict(rope_type="yarn", factor=4.0, rope_theta=1e4, original_max_position_embeddings=64)
    ),
    "ministral3 with queries scaled by position": dict(
        rope_parameters=dict(
            rope_type="yarn",
            factor=4.0,
            rope_theta=1e4,
            original_max_position_embeddings=30,
            llama_4_scaling_beta=0.3,
        )
    ),
}
NUM_BLOCKS = 64


def prepared(architecture, dtype=torch.float32, **overrides):
    """(module, geometry) as an engine has them, with no vector left at its start."""
    module = tiny_model(architecture, dtype=dtype, attn_implementation=ATTENTION_NAME, **overrides).requires_grad_(
        False
    )
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    geometry = probe_geometry(module)
    fuse_projections(module)
    assert make_deterministic(module, geometry) is None
    return module, geometry


def paged(module, geometry, block_size=16, **kwargs):
    return CpuModel(module, geometry, num_blocks=NUM_BLOCKS, block_size=block_size, **kwargs)


def random_steps(rng, block_size):
    """Chunks of four sequences up to 200 tokens, steps of uneven prefills, single tokens, and both."""
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    lengths = [rng.choice([1, 5, 40, 200]) for _ in range(4)]
    tokens = [[rng.randrange(101) for _ in range(length)] for length in lengths]
    tables = [[free.pop() for _ in range(-(-length // block_size))] for length in lengths]
    done = [0] * 4
    while done != lengths:
        step = []
        for s in rng.sample(range(4), 4):
            n = min(rng.choice([0, 1, 1, 3, 17, 150]), lengths[s] - done[s])
            if n:
                step.append(SequenceChunk(tokens[s][done[s] : done[s] + n], done[s], tables[s]))
                done[s] += n
        if step:
            yield step


def assert_same_bits(module, geometry, rng, block_size):
    ours, theirs = paged(module, geometry, block_size, compiled=True), paged(module, geometry, block_size)
    for step in random_steps(rng, block_size):
        count = sum(len(chunk.token_ids) for chunk in step)
        rows = rng.sample(range(count), rng.choice([count, rng.randrange(1, count + 1), 0]))
        torch.set_num_threads(rng.choice([1, 2]))
        mine = ours.forward(step, rows)
        torch.set_num_threads(rng.choice([1, 2]))
        assert torch.equal(mine, theirs.forward(step, rows))
    assert all(torch.equal(a, b) for a, b in zip(ours.kv.tensors(), theirs.kv.tensors(), strict=True))


@pytest.mark.quick(1)
@DTYPES
@pytest.mark.parametrize("name", MODELS)
def test_every_bit_is_that_of_the_modules(name, dtype):
    module, geometry = prepared(name.split()[0], dtype, **MODELS[name])
    assert decoder_trial.unsupported_reason(module, geometry) is None
    rng = random.Random(f"{name} {dtype}")
    assert_same_bits(module, geometry, rng, rng.choice([16, 64]))


def test_norms_behind_are_computed_but_rotations_in_float32_are_not():
    module, geometry = prepared("olmo2", **SIZES["olmo2"])
    assert decoder_trial.unsupported_reason(module, geometry) is None
    assert_same_bits(module, geometry, random.Random(0), 16)
    reason = decoder_trial.unsupported_reason(*prepared("olmo2", torch.bfloat16, **SIZES["olmo2"]))
    assert reason == "its rotations have another dtype than its weights"


@pytest.mark.parametrize("name", ["llama", "qwen3_moe of odd sizes"])
def test_only_wanted_rows_go_through_the_end_of_the_last_layer(name):
    module, geometry = prepared(name.split()[0], **MODELS[name])
    step = [SequenceChunk([5, 6, 7], 0, [0]), SequenceChunk([8, 9], 0, [1])]
    inputs = torch.randn(5, module.config.hidden_size)
    cos, sin = torch.randn(2, 5, geometry[0].head_dim_k).unbind()

    def output(rows):
        model, hidden = paged(module, geometry, compiled=True), inputs.clone()
        model.decoder._current().run(hidden, cos, sin, torch.tensor(rows), model.kv.plan(FlatBatch.of(step)))
        return hidden, model.kv.tensors()

    (whole, whole_kv), (some, some_kv) = output([0, 1, 2, 3, 4]), output([4, 2])
    assert torch.equal(some[[2, 4]], whole[[2, 4]]) and not (some[[0, 1, 3]] == whole[[0, 1, 3]]).all(1).any()
    assert all(map(torch.equal, whole_kv, some_kv))


def test_more_rows_than_the_mlp_takes_at_once():
    module, geometry = prepared("qwen3", num_hidden_layers=1)
    chunk = [SequenceChunk([i % 250 for i in range(1500)], 0, list(range(24)))]
    rows = [0, 1023, 1024, 1499]
    logits = [paged(module, geometry, 64, compiled=way).forward(chunk, rows) for way in (True, False)]
    assert torch.equal(*logits)


@pytest.mark.parametrize("architecture", ["qwen3_moe", "qwen2_moe"])
def test_more_rows_than_a_mixture_takes_at_once(architecture):
    sizes = EXPERTS | dict(num_experts_per_tok=4, shared_expert_intermediate_size=56)
    module, geometry = prepared(architecture, **sizes, num_hidden_layers=1)
    chunk = [SequenceChunk([i % 250 for i in range(1500)], 0, list(range(24)))]
    rows = [0, 1023, 1024, 1499]
    logits = [paged(module, geometry, 64, compiled=way).forward(chunk, rows) for way in (True, False)]
    assert torch.equal(*logits)


def test_equal_experts_are_chosen_by_their_numbers_in_either_way():
    module, geometry = prepared("qwen3_moe", **EXPERTS)
    module.model.layers[0].mlp.gate.weight[4:] = module.model.layers[0].mlp.gate.weight[3]
    repack(module)
    chunks, found = [SequenceChunk([5, 6, 7, 8, 9], 0, [3])], []
    for compiled in (True, False):
        model = paged(module, geometry, compiled=compiled)
        with model.recording() as recorded:
            logits = model.forward(chunks, range(5))
        found.append((logits, recorded[-1].long()))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])
    chosen = found[0][1][:, 0]
    assert (chosen >= 3).any() and not ((chosen > 3).any(-1) & ~(chosen == 3).any(-1)).any()


def test_states_of_some_rows_come_beside_the_logits_of_others():
    module, geometry = prepared("qwen3")
    chunks = [SequenceChunk([5, 6, 7, 8], 0, [3]), SequenceChunk([9, 5], 0, [1])]
    ours, theirs = (
        paged(module, geometry, compiled=compiled).forward_states(chunks, [5, 3], [0, 5, 2])
        for compiled in (True, False)
    )
    assert torch.equal(ours[0].take(slice(None)), theirs[0].take(slice(None))) and torch.equal(ours[1], theirs[1])


@pytest.mark.parametrize("part", ["embed_tokens", "norm"])
def test_hooks_of_the_modules_before_and_behind_the_layers_are_called(part):
    module, geometry = prepared("llama")
    model, chunks = paged(module, geometry, compiled=True), [SequenceChunk([5, 6, 7], 0, [3])]
    before, seen = model.forward(chunks, [2]), []
    hook = getattr(module.model, part).register_forward_hook(lambda child, given, out: seen.append(out.shape))
    assert torch.equal(model.forward(chunks, [2]), before) and len(seen) == 1
    hook.remove()
    assert torch.equal(model.forward(chunks, [2]), before) and len(seen) == 1


def test_a_token_that_the_embedding_lacks_is_refused():
    model = paged(*prepared("llama", vocab_size=101), compiled=True)
    for token_id in (-1, 101):
        with pytest.raises(ValueError, match=r"within the embedding.*not at 1"):
            model.forward([SequenceChunk([5, token_id], 0, [3])], [1])


def test_no_rows_of_logits_may_be_wanted():
    module, geometry = prepared("llama")
    assert paged(module, geometry, compiled=True).forward([SequenceChunk([5, 6], 0, [0])], []).shape == (0, 259)


@pytest.mark.quick(4)
@pytest.mark.parametrize("write", ["in place", "as new data", "as a new parameter"])
@pytest.mark.parametrize(
    "name",
    ["embed_tokens", "layers.0.self_attn.k_proj", "layers.1.mlp.down_proj", "layers.1.input_layernorm", "norm"],
)
def test_new_weights_are_seen_at_the_next_step(name, write):
    module, geometry = prepared("qwen2")
    ours, theirs = paged(module, geometry, compiled=True), paged(module, geometry)
    chunk = [SequenceChunk([5, 6, 7], 0, [0])]
    before = ours.forward(chunk, [2])
    child = module.model.get_submodule(name)
    if write == "in place":
        child.weight.mul_(1.5)
    elif write == "as new data":
        child.weight.data = child.weight * 1.5
    else:
        child.weight = torch.nn.Parameter(child.weight * 1.5, requires_grad=False)
    after = ours.forward(chunk, [2])
    assert not torch.equal(after, before)
    assert torch.equal(after, theirs.forward(chunk, [2]))


def test_weights_written_behind_torchs_back_are_seen_once_repacked():
    module, geometry = prepared("qwen3")
    ours, theirs = paged(module, geometry, compiled=True), paged(module, geometry)
    chunk = [SequenceChunk([5, 6, 7], 0, [0])]
    before = ours.forward(chunk, [2])
    module.model.layers[0].mlp.up_proj.weight.numpy()[:] *= 2
    repack(module)
    after = ours.forward(chunk, [2])
    assert not torch.equal(after, before)
    assert torch.equal(after, theirs.forward(chunk, [2]))


def test_released_packed_weights_are_freed_and_come_back():
    module, geometry = prepared("llama")
    packed = PackedWeights(module)
    ours = paged(module, geometry, compiled=True)
    chunk = [SequenceChunk([5, 6, 7], 0, [0])]
    before = ours.forward(chunk, [2])
    panels = weakref.ref(module.model.layers[0].mlp.down_proj._group.operand()[0].panels)
    views = packed.take_over(dict(module.state_dict()))
    values = {name: packed.plain(name) for name in filter(packed.holds, views)}
    CpuWeightMemory([], packed, ours).release(forget=True)
    assert panels() is None
    for name, value in values.items():
        packed.staging(name).copy_(value)
    packed.pack(lambda parameter: parameter)
    packed.swap()
    assert torch.equal(ours.forward(chunk, [2]), before)


def test_swapped_weights_are_seen_and_weights_being_gathered_are_not():
    module, geometry = prepared("qwen3")
    packed = PackedWeights(module)
    ours, theirs = paged(module, geometry, compiled=True), paged(module, geometry)
    views = packed.take_over(dict(module.state_dict()))
    chunk = [SequenceChunk([5, 6, 7], 0, [0])]
    before = ours.forward(chunk, [2])
    for name in filter(packed.holds, views):
        packed.staging(name).copy_(packed.plain(name) * 2)
    packed.pack(lambda parameter: parameter)
    assert torch.equal(ours.forward(chunk, [2]), before)
    packed.swap()
    after = ours.forward(chunk, [2])
    assert not torch.equal(after, before)
    assert torch.equal(after, theirs.forward(chunk, [2]))


@pytest.fixture
def no_patterns(monkeypatch):
    """The trial alone decides, as for a fault that no pattern has."""
    monkeypatch.setattr(layer_patterns, "attention_pattern", lambda *_, **__: layer_patterns.AttentionPattern(None))
    for name in ("layer_pattern", "base_pattern", "head_pattern"):
        monkeypatch.setattr(block_patterns, name, lambda *_: block_patterns.BlockPattern(None))


@pytest.mark.usefixtures("no_patterns")
def test_a_class_that_computes_something_else_is_refused():
    module, geometry = prepared("llama")
    layer = module.model.layers[1]

    class Scaled(type(layer)):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, **kwargs) * 1.001

    layer.__class__ = Scaled
    assert "differ" in decoder_trial.unsupported_reason(module, geometry)


LOOK_ALIKES = [
    ("ernie4_5", {}, "Ernie4_5Attention computes queries otherwise"),
    ("smollm3", dict(num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0]), "SmolLM3Attention computes queries otherwise"),
]


@pytest.mark.parametrize(("architecture", "overrides", "reason"), [*LOOK_ALIKES, ("phi", {}, "other parts")])
def test_architectures_that_only_look_alike_are_refused(architecture, overrides, reason):
    assert reason in decoder_trial.unsupported_reason(*prepared(architecture, **overrides))


@pytest.mark.usefixtures("no_patterns")
@pytest.mark.parametrize(
    ("architecture", "overrides", "reason"),
    [*LOOK_ALIKES, ("granite", dict(residual_multiplier=0.5), ""), ("granite", dict(logits_scaling=2.0), "")],
)
def test_the_trial_finds_other_formulas_without_a_pattern(architecture, overrides, reason):
    found = decoder_trial.unsupported_reason(*prepared(architecture, **overrides))
    assert found == "its logits or hidden states differ from its modules'"


def test_a_window_that_the_layer_does_not_keep_is_seen():
    module, geometry = prepared("mistral", sliding_window=100)
    module.model.layers[0].self_attn.config.sliding_window = None
    reason = "MistralAttention attends with other parameters"
    assert decoder_trial.unsupported_reason(module, geometry) == reason


@pytest.mark.usefixtures("no_patterns")
def test_the_trial_finds_queries_that_are_scaled_from_far_positions_on():
    module, geometry = prepared("ministral3")  # from 16,384 on
    module.config.max_position_embeddings = 40_000
    assert "differ" in decoder_trial.unsupported_reason(module, geometry)


@pytest.mark.usefixtures("no_patterns")
@pytest.mark.parametrize("length", [33, 900, 2047])
def test_the_trial_reaches_beyond_every_length_that_a_configuration_names(length):
    module, geometry = prepared("llama")
    module.config.length_of_any_name = {"inside": float(length)}
    attention = module.model.layers[0].self_attn

    class Late(type(attention)):
        def forward(self, hidden_states, position_ids, **kwargs):
            late = (position_ids >= length)[..., None]
            return super().forward(hidden_states * (1 + late), position_ids=position_ids, **kwargs)

    attention.__class__ = Late
    assert "differ" in decoder_trial.unsupported_reason(module, geometry)


def test_weights_of_zeros_prove_nothing():
    module, geometry = prepared("llama")
    module.model.layers[0].self_attn.o_proj.weight.zero_()
    assert "zeros" in decoder_trial.unsupported_reason(module, geometry)


def test_modules_that_are_not_row_invariant_are_refused():
    module = tiny_model("llama", attn_implementation=ATTENTION_NAME).requires_grad_(False)
    assert "was not replaced by RowInvariantLinear" in decoder_trial.unsupported_reason(module, probe_geometry(module))


def test_without_a_compiler_modules_serve(monkeypatch):
    module, geometry = prepared("llama")
    monkeypatch.setattr(decoder_trial.compiled, "supports", lambda dtype: False)
    assert "compiled" in decoder_trial.unsupported_reason(module, geometry)


@pytest.mark.parametrize("architecture", ["dots1", "hy_v3"])
def test_the_next_step_sees_a_new_correction_bias(architecture):
    module, geometry = prepared(architecture, **SIZES[architecture])
    step, found = [SequenceChunk(list(range(3, 40)), 0, [0, 1, 2])], []
    models = [paged(module, geometry, compiled=way) for way in (True, False)]
    for _ in range(2):
        one, other = (model.forward(step, range(37)) for model in models)
        assert torch.equal(one, other)
        found.append(one)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.neg_()
    assert not torch.equal(*found)
