"""Pause, sleep and wake over a real tiny model: the same tokens, and memory that really comes and goes."""

import gc

import numpy as np
import psutil
import pytest
import torch

from rollout_engine import LLM, DirtyWeightsError, LifecycleError, RolloutPolicy, SamplingParams, exact
from rollout_engine.testing import assert_clean, tiny_checkpoint, tiny_model

PROMPTS = ["hello", "the quick brown fox jumps over the lazy dog"]
GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, logprobs=0)
LAYERS = 2
WIDE = dict(hidden_size=512, intermediate_size=2048, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
MIB = 1 << 20
FORGOTTEN = (
    r"the live weights are incomplete: sleep\(level=2\) forgot them. Send a complete update first, by update_wei"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def llm(checkpoint):
    with LLM(checkpoint, num_kv_blocks=512) as llm:
        yield llm
        assert_clean(llm.llm_engine)


@pytest.fixture(scope="module")
def wide_checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("wide"), num_hidden_layers=LAYERS, **WIDE)


def generate(llm, prompts=PROMPTS, params=GREEDY):
    return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]


def start(llm, num_steps=15):
    for index, prompt in enumerate(PROMPTS):
        llm.llm_engine.add_request(str(index), prompt, GREEDY)
    for _ in range(num_steps):
        llm.llm_engine.step()


def finish(llm):
    ends = {}
    while llm.llm_engine.has_unfinished_requests():
        ends.update((output.request_id, output.outputs[0]) for output in llm.llm_engine.step())
    return [ends[str(index)] for index in range(len(PROMPTS))]


def assert_same(samples, expected):
    for sample, other in zip(samples, expected, strict=True):
        assert sample.token_ids == other.token_ids
        assert np.array_equal(sample.logprobs, other.logprobs)


def pause_and_resume(llm):
    llm.pause_generation(mode="keep")
    llm.resume_generation()


def pause_clearing_the_cache(llm):
    llm.pause_generation(mode="keep", clear_cache=True)
    llm.resume_generation()


def sleep_and_wake(llm):
    llm.sleep(mode="keep")
    llm.wake_up()


def sleep_deeply_and_update(llm):
    llm.sleep(level=2, mode="keep")
    llm.wake_up(["weights"])
    llm.update_weights(tiny_model())
    llm.wake_up(["kv_cache"])


def reset_running(llm):
    assert llm.reset_prefix_cache(reset_running_requests=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "interrupt", [pause_and_resume, pause_clearing_the_cache, sleep_and_wake, sleep_deeply_and_update, reset_running]
)
def test_requests_kept_go_on_to_the_same_bits(llm, interrupt):
    expected = generate(llm)
    start(llm)
    interrupt(llm)
    assert_same(finish(llm), expected)


def test_exactness_survives_a_sleep_and_an_update(checkpoint):
    trainer = exact.enable(tiny_model(seed=1))
    with RolloutPolicy.from_pretrained(checkpoint, num_kv_blocks=512) as policy:
        policy.sleep(level=2)
        policy.wake_up(["weights"])
        policy.update_weights(trainer)
        policy.wake_up()
        batch = policy.rollout(PROMPTS, SamplingParams(max_tokens=20), num_samples=3, use_tqdm=False)
    with torch.no_grad():
        logprobs = exact.token_logprobs(trainer, batch["tokens", "full"], batch["masks", "all_attention_mask"])
    sampled = batch["masks", "all_assistant_mask"]
    assert (logprobs == batch["log_probs", "full"][:, 1:])[sampled[:, 1:]].all()


def test_forgotten_weights_serve_only_after_a_complete_update(llm):
    expected = generate(llm)
    llm.sleep(level=2)
    with pytest.raises(LifecycleError, match=r"update_weights: .* call wake_up\(\['weights'\]\) first"):
        llm.update_weights(tiny_model())
    llm.wake_up()
    with pytest.raises(DirtyWeightsError, match=FORGOTTEN):
        generate(llm)
    with pytest.raises(DirtyWeightsError, match=FORGOTTEN):
        llm.collective_rpc("get_weight_norms")
    with pytest.raises(DirtyWeightsError, match=FORGOTTEN):
        llm.score([[5]], [[6]])
    state = dict(tiny_model().state_dict())
    state.pop("model.norm.weight")
    with pytest.raises(Exception, match=r"1 tensor is missing: model\.norm\.weight"):
        llm.update_weights(state)
    with pytest.raises(DirtyWeightsError, match=FORGOTTEN):
        generate(llm)
    report = llm.update_weights(tiny_model(), version=llm.policy_version)
    assert (report.version, llm.policy_version) == (0, 0)
    assert_same(generate(llm), expected)


def test_once_updated_the_weights_are_not_called_forgotten_any_more(llm):
    llm.sleep(level=2)
    llm.wake_up()
    llm.update_weights(tiny_model())
    with torch.no_grad(), pytest.raises(DirtyWeightsError, match="has written to"):
        llm.apply_model(lambda module: module.model.norm.weight.mul_(2))
    with pytest.raises(DirtyWeightsError, match="incomplete: an update ended half-way, or a function wrote to them"):
        generate(llm)
    llm.update_weights(tiny_model(), version=llm.policy_version)


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_what_ends_around_a_deep_sleep_is_forgotten_without_a_failing_step(llm, caplog, mode):
    start(llm, num_steps=3)
    llm.sleep(2, mode=mode)
    llm.llm_engine.abort_request("0")
    llm.llm_engine.step()
    assert llm.frontend.client.driver.executor.num_sequences == 0
    llm.wake_up(["weights"])
    llm.llm_engine.abort_request("1")
    llm.wake_up()
    llm.llm_engine.step()
    assert not llm.llm_engine.has_unfinished_requests()
    assert llm.llm_engine.stats.num_failed_steps == 0 and caplog.records == []
    llm.update_weights(tiny_model(), version=llm.policy_version)


def test_an_update_while_paused_is_seen_after_resume(llm):
    llm.pause_generation(mode="keep")
    llm.update_weights(tiny_model(seed=5))
    llm.resume_generation()
    assert llm.policy_version == 1
    assert {span.policy_version for sample in generate(llm) for span in sample.version_spans} == {1}


def test_a_refused_update_returns_to_the_state_before(llm):
    expected = generate(llm)
    llm.pause_generation(mode="keep")
    with pytest.raises(Exception, match="tensors are missing"):
        llm.update_weights({})
    assert llm.is_paused()
    llm.resume_generation()
    assert_same(generate(llm), expected)


@pytest.mark.quick(1)
@pytest.mark.parametrize("level", [1, 2])
def test_sleep_returns_memory_to_the_system(wide_checkpoint, level):
    with LLM(wide_checkpoint, kv_cache_bytes=64 * MIB) as llm:
        prompts = [[3 + (i * j) % 250 for i in range(500)] for j in range(1, 5)]
        generate(llm, prompts, SamplingParams(max_tokens=1, temperature=0.0))
        weights = sum(p.nbytes for p in llm.frontend.client.driver.executor.worker.runner.model.module.parameters())
        kv = len(prompts) * 500 * LAYERS * 2 * WIDE["hidden_size"] * 4
        awake = resident()
        llm.sleep(level)
        assert awake - resident() > 0.9 * (kv + (weights if level == 2 else 0))
        llm.wake_up()


@pytest.mark.slow
def test_fifty_cycles_of_sleep_leave_memory_flat(wide_checkpoint):
    short = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=0)
    with LLM(wide_checkpoint, kv_cache_bytes=64 * MIB) as llm:
        trainer = dict(tiny_model(num_hidden_layers=LAYERS, **WIDE).state_dict())
        expected = generate(llm, params=short)
        after = []
        for cycle in range(50):
            forget = cycle % 5 == 4
            llm.sleep(level=2 if forget else 1)
            llm.wake_up()
            if forget:
                llm.update_weights(trainer)
            assert_same(generate(llm, params=short), expected)
            after.append(resident())
        assert after[-1] - after[9] < 16 * MIB


def resident():
    gc.collect()
    return psutil.Process().memory_info().rss
