"""Engines that divide the experts of a mixture say what one engine says, to the bit: `data_parallel_size`.

Each comparison is with one engine that has all experts: with work on both engines and on one alone, through updates,
sleeps, changes of the number of engines, and the death of one.
"""

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx2
import numpy as np
import pytest

from rollout_engine import LLM, AsyncLLM, EngineConfig, LLMEngine, RolloutService, SamplingParams
from rollout_engine.base.errors import CallTimeoutError, LifecycleError
from rollout_engine.kernels.cpu import phases
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer
from rollout_engine.testing import tiny_checkpoint, tiny_model
from rollout_engine.testing.adapters import random_adapter
from rollout_engine.testing.architectures import sizes_of

pytestmark = pytest.mark.skipif(not phases.is_available(), reason="no C++ compiler here")

EXTENSION = "tests.parity.expert_sizes:ExpertSizes"
OPTIONS = dict(skip_tokenizer_init=True, num_kv_blocks=64, log_stats=False, num_threads=1)
PROMPTS = [{"prompt_token_ids": list(range(3, 3 + length))} for length in (5, 9, 17, 3)]
PARAMS = SamplingParams(max_tokens=12, n=2, logprobs=0, seed=5, ignore_eos=True)
SCORED = [[3, 4, 5], [6, 7]], [[6, 7, 8], [9, 3, 1, 4]]
OTHERS = (
    "mixtral deepseek_v3 deepseek_v3_eight_groups glm4_moe gpt_oss olmoe qwen3_next granitemoe longcat_flash "
    "gemma4_text_experts"
).split()


def samples_of(engine, params=PARAMS, **options):
    """Tokens and log-probs of all samples, to the bit."""
    results = engine.generate(PROMPTS, params, use_tqdm=False, **options)
    return [(list(c.token_ids), c.logprobs.tobytes()) for result in results for c in result.outputs]


def scores_of(engine):
    return [scores.tobytes() for scores in engine.score(*SCORED)]


def served(path, size=2, **options):
    return RolloutService.from_pretrained(str(path), data_parallel_size=size, **(OPTIONS | options))


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.02)


def num_serving(service):
    return states_of(service).count("SYNCED")


def states_of(service):
    return [each.state for each in service.health() if each.state != "DEAD"]


def test_two_engines_have_the_bits_of_one_through_updates_and_sleeps(tmp_path):
    path, new = tiny_checkpoint(tmp_path, "qwen3_moe"), tiny_model("qwen3_moe", seed=3)
    with LLM(str(path), **OPTIONS) as llm:
        first, scores = samples_of(llm), scores_of(llm)
        report = llm.update_weights(new)
        second = samples_of(llm)
    with served(path, worker_extensions=(EXTENSION,)) as service:
        assert samples_of(service) == first
        for index in (0, 1):  # the other one has no work, and takes part in every round
            assert samples_of(service, replica_index=index) == first
        assert scores_of(service) == scores
        sizes = [sum(own) for (own,) in service.collective_rpc("get_expert_sizes").values()]
        assert max(sizes) <= 0.6 * sum(sizes)
        rounds = [each.core.counters.rounds for each in service.get_metrics().replicas.values()]
        assert all(each.num_rounds and each.num_dummies and each.wait_seconds for each in rounds)
        for level in (0, 1):
            service.sleep(level=level)
            service.wake_up()
        assert service.update_weights(new).digest == report.digest
        assert samples_of(service) == second
        with pytest.raises(LifecycleError, match="save_sharded_state: not possible with data_parallel_size=2"):
            service.save_sharded_state(tmp_path / "state")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", OTHERS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_kind_of_mixture_has_the_bits_of_one_engine(tmp_path, architecture, dtype):
    kind, fields = sizes_of(architecture)
    path = tiny_checkpoint(tmp_path, kind, **fields)
    with LLM(str(path), dtype=dtype, **OPTIONS) as llm:
        first, scores = samples_of(llm), scores_of(llm)
    with served(path, dtype=dtype) as service:
        assert samples_of(service) == first
        assert samples_of(service, replica_index=1) == first
        assert scores_of(service) == scores


@pytest.mark.slow
def test_three_engines_divide_four_experts(tmp_path):
    path = tiny_checkpoint(tmp_path, "qwen3_moe")
    with LLM(str(path), **OPTIONS) as llm:
        first = samples_of(llm)
    with served(path, 3) as service:
        assert samples_of(service) == first
        assert samples_of(service, replica_index=2) == first


@pytest.mark.slow
def test_engines_grow_and_shrink_while_they_serve(tmp_path):
    path, new = tiny_checkpoint(tmp_path, "qwen3_moe"), tiny_model("qwen3_moe", seed=3)
    with LLM(str(path), **OPTIONS) as llm:
        llm.update_weights(new)
        expected = samples_of(llm)
    with served(path) as service:
        service.update_weights(new)
        for size in (1, 2):
            service.scale(size)
            num_calls = 0
            while states_of(service) != ["SYNCED"] * size:
                assert samples_of(service) == expected
                num_calls += 1
            assert num_calls and samples_of(service) == expected


@pytest.mark.slow
def test_engines_grow_and_shrink_before_the_first_update(tmp_path):
    """The weights of a checkpoint are compared as far as all sizes have them whole."""
    path = tiny_checkpoint(tmp_path, "qwen3_moe")
    with LLM(str(path), **OPTIONS) as llm:
        expected = samples_of(llm)
    with served(path) as service:
        for size in (1, 2):
            service.scale(size)
            wait_for(lambda size=size: states_of(service) == ["SYNCED"] * size)
            assert samples_of(service) == expected


@pytest.mark.slow
def test_a_restart_forms_the_group_anew_once_while_the_old_one_serves(tmp_path):
    path, params = tiny_checkpoint(tmp_path, "qwen3_moe"), PARAMS.clone(max_tokens=300)
    found = []
    with LLM(str(path), **OPTIONS) as llm:
        expected = samples_of(llm, params)
    with served(path) as service:
        generate = threading.Thread(target=lambda: found.extend(samples_of(service, params)))
        generate.start()
        wait_for(lambda: service.get_metrics().core.counters.num_tokens_sampled > 20)
        pids = {each.pid for each in service.health()}
        service.restart_replicas()
        assert [each.index for each in service.health() if each.state == "SYNCED"] == [2, 3]
        assert not pids & {each.pid for each in service.health()}
        generate.join(60)
        assert found == expected


@pytest.mark.slow
def test_updates_in_flight_meet_experts_of_their_own_version(tmp_path):
    path, models = tiny_checkpoint(tmp_path, "qwen3_moe"), [tiny_model("qwen3_moe", seed=seed) for seed in (3, 4)]
    params = SamplingParams(max_tokens=400, logprobs=0, seed=5, ignore_eos=True)
    found = []
    with served(path) as service:
        generate = threading.Thread(target=lambda: found.extend(service.generate(PROMPTS, params, use_tqdm=False)))
        generate.start()
        wait_for(lambda: service.get_metrics().core.counters.num_tokens_sampled > 40)
        service.update_weights(models[0], kv="recompute")
        sampled = service.get_metrics().core.counters.num_tokens_sampled
        wait_for(lambda: service.get_metrics().core.counters.num_tokens_sampled > sampled + 40)
        service.update_weights(models[1], kv="recompute")
        generate.join()
    assert {len(result.outputs[0].version_spans) for result in found} == {3}
    with LLM(str(path), **OPTIONS) as llm:
        for version in range(3):
            if version:
                llm.update_weights(models[version - 1])
            for prompt, result in zip(PROMPTS, found, strict=True):
                (output,) = result.outputs
                (span,) = [each for each in output.version_spans if each.policy_version == version]
                (scores,) = llm.score([prompt["prompt_token_ids"]], [list(output.token_ids)])
                own = slice(span.start, span.end)
                assert np.array_equal(scores[own], output.logprobs[own])


@pytest.mark.slow
def test_requests_continue_after_the_death_of_an_engine(tmp_path):
    path = tiny_checkpoint(tmp_path, "qwen3_moe")
    params = SamplingParams(max_tokens=300, logprobs=0, seed=5, ignore_eos=True)
    found = []
    with LLM(str(path), **OPTIONS) as llm:
        expected = samples_of(llm, params)
    with served(path) as service:
        generate = threading.Thread(target=lambda: found.extend(samples_of(service, params)))
        generate.start()
        wait_for(lambda: service.get_metrics().core.counters.num_tokens_sampled > 40)
        pids = [each.pid for each in service.health()]
        os.kill(pids[1], signal.SIGKILL)
        generate.join()
        assert found == expected
        wait_for(lambda: num_serving(service) == 2)
        assert not {each.pid for each in service.health()} & {*pids}, "the group is formed anew"
        assert samples_of(service, params) == expected


@pytest.mark.slow
def test_a_sleep_that_waits_lets_requests_of_all_engines_end(tmp_path):
    path = tiny_checkpoint(tmp_path, "qwen3_moe")
    found = []
    with LLM(str(path), **OPTIONS) as llm:
        expected = samples_of(llm)
    with served(path) as service:
        params = PARAMS.clone(max_tokens=200)
        generate = threading.Thread(
            target=lambda: found.extend(service.generate(PROMPTS, params, use_tqdm=False, replica_index=1))
        )
        generate.start()
        wait_for(lambda: service.get_metrics().core.counters.num_tokens_sampled > 20)
        service.sleep(level=1, mode="wait")
        generate.join()
        assert all(len(output.token_ids) == 200 for result in found for output in result.outputs)
        service.wake_up()
        assert samples_of(service) == expected


@pytest.mark.slow
def test_a_sleep_that_waits_counts_requests_that_no_engine_has_taken_yet(tmp_path):
    """One engine falls asleep at once, and the other one finds a request before its own order to sleep."""
    path, found = tiny_checkpoint(tmp_path, "qwen3_moe"), []
    with served(path, worker_extensions=(EXTENSION,)) as service:
        for level in (1, 2):
            busy = dict(method="be_busy", args=(1.0,), replica_index=1)
            generate = partial(service.generate, PROMPTS, PARAMS, use_tqdm=False, replica_index=1)
            threads = [
                threading.Thread(target=lambda busy=busy: service.collective_rpc(**busy)),
                threading.Thread(target=lambda generate=generate: found.extend(generate())),
            ]
            for thread in threads:
                thread.start()
                time.sleep(0.2)
            service.sleep(level=level, mode="wait", drain_timeout=60)
            assert service.is_sleeping()
            for thread in threads:
                thread.join(60)
            service.wake_up()
    assert all(len(output.token_ids) == 12 for result in found for output in result.outputs)
    assert len(found) == 2 * len(PROMPTS)


@pytest.mark.slow
def test_calls_end_in_time_while_another_engine_sleeps(tmp_path):
    path = tiny_checkpoint(tmp_path, "qwen3_moe")
    with served(path) as service:
        calls = service.frontend.client.calls
        calls.on_one(0, "sleep", dict(level=1, mode="abort", drain_timeout=None)).result(60)
        with pytest.raises(LifecycleError, match="generate: not possible while the engine is ASLEEP"):
            service.generate(PROMPTS, PARAMS, use_tqdm=False, replica_index=1)
        with pytest.raises(CallTimeoutError):
            calls.on_one(1, "score", score_arguments(timeout=0.5)).result(60)
        score = calls.on_one(1, "score", score_arguments())
        calls.on_one(1, "sleep", dict(level=1, mode="abort", drain_timeout=None)).result(60)
        with pytest.raises(LifecycleError, match="score: not possible while the engine is ASLEEP"):
            score.result(60)
        service.wake_up()
        assert len(scores_of(service)) == len(SCORED[0])


def score_arguments(timeout=None):
    options = dict(temperature=1.0, lora=None, routed_experts=None, pictures=None, timeout=timeout)
    return dict(prompt_token_ids=SCORED[0], completion_token_ids=SCORED[1]) | options


@pytest.mark.slow
def test_a_server_stops_scheduling_on_all_engines(tmp_path):
    """Level 0 over HTTP: requests wait on both engines, weights may change, and all end after `/wake_up`."""
    path = tiny_checkpoint(tmp_path / "model", "qwen3_moe")
    new = tiny_checkpoint(tmp_path / "new", "qwen3_moe", seed=3)
    with LLM(str(path), **OPTIONS) as llm:
        llm.update_weights(str(new))
        params = PARAMS.clone(n=1)
        expected = [list(each.outputs[0].token_ids) for each in llm.generate(PROMPTS, params, use_tqdm=False)]
    engine = AsyncLLM(str(path), data_parallel_size=2, **OPTIONS)
    with HttpServer(engine, ServeOptions(port=0)) as server, httpx2.Client(base_url=server.url, timeout=60) as client:
        assert client.post("/sleep", params=dict(level=0)).is_success
        assert client.get("/is_sleeping").json()["is_sleeping"]
        fields = dict(model="default", max_tokens=12, seed=5, ignore_eos=True, return_token_ids=True)

        def ask(rank, prompt):
            body = fields | dict(prompt=prompt["prompt_token_ids"])
            return client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}).json()

        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(ask, rank, prompt) for rank in (0, 1) for prompt in PROMPTS]
            time.sleep(0.5)
            assert not any(each.done() for each in asked)
            assert client.post("/update_weights_from_disk", json=dict(model_path=str(new))).is_success
            assert not any(each.done() for each in asked)
            assert client.post("/wake_up").is_success
            found = [each.result()["choices"][0]["token_ids"] for each in asked]
        assert found == expected * 2
        assert "rollout_engine_expert_dummy_rounds_total" in client.get("/metrics").text
    engine.shutdown()


@pytest.mark.slow
def test_adapters_are_each_engines_own(tmp_path):
    path = tiny_checkpoint(tmp_path, "qwen3_moe")
    lora = random_adapter(tiny_model("qwen3_moe"), "style")
    with LLM(str(path), **OPTIONS) as llm:
        llm.add_lora(lora)
        expected = samples_of(llm, lora_request="style"), samples_of(llm)
    with served(path) as service:
        service.add_lora(lora)
        assert (samples_of(service, lora_request="style"), samples_of(service)) == expected


@pytest.mark.slow
def test_a_loop_over_steps_ends_with_all_engines(tmp_path):
    config = EngineConfig(model=str(tiny_checkpoint(tmp_path, "qwen3_moe")), data_parallel_size=2, **OPTIONS)
    engine = LLMEngine.from_config(config)
    try:
        assert not engine.has_unfinished_requests_dp() and engine.has_unfinished_requests_dp(True)
        engine.add_requests(PROMPTS, PARAMS)
        finished = []
        while engine.has_unfinished_requests_dp():
            finished += [output for output in engine.step() if output.finished]
        assert len(finished) == len(PROMPTS)
    finally:
        engine.shutdown()
