"""KV connectors on real tiny models: the same bits, nothing stale, and nothing lost to a connector that is no good."""

import msgspec
import numpy as np
import pytest
import torch

from rollout_engine import LLM, EngineConfig, SamplingParams, SpeculationConfig
from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.execution import kv_link
from rollout_engine.telemetry.prometheus import as_text, own_families
from rollout_engine.testing import random_adapter, tiny_checkpoint, tiny_model
from rollout_engine.testing.architectures import ALL_SIZES
from tests.integration import dict_connector

PARAMS = SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True, seed=3)
PROMPT = [3 + 7 * i % 250 for i in range(150)]
BLOCK = 16
DICT = "tests.integration.dict_connector:"

pytestmark = pytest.mark.usefixtures("own_products")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """checkpoint(architecture) -> directory of a tiny random model, made once."""
    made = {}

    def make(architecture="qwen3", dtype=torch.float32, **sizes):
        key = (architecture, dtype, *sizes.items())
        if key not in made:
            sizes = ({} if architecture == "qwen3" else ALL_SIZES[architecture]) | sizes
            made[key] = tiny_checkpoint(tmp_path_factory.mktemp(architecture), architecture, dtype=dtype, **sizes)
        return made[key]

    return make


def engine(directory, connector, **options):
    return LLM(directory, kv_connector=connector, log_stats=False, **{"num_kv_blocks": 256, "seed": 5, **options})


def generate(llm, prompt=PROMPT, params=PARAMS, **options):
    (output,) = llm.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False, **options)
    return output


def same(one, other):
    return all(
        a.token_ids == b.token_ids and np.array_equal(a.logprobs, b.logprobs)
        for a, b in zip(one.outputs, other.outputs, strict=True)
    )


def stats(llm):
    return llm.get_metrics().core.counters


def run_once(directory, connector, prompt=PROMPT, params=PARAMS, **options):
    """The output of an engine that begins without KV of its own, and its counters."""
    with engine(directory, connector, **options) as llm:
        return generate(llm, prompt, params), stats(llm)


def test_a_second_engine_computes_at_most_a_block_of_a_known_prompt(checkpoint, tmp_path):
    directory, prompt = checkpoint(max_position_embeddings=4096), [3 + 11 * i % 250 for i in range(2048)]
    alone, _ = run_once(directory, None, prompt)
    first, _ = run_once(directory, f"disk:{tmp_path}", prompt)
    second, counters = run_once(directory, f"disk:{tmp_path}", prompt)
    assert same(alone, first) and same(alone, second)
    assert counters.num_prompt_tokens_computed <= BLOCK and second.num_cached_tokens >= 2048 - BLOCK
    assert counters.kv_tier.num_loaded == 127 and counters.kv_tier.num_refused == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [
        ("qwen3", torch.bfloat16),
        ("gemma3_text", torch.float32),  # sliding windows
        ("deepseek_v3", torch.float32),  # latents, experts
        ("deepseek_v32", torch.float32),  # keys of an indexer
        ("qwen3_5_text", torch.float32),  # states
        ("qwen3_5_text", torch.bfloat16),
        pytest.param("kimi_linear", torch.float32, marks=pytest.mark.slow),
        pytest.param("lfm2", torch.float32, marks=pytest.mark.slow),
        pytest.param("granitemoehybrid", torch.float32, marks=pytest.mark.slow),
        pytest.param("gpt_oss", torch.float32, marks=pytest.mark.slow),
        pytest.param("gemma4_text", torch.float32, marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_cache_comes_back_to_the_bit(checkpoint, tmp_path, architecture, dtype):
    directory, options = checkpoint(architecture, dtype), {"dtype": str(dtype).removeprefix("torch.")}
    alone, _ = run_once(directory, None, **options)
    first, _ = run_once(directory, f"disk:{tmp_path}", **options)
    second, counters = run_once(directory, f"disk:{tmp_path}", **options)
    assert same(alone, first) and same(alone, second)
    assert counters.kv_tier.num_loaded >= 9 and counters.num_prompt_tokens_computed <= BLOCK


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [{"async_scheduling": True}, {"quantization": "int8"}, {"deterministic": False}])
def test_other_ways_to_compute_have_kv_of_their_own(checkpoint, tmp_path, options):
    directory = checkpoint()
    run_once(directory, f"disk:{tmp_path}")
    alone, _ = run_once(directory, None, **options)
    for expected in (9 * ("async_scheduling" in options), 9):
        found, counters = run_once(directory, f"disk:{tmp_path}", **options)
        assert counters.kv_tier.num_loaded == expected
        assert same(alone, found) or "deterministic" in options


def test_after_an_update_nothing_stale_is_found_and_kv_of_equal_weights_is(checkpoint):
    other = tiny_model(seed=1)
    with engine(checkpoint(), "host") as llm, engine(checkpoint(), None) as plain:
        before = generate(llm)
        llm.update_weights(other)
        plain.update_weights(other)
        llm.reset_prefix_cache()
        after = generate(llm)
        assert after.num_cached_tokens == 0 and same(after, generate(plain)) and not same(after, before)
        llm.update_weights(tiny_model(seed=0))  # as they were, under a later version
        again = generate(llm)
        assert again.num_cached_tokens == 144 and same(again, before)
        llm.update_weights(tiny_model(seed=0), version=llm.policy_version)  # changes nothing
        llm.reset_prefix_cache()
        assert generate(llm).num_cached_tokens == 144


def test_requests_over_an_update_leave_no_kv_of_the_old_weights_under_the_new_ones(checkpoint):
    with engine(checkpoint(), "host") as llm, engine(checkpoint(), None) as plain:
        core = llm.llm_engine
        core.add_request("a", {"prompt_token_ids": PROMPT}, PARAMS.clone(max_tokens=60))
        for _ in range(5):
            core.step()
        other = tiny_model(seed=1)
        llm.update_weights(other, kv="keep")
        while core.has_unfinished_requests():
            core.step()
        plain.update_weights(other)
        llm.reset_prefix_cache()
        assert same(generate(llm), generate(plain))
        assert stats(llm).kv_tier.num_loaded == 0


def test_partial_updates_have_a_digest_of_all_weights(checkpoint):
    with engine(checkpoint(), "host") as llm:
        generate(llm)
        weights = {"model.norm.weight": torch.full((64,), 0.5)}
        llm.update_weights(weights, partial=True)
        llm.reset_prefix_cache()
        changed = generate(llm)
        assert changed.num_cached_tokens == 0
        llm.reset_prefix_cache()
        found = generate(llm)
        assert found.num_cached_tokens == 144 and same(found, changed)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_keeps_prefixes(checkpoint, level):
    with engine(checkpoint(), "host") as llm:
        before = generate(llm)
        llm.sleep(level)
        llm.wake_up()
        if level == 2:
            llm.update_weights(tiny_model(seed=0))
        after = generate(llm)
        assert same(before, after) and after.num_cached_tokens == 144
        assert llm.get_metrics().core.num_tier_blocks > 9


def test_preempted_sequences_come_back_by_loads(checkpoint):
    prompts = [{"prompt_token_ids": [9 + i, *PROMPT[:70]]} for i in range(6)]
    params = PARAMS.clone(max_tokens=80)
    with engine(checkpoint(), "host", num_kv_blocks=40) as llm, engine(checkpoint(), None) as plain:
        pairs = zip(llm.generate(prompts, params), plain.generate(prompts, params), strict=True)
        assert all(same(*pair) for pair in pairs)
        assert stats(llm).num_preemptions and stats(llm).kv_tier.num_loaded
        assert stats(llm).num_recomputed_tokens <= BLOCK * stats(llm).num_preemptions


def test_another_engine_continues_a_lost_request_from_its_last_block(checkpoint, tmp_path):
    directory = checkpoint()
    first, _ = run_once(directory, f"disk:{tmp_path}", params=PARAMS.clone(max_tokens=40))
    whole = PROMPT + list(first.outputs[0].token_ids)
    with engine(directory, f"disk:{tmp_path}") as llm:
        found = generate(llm, whole, PARAMS)
        assert found.num_cached_tokens >= len(whole) - 2 * BLOCK
        assert stats(llm).num_prompt_tokens_computed <= 2 * BLOCK


def test_adapters_and_salts_keep_apart(checkpoint):
    base = tiny_model()
    one, two = (random_adapter(base, name=f"a{seed}", seed=seed) for seed in (1, 2))
    with engine(checkpoint(), "host") as llm, engine(checkpoint(), None) as plain:
        kinds = [{"lora_request": one}, {"lora_request": two}, {}]
        for kind in kinds:
            assert generate(llm, **kind).num_cached_tokens == 0
        llm.reset_prefix_cache()
        for kind in kinds:
            found = generate(llm, **kind)
            assert found.num_cached_tokens == 144 and same(found, generate(plain, **kind))
        prompt = {"prompt_token_ids": PROMPT, "cache_salt": "mine"}
        (salted,) = llm.generate([prompt], PARAMS, use_tqdm=False)
        assert salted.num_cached_tokens == 0
        replaced = msgspec.structs.replace(random_adapter(base, name="a1", seed=7), revision=1)
        found = generate(llm, lora_request=replaced)
        assert found.num_cached_tokens == 0 and same(found, generate(plain, lora_request=replaced))


def test_drafted_tokens_and_routed_experts_go_with_a_connector(checkpoint, tmp_path):
    directory = checkpoint("deepseek_v3")
    params = PARAMS.clone(max_tokens=30, return_routed_experts=True)
    alone, _ = run_once(directory, None, params=params)
    for speculation in ("off", SpeculationConfig()):
        found, _ = run_once(directory, f"disk:{tmp_path}", params=params, speculation=speculation)
        assert same(alone, found)
    assert found.num_cached_tokens == 144
    assert np.array_equal(found.outputs[0].routed_experts, alone.outputs[0].routed_experts)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["Raising", "Short", "Mixing", "Nothing", "NeverFetched", "Hanging"])
def test_a_connector_that_is_no_good_costs_a_computation(checkpoint, monkeypatch, kind):
    monkeypatch.setattr(kv_link, "CALL_SECONDS", 0.3)
    monkeypatch.setattr(kv_link, "FETCH_SECONDS", 0.1)
    directory = checkpoint()
    alone, _ = run_once(directory, None)
    dict_connector.BLOCKS.clear()
    run_once(directory, f"{DICT}Dict:{kind}")
    assert len(dict_connector.BLOCKS[kind]) == 10
    try:
        found, counters = run_once(directory, f"{DICT}{kind}:{kind}")
    finally:
        dict_connector.RELEASED.set()
    assert same(alone, found)
    assert counters.kv_tier.num_loaded == 9 * (kind == "NeverFetched")
    assert (counters.kv_tier.num_failures > 0) == (kind in ("Hanging", "Raising"))
    dict_connector.RELEASED.clear()


def test_a_connector_that_does_not_open_fails_the_start(checkpoint):
    with pytest.raises(ConfigError, match="no door"):
        engine(checkpoint(), f"{DICT}NotOpening:x")
    with pytest.raises(ConfigError, match="kv_connector='hots' is not allowed"):
        engine(checkpoint(), "hots")


@pytest.mark.parametrize(
    "options",
    [
        {"kv_connector": "host", "enable_prefix_caching": False},
        {"kv_connector": "host", "pipeline_parallel_size": 2},
        {"kv_connector": "host", "tensor_parallel_size": 2, "executor": "ray"},
        {"kv_connector_bytes": 1 << 20},
    ],
)
def test_options_that_do_not_go_together_are_refused(options):
    with pytest.raises(ConfigError, match="kv_connector"):
        EngineConfig(model="m", **options)


def test_hints_and_resets(checkpoint):
    with engine(checkpoint(), "host") as llm:
        generate(llm)
        fetched = generate(llm, params=PARAMS.clone(kv_hint="prefetch"))
        assert fetched.outputs[0].token_ids == [] and fetched.outputs[0].finish_reason == "length"
        held = llm.get_metrics().core.num_tier_blocks
        generate(llm, PROMPT[:64] + [5] * 40, PARAMS.clone(kv_hint="drop"))
        assert llm.get_metrics().core.num_tier_blocks == held
        llm.reset_prefix_cache(reset_connector=True)
        assert llm.get_metrics().core.num_tier_blocks == 0 and generate(llm).num_cached_tokens == 0
        text = as_text(own_families(llm.get_metrics(), {})).decode()
        assert "rollout_engine_kv_connector_blocks" in text and "rollout_engine_kv_loaded_total" in text
    with LLM(checkpoint(), log_stats=False) as llm, pytest.raises(RequestError, match="kv_hint"):
        generate(llm, params=PARAMS.clone(kv_hint="prefetch"))


def digest_of(llm):
    return llm.llm_engine.frontend.client.driver.executor.live_digest


@pytest.mark.quick(1)
@pytest.mark.parametrize("tied", [False, True])
def test_equal_weights_have_one_digest_however_they_arrived(checkpoint, tied):
    first, second = (checkpoint(tie_word_embeddings=tied, std=std) for std in (0.2, 0.1))
    with engine(second, "host") as loaded, engine(first, "host") as updated:
        assert digest_of(loaded) != digest_of(updated)
        updated.update_weights(second)
        assert digest_of(updated) == digest_of(loaded)
        updated.update_weights(first)
        updated.update_weights(tiny_model(tie_word_embeddings=tied, std=0.1))
        assert digest_of(updated) == digest_of(loaded)
        updated.sleep(2)
        assert digest_of(updated) is None
        updated.wake_up()
        updated.update_weights(second, staging="inplace")
        assert digest_of(updated) == digest_of(loaded)
