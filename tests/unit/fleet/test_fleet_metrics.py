"""Metrics of a fleet of fake models: each replica by itself, their sums, and replicas that are lost or silent."""

import threading
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from rollout_engine import EngineDeadError, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.engine.calls import CallFuture
from rollout_engine.fleet.plan.replica_state import ReplicaState
from rollout_engine.fleet.run import metrics as fleet_metrics
from rollout_engine.telemetry.prometheus import REPLICA_STATES, as_text, own_families
from tests.unit.fleet.fake_fleet import make_service

SHORT = SamplingParams(max_tokens=6, ignore_eos=True, seed=1)
LONG = SamplingParams(max_tokens=400, ignore_eos=True, seed=2, n=2)
PROMPTS = [[5 + i, 6, 7] for i in range(6)]


@pytest.fixture
def made():
    service, provider = make_service(strategies="round-robin")
    with service:
        yield service, provider


def eventually(condition):
    for _ in range(2000):
        if condition():
            return
        time.sleep(0.005)
    raise AssertionError("it did not come to that")


def scraped(metrics):
    """(family, label of the replica, other labels) -> value, of all that Prometheus is told."""
    text = as_text(own_families(metrics, {"engine": "0"})).decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert all(sample.labels.pop("engine") == "0" for sample in samples)
    return {(s.name.removeprefix("rollout_engine_"), *s.labels.values()): s.value for s in samples}


def test_each_replica_is_told_apart_and_the_sums_are_theirs(service):
    service.generate(PROMPTS, SHORT, use_tqdm=False)
    metrics = service.get_metrics()
    assert {index: each.core.counters.num_tokens_sampled for index, each in metrics.replicas.items()} == {0: 18, 1: 18}
    assert metrics.core.counters.num_tokens_sampled == 36
    seen = scraped(metrics)
    for index in "01":
        assert seen["replica_tokens_sampled_total", index] == 18
        assert seen["replica_policy_version", index] == 0
        assert seen["replica_answered", index] == seen["replica_running", index] == 1
        states = {state: seen["replica_state", index, state] for state in ReplicaState}
        assert states == dict.fromkeys(ReplicaState, 0) | {ReplicaState.SYNCED: 1}
    assert seen["tokens_sampled_total",] == 36


def test_every_state_of_a_replica_has_a_sample():
    assert REPLICA_STATES == tuple(ReplicaState)


def test_an_engine_without_replicas_has_none_of_their_families(service):
    metrics = service.get_metrics()
    metrics.replicas = {}
    assert not any(name.startswith("replica_") for name, *_ in scraped(metrics))


def test_loads_are_shown_while_requests_run(service, provider):
    for replica in provider.replicas.values():
        replica.executor.before_step = lambda: time.sleep(0.002)
    options = dict(args=(PROMPTS[:3], LONG), kwargs=dict(use_tqdm=False))
    reader = threading.Thread(target=service.generate, **options)
    reader.start()
    eventually(lambda: service.get_metrics().core.num_running == 6)
    metrics = service.get_metrics()
    reader.join()
    assert sorted(each.num_requests for each in metrics.replicas.values()) == [1, 2]
    assert sorted(each.core.num_running for each in metrics.replicas.values()) == [2, 4]
    assert all(each.core.cache_usage > 0 for each in metrics.replicas.values())
    assert sum(each.num_kv_tokens for each in metrics.replicas.values()) == 3 * (3 + 2 * 400)
    assert metrics.core.num_requests == 3
    assert [each.num_requests for each in service.get_metrics().replicas.values()] == [0, 0]


def test_a_lost_replica_is_shown_as_such_and_no_counter_goes_back(service, provider):
    service.generate(PROMPTS, SHORT, use_tqdm=False)
    before = service.get_metrics()
    provider.starts = False
    provider.replicas[1].kill()
    eventually(lambda: service.get_metrics().replicas[1].state == "STARTING")
    lost = service.get_metrics()
    one = lost.replicas[1]
    assert not one.has_answered and one.core.policy_version == -1 and one.core.num_running == 0
    assert one.core.counters == before.replicas[1].core.counters
    assert lost.core.counters.num_tokens_sampled == 36 and lost.core.state == "RUNNING"
    assert scraped(lost)["replica_running", "1"] == 0 and scraped(lost)["running",] == 1
    provider.starts = True
    eventually(lambda: service.health()[1].state == "SYNCED")
    service.generate(PROMPTS, SHORT, use_tqdm=False)
    after = service.get_metrics()
    assert after.core.counters.num_tokens_sampled == 72
    assert after.replicas[1].has_answered and after.replicas[1].core.counters.num_tokens_sampled > 18


def test_a_replica_that_was_scaled_away_stays_in_the_sums(service):
    service.generate(PROMPTS, SHORT, use_tqdm=False)
    service.get_metrics()
    service.scale(1)
    eventually(lambda: service.get_metrics().replicas[1].state == "DEAD")
    metrics = service.get_metrics()
    assert metrics.core.counters.num_tokens_sampled == 36 and not metrics.replicas[1].has_answered


def test_without_a_living_replica_the_metrics_still_come(service, provider):
    service.generate(PROMPTS, SHORT, use_tqdm=False)
    for replica in provider.replicas.values():
        replica.executor.before_step = lambda: time.sleep(0.002)
    reader = threading.Thread(target=service.generate, args=(PROMPTS[:2], LONG), kwargs=dict(use_tqdm=False))
    reader.start()
    eventually(lambda: service.get_metrics().core.num_running == 4)
    provider.starts = False
    for replica in list(provider.replicas.values()):
        replica.kill()
    eventually(lambda: not any(each.pid for each in service.health()))
    metrics = service.get_metrics()
    assert metrics.core.num_waiting == 4 and metrics.core.num_running == 0, "samples that wait for a replica"
    assert metrics.core.state == "STARTING" and metrics.core.policy_version == 0
    assert metrics.core.num_requests == 2 and metrics.core.counters.num_tokens_sampled > 36
    provider.starts = True
    reader.join()


@pytest.mark.parametrize("timeout", [None, 0.01])
def test_a_replica_that_does_not_answer_is_shown_with_what_it_told_last(service, provider, monkeypatch, timeout):
    service.generate(PROMPTS, SHORT, use_tqdm=False)
    service.get_metrics()
    service.generate(PROMPTS, SHORT, use_tqdm=False)
    if timeout is None:
        monkeypatch.setattr(fleet_metrics, "ANSWER_SECONDS", 0.05)
    asked = []

    def call(name, arguments):
        asked.append(CallFuture())
        return asked[-1]

    monkeypatch.setattr(provider.replicas[1].client, "call", call)
    metrics = service.get_metrics(timeout=timeout)
    assert not metrics.replicas[1].has_answered and scraped(metrics)["replica_answered", "1"] == 0
    assert metrics.replicas[1].state == "SYNCED"
    assert metrics.replicas[1].core.counters.num_tokens_sampled == 18
    assert asked[-1].cancelled(), "the late call is taken back"


def test_metrics_of_an_earlier_moment_do_not_replace_later_ones(service):
    service.generate(PROMPTS, SHORT, use_tqdm=False)
    client = service.frontend.client
    early = client.metrics()[1][0].core
    service.generate(PROMPTS, SHORT, use_tqdm=False)
    late = client.metrics()[1][0].core
    counts = client._metrics._counts[0]
    counts.note(counts.member, early)
    assert counts.total == late.counters


def test_a_wrong_timeout_and_a_dead_fleet_are_errors(service, provider):
    with pytest.raises(RequestError, match="timeout"):
        service.get_metrics(timeout="soon")
    service.scale(1)
    eventually(lambda: service.get_metrics().replicas[1].state == "DEAD")
    service.frontend.client._dispatcher.fail_all(EngineDeadError("The fleet is dead."))
    with pytest.raises(EngineDeadError):
        service.get_metrics()
