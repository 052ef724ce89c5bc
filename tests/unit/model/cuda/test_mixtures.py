"""Engines of mixtures of experts on a device: the CPU's results, bits of no batch, by graphs and after updates."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_engine import SamplingParams, exact, routing
from rollout_engine.exact import enabling as exact_enabling
from rollout_engine.model.cuda.row_invariance import ARITHMETIC
from rollout_engine.testing.models import tiny_checkpoint, tiny_model
from tests.unit.model.cuda.test_engine import DRAWN, GREEDY, PROMPTS, Rerun, assert_alike, graphs_by, run, runner_of

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)
SIZES = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A function from an architecture to a small checkpoint of it."""
    made = {}

    def get(architecture):
        if architecture not in made:
            made[architecture] = tiny_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **SIZES)
        return made[architecture]

    return get


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_tokens_and_logprobs_are_those_of_the_cpu(engine_on, architecture):
    ours = engine_on("device", architecture)
    assert runner_of(ours).model.decoder is not None
    assert_alike(run(ours, GREEDY), run(engine_on("cpu", architecture), GREEDY))


@pytest.mark.slow
def test_bits_depend_on_no_batch_chunk_prefix_or_graph(engine_on):
    llm = engine_on("device", "qwen3_moe", deterministic=True)
    together = run(llm, DRAWN, [*PROMPTS, PROMPTS[1]])
    for _ in range(2):
        assert_alike(run(llm, DRAWN, PROMPTS[1:]), together[2:4], bound=0)
    captured = []
    with graphs_by(lambda compute: captured.append(Rerun(compute)) or captured[-1], runner_of(llm), [1, 2, 4]):
        assert_alike(run(llm, DRAWN, PROMPTS[1:]), together[2:4], bound=0)
    assert captured


@pytest.mark.slow
def test_new_weights_are_written_where_the_kernels_read_them(engine_on):
    llm = engine_on("device", "qwen3_moe", deterministic=True)
    before = run(llm, GREEDY)
    loaded = tiny_model("qwen3_moe", **SIZES).state_dict()
    weights = {name: tensor.clone() for name, tensor in loaded.items()}
    for name, tensor in weights.items():
        if ".experts." in name or ".gate." in name:
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)), alpha=0.1)
    llm.update_weights(weights)
    after = run(llm, GREEDY)
    assert not all(np.array_equal(mine, other) for (_, mine), (_, other) in zip(before, after, strict=True))
    cpu = engine_on("cpu", "qwen3_moe")
    cpu.update_weights(weights)
    assert_alike(after, run(cpu, GREEDY))
    for engine in (llm, cpu):  # other tests have them too
        engine.update_weights(loaded)
    assert_alike(run(llm, GREEDY), before, bound=0)


@pytest.fixture
def trainer_of(monkeypatch, checkpoints, device):
    """A function from an architecture to the exact trainer of its checkpoint, as on a CUDA device."""

    def get(architecture):
        model = AutoModelForCausalLM.from_pretrained(str(checkpoints(architecture))).to(device)
        with monkeypatch.context() as patch:
            patch.setattr(exact_enabling, "arithmetic_of", lambda _: ARITHMETIC)
            return exact.enable(model)

    return get


ASKING = SamplingParams(
    temperature=0.8, max_tokens=4, logprobs=0, n=2, seed=3, ignore_eos=True, return_routed_experts=True
)


def ids_of(trainer, output, sample):
    return torch.tensor([output.prompt_token_ids + list(sample.token_ids)], device=next(trainer.parameters()).device)


def chosen_by(trainer, output, sample):
    """The experts of all tokens but the last, by the trainer's own forward."""
    with routing.record(trainer) as recorded, torch.no_grad():
        trainer(ids_of(trainer, output, sample))
    return recorded.routed_experts[:-1].cpu().numpy()


@pytest.mark.slow
def test_routed_experts_are_the_trainers_over_chunks_copies_preemption_and_hits(engine_on, trainer_of):
    llm, trainer = engine_on("device", "qwen3_moe", deterministic=True, num_kv_blocks=7), trainer_of("qwen3_moe")
    prompts = [{"prompt_token_ids": ids} for ids in (*PROMPTS, PROMPTS[1])]
    outputs = llm.generate(prompts, ASKING.clone(max_tokens=18), use_tqdm=False)
    turn = outputs[1].prompt_token_ids + list(outputs[1].outputs[0].token_ids) + [7, 8]
    outputs += llm.generate([{"prompt_token_ids": turn}], ASKING, use_tqdm=False)
    counters = llm.get_metrics().core.counters
    assert counters.num_preemptions and counters.num_block_copies and outputs[-1].num_cached_tokens
    for output in outputs:
        for sample in output.outputs:
            assert sample.routed_experts.dtype == np.uint8
            assert np.array_equal(sample.routed_experts, chosen_by(trainer, output, sample))


@pytest.mark.slow
def test_graphs_drafts_and_watched_layers_tell_the_same_experts(engine_on):
    def told(llm, params=ASKING):
        outputs = llm.generate([{"prompt_token_ids": [5, 6, 7] * 3}], params, use_tqdm=False)
        return [(list(sample.token_ids), sample.routed_experts.tolist()) for sample in outputs[0].outputs]

    llm = engine_on("device", "qwen3_moe", deterministic=True)
    plain = told(llm)
    captured = []
    with graphs_by(lambda compute: captured.append(Rerun(compute)) or captured[-1], runner_of(llm), [1, 2]):
        llm.reset_prefix_cache()
        assert told(llm) == plain and captured
    stop = runner_of(llm).model.layer_watch.watch(lambda *_: None)
    llm.reset_prefix_cache()
    assert told(llm) == plain
    stop()
    drafting = engine_on("device", "qwen3_moe", deterministic=True, speculation="auto", async_scheduling=False)
    core = drafting.frontend.client.driver.core
    core._scheduler.speculator._costs.of = core._scheduler.speculator._costs.with_drafts = lambda num_rows: 1.0
    long = ASKING.clone(temperature=0.1, max_tokens=12)
    expected = told(llm, long)
    assert [told(drafting, long) for _ in range(2)] == [expected] * 2  # the second time it has what is to be drafted
    assert sum(core.stats.drafts.num_accepted) > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["qwen3_moe", "mixtral"])
def test_a_replay_gives_scores_the_trainers_bits(engine_on, trainer_of, architecture):
    llm, trainer = engine_on("device", architecture, deterministic=True), trainer_of(architecture)
    (output,) = llm.generate([{"prompt_token_ids": PROMPTS[1]}], ASKING, use_tqdm=False)
    sample = output.outputs[0]
    pair, ids = ([PROMPTS[1]], [list(sample.token_ids)]), ids_of(trainer, output, sample)
    moved = (sample.routed_experts.astype(np.int64) + 1) % SIZES["num_experts"]
    moved[3] = -1
    for experts, is_own in ((sample.routed_experts, True), (moved, False)):
        (ours,) = llm.score(*pair, temperature=0.8, routed_experts=[experts])
        given = torch.from_numpy(experts.astype(np.int64))[None]
        with torch.no_grad():
            theirs = exact.token_logprobs(trainer, ids, temperature=0.8, routed_experts=given)
        assert ours.tolist() == theirs[0, len(PROMPTS[1]) - 1 :].tolist()
        assert np.array_equal(ours, sample.logprobs) == is_own
