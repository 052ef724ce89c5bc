"""`block_size="auto"`: what it is where, and all that follows it."""

import msgspec
import pytest
import torch

from rollout_engine import LLM, ConfigError, EngineConfig, SamplingParams
from rollout_engine.model.kv_size import describe_pool, size_pool
from rollout_engine.testing import tiny_checkpoint


class TwoBytesPerToken:
    """A model of one layer."""

    geometry = ()
    dtype = torch.bfloat16
    max_model_len = 256
    num_ranks = 1


@pytest.fixture
def two_bytes_per_token(monkeypatch):
    monkeypatch.setattr("rollout_engine.model.kv_size.bytes_per_block", lambda loaded, block_size: 2 * block_size)
    return TwoBytesPerToken


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 16),
        ({"device": "cpu"}, 16),
        ({"device": "cuda"}, 64),
        ({"device": "cuda", "block_size": 16}, 16),
        ({"device": "cuda", "block_size": "auto"}, 64),
        ({"block_size": 64}, 64),
    ],
)
def test_a_block_has_16_tokens_on_a_cpu_and_64_on_a_device_or_what_is_asked_for(options, expected):
    config = EngineConfig(model="m", **options)
    assert config.tokens_per_block == expected
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=EngineConfig)
    assert sent.tokens_per_block == expected and sent == config


@pytest.mark.parametrize("value", [24, 128, 0, "64", "large", None])
def test_another_size_is_refused(value):
    with pytest.raises(ConfigError, match="block_size"):
        EngineConfig(model="m", block_size=value)


def test_the_same_memory_is_a_quarter_of_the_blocks_on_a_device(two_bytes_per_token):
    on_cpu, on_device = (EngineConfig(model="m", device=name, kv_cache_bytes=8192) for name in ("cpu", "cuda"))
    assert size_pool(on_cpu, two_bytes_per_token) == 256
    assert size_pool(on_device, two_bytes_per_token, device_bytes=1 << 30) == 64
    assert "64 blocks of 64 tokens" in describe_pool(on_device, two_bytes_per_token, 64)


def test_prompts_share_whole_blocks_of_what_they_begin_with_and_draw_the_same_tokens(tmp_path):
    """What docs/tuning.md says of the choice: 100 tokens in common, and a next turn."""
    path, common = tiny_checkpoint(tmp_path), [7] * 100
    params = SamplingParams(max_tokens=30, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)
    found = {}
    for size in (16, 64):
        with LLM(str(path), block_size=size, num_kv_blocks=4096 // size, skip_tokenizer_init=True) as llm:
            first, second = (
                llm.generate([{"prompt_token_ids": [*common, last]}], params, use_tqdm=False)[0] for last in (8, 9)
            )
            turn = [*common, 9, *second.outputs[0].token_ids, 5]
            third = llm.generate([{"prompt_token_ids": turn}], params, use_tqdm=False)[0]
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 100 // size * size)
        assert third.num_cached_tokens == 100 + 1 + 30 - 1, "a next turn shares all that was computed"
        found[size] = [
            (each.outputs[0].token_ids, each.outputs[0].logprobs.tolist()) for each in (first, second, third)
        ]
    assert found[16] == found[64]
