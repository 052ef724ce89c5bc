"""Engines of mixtures of experts on a device: the CPU's results, bits of no batch, by graphs and after updates."""

import numpy as np
import pytest
import torch

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


@pytest.mark.parametrize("architecture", ["qwen3_moe", pytest.param("mixtral", marks=pytest.mark.slow)])
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
    weights = {name: tensor.clone() for name, tensor in tiny_model("qwen3_moe", **SIZES).state_dict().items()}
    for name, tensor in weights.items():
        if ".experts." in name or ".gate." in name:
            tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5)), alpha=0.1)
    llm.update_weights(weights)
    after = run(llm, GREEDY)
    assert not all(np.array_equal(mine, other) for (_, mine), (_, other) in zip(before, after, strict=True))
    cpu = engine_on("cpu", "qwen3_moe")
    cpu.update_weights(weights)
    assert_alike(after, run(cpu, GREEDY))
