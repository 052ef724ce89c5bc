"""The replicas of a fleet, as a policy over it has them."""

import asyncio

import pytest

from rollout_engine import AsyncLLM, LifecycleError, RolloutPolicy
from tests.unit.fake_engine import make_engine
from tests.unit.fleet.fake_fleet import make_service
from tests.unit.fleet.test_service import eventually


@pytest.fixture
def service():
    service, _ = make_service()
    with service:
        yield service


def test_a_policy_over_a_fleet_sees_scales_and_restarts_its_replicas(service):
    policy = RolloutPolicy(service)
    assert [each.state for each in policy.replicas()] == ["SYNCED"] * 2
    before = [each.pid for each in policy.replicas()]
    policy.restart_replicas()
    assert not set(before) & {each.pid for each in policy.replicas()}
    policy.scale(1)
    eventually(lambda: [each.state for each in policy.replicas()] == ["SYNCED", "DEAD"])
    assert policy.replicas()[1].pid is None
    assert policy.replicas() == service.replicas() == asyncio.run(AsyncLLM.from_engine(service).replicas())


def test_a_policy_over_one_engine_has_no_replicas():
    policy = RolloutPolicy(make_engine())
    for call in (policy.replicas, policy.restart_replicas, lambda: policy.scale(2)):
        with pytest.raises(LifecycleError, match="This engine has no replicas: make it with num_replicas=2"):
            call()
