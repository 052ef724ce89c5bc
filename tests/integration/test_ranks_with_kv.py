"""KV connectors of models that are cut over ranks: the bits of one process, and blocks of all ranks' parts."""

import pytest
import torch

from rollout_engine import SamplingParams
from rollout_engine.base.errors import ConfigError, EngineDeadError
from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import ALL_SIZES
from tests.integration.test_ranks import ranks_below
from tests.integration.test_shared_tier import BLOCK, bits, open_engine

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")]
PROMPT = {"prompt_token_ids": [3 + 7 * i % 250 for i in range(150)]}
PARAMS = SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True, seed=3, n=2)
RANKS = dict(tensor_parallel_size=2, num_threads=2)


def run(llm, prompt=PROMPT, params=PARAMS, **options):
    (output,) = llm.generate([prompt], params, use_tqdm=False, **options)
    return output


@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5_text", "deepseek_v3"])
def test_ranks_find_the_kv_of_an_engine_of_as_many_and_have_the_bits_of_one(tmp_path, architecture):
    sizes = {} if architecture == "qwen3" else ALL_SIZES[architecture]
    path, tier = tiny_checkpoint(tmp_path / "model", architecture, dtype=torch.float32, **sizes), f"disk:{tmp_path}/kv"
    with open_engine(path, tier) as one:
        alone = run(one)
    for expected in (0, 9):
        with open_engine(path, tier, **RANKS) as llm:
            found, tiers = run(llm), llm.get_metrics().core.counters
            assert bits(found) == bits(alone)
            assert tiers.kv_tier.num_loaded == expected + (expected > 0 and architecture == "qwen3_5_text")
            assert tiers.num_prompt_tokens_computed == (150 if not expected else 150 - 9 * BLOCK)
            assert tiers.kv_tier.num_refused == tiers.kv_tier.num_failures == 0
    with open_engine(path, tier) as one:
        assert run(one).num_cached_tokens == 144  # its own


def test_sleeps_updates_adapters_preemption_and_deaths_of_ranks_with_a_connector(tmp_path):
    path = tiny_checkpoint(tmp_path / "model")
    other, adapter = tiny_model(seed=1), random_adapter(tiny_model(), name="a", seed=2)
    many = [{"prompt_token_ids": [9 + i, *PROMPT["prompt_token_ids"][:70]]} for i in range(6)]
    long = PARAMS.clone(max_tokens=80, n=1)
    with (
        open_engine(path, None, num_kv_blocks=256) as plain,
        open_engine(path, "host", num_kv_blocks=40, **RANKS) as llm,
    ):

        def check(cached, **options):
            llm.reset_prefix_cache()
            plain.reset_prefix_cache()
            found = run(llm, **options)
            assert bits(found) == bits(run(plain, **options)) and found.num_cached_tokens == cached

        check(0)
        llm.sleep(1)
        llm.wake_up()
        check(144)
        check(0, lora_request=adapter)
        check(144, lora_request=adapter)
        for engine in (llm, plain):
            engine.update_weights(other)
        check(0)
        check(144)
        for engine in (llm, plain):
            engine.update_weights(tiny_model(seed=0))
        check(144)
        pairs = zip(llm.generate(many, long), plain.generate(many, long), strict=True)
        assert all(bits(one) == bits(two) for one, two in pairs)
        counters = llm.get_metrics().core.counters
        assert counters.num_preemptions and counters.kv_tier.num_loaded > 9 * 4
        (rank,) = ranks_below()
        rank.kill()
        with pytest.raises(EngineDeadError, match="rank 1"):
            while True:
                run(llm)
                llm.reset_prefix_cache()


@pytest.mark.parametrize("options", [dict(executor="ray"), dict(device="cuda")])
def test_ranks_elsewhere_are_refused(tmp_path, options):
    with pytest.raises(ConfigError, match="tensor_parallel_size are both set: KV of ranks"):
        open_engine(tmp_path, "host", **RANKS, **options)
