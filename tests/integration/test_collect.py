"""Collectors over real engines: answers that go on over updates spell the versions that their tokens have."""

import os
import signal
import threading

import pytest
from transformers import AutoModelForCausalLM

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.faces.async_llm import AsyncLLM
from rollout_engine.rollouts.policy import RolloutPolicy
from rollout_engine.testing import tiny_checkpoint
from rollout_engine.testing.spelling import spelled_token, spelling_state_dict

OPTIONS = {"dtype": "float32", "num_kv_blocks": 256, "max_model_len": 256, "num_threads": 1}
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=60, stop_token_ids=list(range(3, 20)))
"""Answers of many lengths."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint)


@pytest.fixture(
    params=["in process", *(pytest.param(name, marks=pytest.mark.slow) for name in ("own process", "fleet"))]
)
def policy(request, checkpoint):
    if request.param == "own process":
        made = RolloutPolicy(AsyncLLM(checkpoint, **OPTIONS))
    else:
        made = RolloutPolicy.from_pretrained(checkpoint, num_replicas=1 + (request.param == "fleet"), **OPTIONS)
    with made:
        yield made
        assert made.frontend.num_open() == 0
        assert made.get_num_unfinished_requests() == 0


def tokens_of(batch):
    """(group_id, sample_index) -> sampled (token, version) of every row."""
    sampled, found = batch["masks", "all_assistant_mask"], {}
    for row in range(len(batch)):
        own = batch["tokens", "full"][row][sampled[row]], batch["policy_version"][row][sampled[row]]
        key = batch["group_id"][row].item(), batch["sample_index"][row].item()
        found[key] = list(zip(*(column.tolist() for column in own), strict=True))
    return found


def test_every_token_spells_the_version_it_is_said_to_have(policy, model):
    policy.update_weights(spelling_state_dict(model, 1))
    params = [f"prompt {i}" for i in range(18)]
    found, num_mixed = {}, 0
    with policy.collect(params, GREEDY, num_samples=2, groups_per_batch=3, max_staleness=2) as collector:
        for version, batch in enumerate(collector, start=1):
            assert policy.policy_version == version
            rows = tokens_of(batch)
            assert not found.keys() & rows.keys()
            found |= rows
            for tokens in rows.values():
                assert all(token == spelled_token(made) for token, made in tokens)
                assert version - min(made for _, made in tokens) <= 2
                num_mixed += len({made for _, made in tokens}) > 1
            if not isinstance(policy.engine, AsyncLLM):
                for _ in range(7):
                    policy.engine.step()
            policy.update_weights(spelling_state_dict(model, version + 1))
    assert len(found) == 36 and collector.stats.num_regenerated == 0
    assert num_mixed > 0 or isinstance(policy.engine, AsyncLLM)


def test_without_updates_groups_are_those_of_a_rollout(policy):
    prompts = [f"prompt {i}" for i in range(10)]
    whole = policy.rollout(prompts, SAMPLED, num_samples=3, seed=5, use_tqdm=False)
    for options in ({"max_staleness": 1}, {"max_staleness": None, "max_in_flight": 3}):
        found = {}
        for batch in policy.collect(prompts, SAMPLED, num_samples=3, seed=5, groups_per_batch=4, **options):
            found |= tokens_of(batch)
        assert found == tokens_of(whole)


def test_oversampling_ends_the_others_wherever_the_engine_is(policy):
    prompts = [f"prompt {i}" for i in range(6)]
    every = tokens_of(policy.rollout(prompts, SAMPLED, num_samples=8, seed=5, use_tqdm=False))
    batch = policy.rollout(prompts, SAMPLED, num_samples=3, oversample=8, seed=5, use_tqdm=False)
    kept = tokens_of(batch)
    assert len(kept) == 18 and all(every[key] == tokens for key, tokens in kept.items())
    assert batch["num_dropped"].tolist() == [5] * 18


def test_leaving_early_leaves_nothing_in_flight(policy):
    with policy.collect(["a", "b"] * 20, SAMPLED, num_samples=2, groups_per_batch=2, max_staleness=4) as collector:
        next(collector)
        assert collector.stats.num_running > 0

    def fail(group):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        next(policy.collect(["a", "b"] * 20, SAMPLED, groups_per_batch=2, max_staleness=4, on_group=fail))


@pytest.mark.slow
def test_a_replica_that_is_killed_loses_no_sample_of_a_collector(checkpoint, model):
    prompts = [f"prompt {i}" for i in range(40)]
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    with RolloutPolicy.from_pretrained(checkpoint, num_replicas=2, **OPTIONS) as policy:
        whole = tokens_of(policy.rollout(prompts, long, num_samples=2, seed=5, use_tqdm=False))
        found = {}
        collector = policy.collect(prompts, long, num_samples=2, seed=5, groups_per_batch=8, max_staleness=1)
        for batch in collector:
            found |= tokens_of(batch)
            if len(found) == 16:
                [first, *_] = policy.frontend.client.replicas()
                os.kill(first.pid, signal.SIGKILL)
        assert found == whole


@pytest.mark.slow
def test_updates_that_a_trainer_pushes_meanwhile_keep_every_batch_fresh(checkpoint, model):
    with RolloutPolicy.from_pretrained(checkpoint, num_replicas=2, **OPTIONS) as policy:
        policy.update_weights(spelling_state_dict(model, 1))
        ended = threading.Event()

        def push():
            version = 1
            while not ended.wait(0.05):
                version += 1
                policy.update_weights(spelling_state_dict(model, version))

        thread = threading.Thread(target=push)
        thread.start()
        try:
            prompts, found, num_mixed = [f"prompt {i}" for i in range(60)], {}, 0
            long = GREEDY.clone(max_tokens=200)
            collector = policy.collect(prompts, long, num_samples=2, groups_per_batch=4, max_staleness=3)
            for batch in collector:
                rows = tokens_of(batch)
                assert not found.keys() & rows.keys()
                found |= rows
                for tokens in rows.values():
                    assert all(token == spelled_token(made) for token, made in tokens)
                    # 3 behind the live version; one replica may have committed the next one before the other has
                    assert max(made for _, made in tokens) - min(made for _, made in tokens) <= 3 + 1
                    num_mixed += len({made for _, made in tokens}) > 1
        finally:
            ended.set()
            thread.join()
        assert len(found) == 120 and num_mixed > 0
