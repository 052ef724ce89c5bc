"""The engine on a CUDA device: graphs, memory, bits."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from rollout_engine import LLM, ConfigError, SamplingParams  # noqa: E402
from rollout_engine.testing.models import tiny_checkpoint  # noqa: E402

HAS_DEVICE = torch.cuda.is_available()
on_device = [pytest.mark.gpu, pytest.mark.skipif(not HAS_DEVICE, reason="needs a CUDA device")]
PROMPTS = [[(7 * i + j) % 250 + 3 for j in range(20 + 37 * i)] for i in range(12)]
DRAWN = SamplingParams(temperature=0.9, max_tokens=40, logprobs=0, seed=1, ignore_eos=True)
OPTIONS = {
    "device": "cuda",
    "dtype": "bfloat16",
    "num_kv_blocks": 600,
    "max_num_seqs": 16,
    "skip_tokenizer_init": True,
    "log_stats": False,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    sizes = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    return str(tiny_checkpoint(tmp_path_factory.mktemp("model"), **sizes, std=0.05, max_position_embeddings=2048))


@pytest.fixture
def engine(checkpoint):
    """A function from options to an `LLM` on the device."""
    made = []

    def build(**options):
        made.append(LLM(checkpoint, **(OPTIONS | options)))
        return made[-1]

    yield build
    for each in made:
        each.shutdown()


def run(llm, params=DRAWN, prompts=PROMPTS):
    """(tokens, log-probs) of each prompt."""
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    assert [output.outputs[0].error for output in outputs] == [None] * len(prompts)
    return [(list(output.outputs[0].token_ids), output.outputs[0].logprobs.tolist()) for output in outputs]


@pytest.mark.skipif(HAS_DEVICE, reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_refused_by_name(tmp_path):
    with pytest.raises(ConfigError, match="device='cuda' is not possible: .*Use device='cpu'"):
        LLM(str(tiny_checkpoint(tmp_path)), device="cuda", skip_tokenizer_init=True)


class TestOnADevice:
    pytestmark = on_device

    def test_deterministic_bits_are_those_of_any_batch_graph_and_order(self, engine):
        with_graphs = engine(deterministic=True)
        together = run(with_graphs)
        assert run(engine(deterministic=True, cuda_graphs=False, async_scheduling=False)) == together
        with_graphs.reset_prefix_cache()
        chunked = engine(deterministic=True, max_num_batched_tokens=48)
        assert run(chunked) == together
        assert [run(with_graphs, prompts=[ids])[0] for ids in PROMPTS] == together

    def test_drawn_tokens_have_the_logprobs_that_scoring_gives_them(self, engine):
        llm = engine(deterministic=True)
        drawn = run(llm)
        scores = llm.score(PROMPTS, [tokens for tokens, _ in drawn], temperature=DRAWN.temperature)
        assert [each.tolist() for each in scores] == [logprobs for _, logprobs in drawn]

    def test_float32_tokens_are_those_of_the_cpu(self, engine):
        greedy = SamplingParams(temperature=0.0, max_tokens=16, logprobs=0, ignore_eos=True)
        ours, theirs = (run(engine(device=where, dtype="float32"), greedy) for where in ("cuda", "cpu"))
        assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
        for (_, mine), (_, other) in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(mine), torch.tensor(other), atol=1e-3, rtol=0)

    def test_sleep_gives_memory_back_to_the_driver_and_graphs_follow_it_home(self, engine):
        llm = engine(num_kv_blocks=60_000, deterministic=True)
        before, awake = run(llm), torch.cuda.mem_get_info()[0]
        pool = llm.llm_engine._executor.worker.memory_usage()["kv_cache"]
        llm.sleep(1)
        assert torch.cuda.mem_get_info()[0] - awake > 0.9 * pool
        llm.wake_up()
        assert run(llm) == before

    def test_graphs_follow_new_weights(self, engine):
        llm = engine(deterministic=True)
        before = run(llm)
        weights = {k: v.clone() for k, v in llm.llm_engine.apply_model(lambda m: m.state_dict())[0].items()}
        llm.update_weights({k: v * 0.5 if "norm" in k else v for k, v in weights.items()})
        assert run(llm) != before
        llm.update_weights(weights)
        assert run(llm) == before

    def test_the_pool_is_what_the_largest_step_leaves(self, engine):
        llm = engine(num_kv_blocks=None, gpu_memory_utilization=0.3, max_num_seqs=256, max_num_batched_tokens=4096)
        assert len(run(llm)) == len(PROMPTS)
        free, total = torch.cuda.mem_get_info()
        assert total - free < 0.4 * total
