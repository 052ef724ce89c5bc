"""Layers that keep a state on a device: engine and exact trainer agree bit for bit, and slots hold what they should."""

import copy
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from rollout_engine import exact
from rollout_engine.kernels.triton import recurrence, tiling
from rollout_engine.model.cuda import decoder_trial, state_layers
from rollout_engine.model.modules.attention_interface import ATTENTION_NAME
from rollout_engine.model.modules.geometry import probe_geometry
from rollout_engine.model.modules.mixers import mixers_of, swap_mixers, use_state_kernels
from rollout_engine.model.packing.linear_groups import fuse_projections
from rollout_engine.testing import random_adapter, tiny_model
from rollout_engine.testing.architectures import HYBRID_SIZES
from rollout_engine.testing.models import tiny_checkpoint
from tests.unit.model.cuda.test_engine import GREEDY, Rerun, assert_alike, graphs_by, run, runner_of
from tests.unit.model.cuda.test_exact import DRAWN, LONG, OPTIONS, SHORT, assert_those_of
from tests.unit.model.cuda.test_exact import run as run_drawn

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)
TYPES = ["qwen3_5_text", "bamba", "lfm2", "kimi_linear"]
"""One with each of the functions over tokens."""
TYPE = TYPES[0]
CASES = [*((name, "float32") for name in TYPES), *((name, "bfloat16") for name in HYBRID_SIZES)]
ADVANCED = DRAWN.clone(max_tokens=3)
FUSED = {"qwen3_5_text", "qwen3_next", "qwen3_5_moe_text"}
"""Whose layers our kernels run; those of others run as modules."""


def sizes_of(architecture):
    """Sizes of a model of two layers, one of which keeps a state, or as many as the type needs for that."""
    sizes = HYBRID_SIZES[architecture]
    lists = {name: sizes[name][:2] for name in ("layer_types", "mlp_layer_types") if name in sizes}
    is_short = lists or architecture in ("bamba", "falcon_h1")
    return sizes | lists | ({"num_hidden_layers": 2} if is_short else {})


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A function from an architecture to a checkpoint of few layers; made once."""
    made = {}

    def get(architecture):
        if architecture not in made:
            path = tmp_path_factory.mktemp(architecture)
            made[architecture] = tiny_checkpoint(path, architecture, **sizes_of(architecture))
        return made[architecture]

    return get


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    """Two of attention's to a short context, a tile each; all columns of a state are one block."""
    monkeypatch.setattr(tiling, "_DETERMINISTIC_UNIT", 16)
    monkeypatch.setattr(tiling, "_tile", lambda *_: 16)
    monkeypatch.setattr(recurrence, "_COLUMNS", 16)


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "dtype"), CASES)
def test_logprobs_are_the_trainers(engine_on, trainer_of, architecture, dtype):
    llm = engine_on("device", architecture, dtype=dtype, **OPTIONS)
    assert (runner_of(llm).model.decoder is not None) == (architecture in FUSED)
    assert_those_of(trainer_of(architecture, dtype), run_drawn(llm, LONG, SHORT, params=ADVANCED))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_next", *TYPES])
def test_tokens_and_logprobs_are_those_of_the_cpu(engine_on, architecture):
    ours = engine_on("device", architecture, num_kv_blocks=23, deterministic=False)
    assert (runner_of(ours).model.decoder is not None) == (architecture in FUSED)
    assert_alike(run(ours, GREEDY), run(engine_on("cpu", architecture), GREEDY))


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_5_text", "bamba", "lfm2"])
def test_chunks_forks_snapshots_and_preempted_samples_have_the_trainers_bits(engine_on, trainer_of, architecture):
    """States of a prompt are found again by its next turn, and slots are as scarce as they may be."""
    options = OPTIONS | {"num_kv_blocks": 9, "max_num_batched_tokens": 7, "state_cache_bytes": 1 << 14}
    llm = engine_on("device", architecture, dtype="bfloat16", **options)
    first = run_drawn(llm, LONG, SHORT)
    (prompt, tokens, _), *_ = first
    turn = prompt[:16] + [5, 6]
    outputs = llm.generate([{"prompt_token_ids": turn}], ADVANCED, use_tqdm=False)
    again = [(turn, list(c.token_ids), np.array(c.logprobs)) for c in outputs[0].outputs]
    assert outputs[0].num_cached_tokens > 0
    assert llm.llm_engine.stats.num_preemptions > 0
    assert_those_of(trainer_of(architecture, "bfloat16"), first + again)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3_next"])
def test_steps_by_graphs_have_the_bits_of_those_without(engine_on, architecture):
    """Graphs of one and of four sequences: a padded row reads and writes no slot."""
    llm = engine_on("device", architecture, dtype="float32", **OPTIONS)
    prompts, found, replays = [[7, 8, 9], SHORT], [], []

    def capture(compute):
        return Rerun(lambda: replays.append(len(replays)) or compute())

    for way in (nullcontext(), graphs_by(capture, runner_of(llm), [1, 4])):
        llm.reset_prefix_cache()
        with way:
            found.append(run(llm, ADVANCED.clone(n=1, max_tokens=5), prompts))
    assert replays
    assert_alike(*found, bound=0)


@pytest.mark.slow
def test_adapters_of_fused_layers_with_states_are_those_of_the_cpu(engine_on, checkpoints):
    ours, cpu = engine_on("device", TYPE, num_kv_blocks=23, deterministic=False), engine_on("cpu", TYPE)
    base, found = tiny_model(TYPE, **sizes_of(TYPE)), []
    for llm in (ours, cpu):
        llm.llm_engine.add_lora(random_adapter(base, "a", seed=1))
        outputs = llm.generate([{"prompt_token_ids": SHORT}], GREEDY, lora_request="a", use_tqdm=False)
        found.append([(list(c.token_ids), np.array(c.logprobs)) for c in outputs[0].outputs])
        llm.llm_engine.remove_lora("a")
    assert_alike(*found)


@pytest.mark.slow
def test_a_score_has_the_bits_of_the_samples(engine_on):
    llm = engine_on("device", TYPE, dtype="float32", **OPTIONS)
    for prompt, tokens, logprobs in run_drawn(llm, SHORT, params=ADVANCED):
        (found,) = llm.score([prompt], [tokens], temperature=ADVANCED.temperature)
        np.testing.assert_array_equal(found, logprobs)


@pytest.mark.slow
def test_memory_of_states_is_given_back_and_taken_again(engine_on):
    llm = engine_on("device", TYPE, dtype="float32", **OPTIONS)
    states = runner_of(llm).model.kv.states
    assert states.num_slots > llm.llm_engine.frontend.client.driver.core.config.max_num_seqs
    before = run_drawn(llm, SHORT, params=ADVANCED)
    llm.sleep(level=1)
    assert not any(tensor.untyped_storage().nbytes() for tensor in states.tensors())
    llm.wake_up()
    after = run_drawn(llm, SHORT, params=ADVANCED)
    assert all(np.array_equal(one[2], other[2]) for one, other in zip(before, after, strict=True))


@pytest.mark.slow
def test_new_weights_reach_mixers_and_their_norms(engine_on, enable):
    llm = engine_on("device", TYPE, dtype="float32", **OPTIONS)
    trainer = tiny_model(TYPE, seed=1, **sizes_of(TYPE))
    llm.update_weights(trainer)
    assert_those_of(enable(trainer), run_drawn(llm, SHORT, params=ADVANCED))
    llm.update_weights(tiny_model(TYPE, **sizes_of(TYPE)))  # other tests have it too


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_next", *TYPES])
def test_values_and_gradients_are_those_of_eager_modules(enable, device, architecture):
    """Up to the round-off of transformers' chunked formulas."""
    options = {"std": 0.05, "attn_implementation": "eager"}
    reference = tiny_model(architecture, **options, **sizes_of(architecture)).requires_grad_(True).to(device)
    trainer = enable(copy.deepcopy(reference))
    ids = torch.randint(3, 259, (2, 9), generator=torch.Generator().manual_seed(0)).to(device)
    weights = torch.randn(2, 8, generator=torch.Generator().manual_seed(1)).to(device)
    ours = exact.token_logprobs(trainer, ids)
    logits = reference(input_ids=ids, use_cache=False).logits[:, :-1]
    theirs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    for (name, p), (_, q) in zip(reference.named_parameters(), trainer.named_parameters(), strict=True):
        if p.grad is not None:
            assert (p.grad - q.grad).norm() <= 1e-3 * p.grad.norm() + 1e-6, name


@pytest.mark.slow
def test_packed_rows_have_the_bits_of_rows(trainer_of, device):
    trainer = trainer_of(TYPE, "float32")
    rows = [LONG[:9], SHORT[3:8]]
    edges, packed = torch.tensor([0, 9, 14], device=device), torch.tensor([sum(rows, [])], device=device)
    with torch.no_grad():
        together = exact.token_logprobs(trainer, packed, cu_seqlens=edges)[0]
        for row, start in zip(rows, (0, 9), strict=True):
            alone = exact.token_logprobs(trainer, torch.tensor([row], device=device))[0]
            assert torch.equal(together[start : start + len(alone)], alone)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [TYPE, *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(FUSED - {TYPE}))]
)
def test_fused_layers_have_the_bits_of_a_trainers_modules(monkeypatch, architecture):
    """The trial at load, over few tokens: two prompts, then a token of each behind its state."""
    monkeypatch.setattr(decoder_trial, "_SIZES", ((2, 1), (1, 1)))
    monkeypatch.setattr(decoder_trial, "_LONGEST", 3)
    module = tiny_model(architecture, **sizes_of(architecture)).requires_grad_(False)
    module.set_attn_implementation(ATTENTION_NAME)
    swap_mixers(module)
    geometry = probe_geometry(module)
    fuse_projections(module)
    use_state_kernels(module, state_layers.STATE_KERNELS)
    assert decoder_trial.unsupported_reason(module, geometry, deterministic=True) is None


def test_every_part_of_a_mixer_is_replaced(enable):
    trainer = enable(tiny_model(TYPE, **sizes_of(TYPE)))
    (mixer,) = mixers_of(trainer)
    assert mixer._state_kernels is state_layers.STATE_KERNELS
    assert type(mixer.norm).__name__ == "_GatedNorm" and type(trainer.model.norm) is state_layers.OffsetNorm
