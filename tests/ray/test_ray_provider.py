"""Replicas of a `RayProvider`: they start, die and end, and nothing of them is left.

Each test is a program of `scenarios.py`.
"""

import os
import signal
import sys

import pytest

from rollout_engine import ConfigError
from rollout_engine.fleet.ray.provider import RayProvider
from tests.ray.conftest import assert_nothing_left, start_program

pytestmark = pytest.mark.ray


def test_without_ray_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "rollout-engine\[ray\]"'):
        RayProvider()


@pytest.mark.slow
def test_two_replicas_start_at_once_and_compute_the_same(run_scenarios):
    run_scenarios("two_replicas_start_at_once_and_compute_the_same")


@pytest.mark.slow
def test_what_dies_or_hangs_is_noticed_and_leaves_nothing(run_scenarios):
    run_scenarios(
        "an_actor_that_is_killed_takes_its_core_with_it",
        "an_actor_that_is_killed_takes_a_stopped_core_with_it",
        "a_core_that_is_killed_is_noticed_and_another_takes_its_place",
        "a_core_that_hangs_is_noticed_and_ended",
        "an_actor_that_hangs_does_not_keep_its_replica",
    )


@pytest.mark.slow
def test_starts_that_are_refused_fail_or_are_given_up_leave_nothing(run_scenarios):
    run_scenarios(
        "what_does_not_fit_is_refused",
        "a_start_that_fails_leaves_nothing",
        "a_core_of_another_configuration_is_refused",
        "a_shutdown_ends_what_is_starting",
    )


@pytest.mark.slow
def test_connections_are_shared_and_wrong_addresses_refused(run_scenarios):
    run_scenarios("two_providers_share_a_connection", "addresses_of_no_cluster_are_refused")


@pytest.mark.slow
def test_a_node_that_cannot_import_the_library_is_told_so(run_scenarios):
    run_scenarios("a_node_that_cannot_import_the_library_is_told_so")


@pytest.mark.slow
def test_a_replica_on_another_node_is_reached_by_tcp_until_the_node_dies(run_scenarios):
    run_scenarios("a_replica_on_another_node_is_reached_by_tcp_until_the_node_dies")


@pytest.mark.slow
def test_a_program_that_is_killed_leaves_neither_actors_nor_cores(place, checkpoint):
    with start_program(place, checkpoint, "a_program_that_waits_to_be_killed") as program:
        for line in program.stdout:
            if line.startswith("pids "):
                os.kill(program.pid, signal.SIGKILL)
                break
    assert line.startswith("pids "), line
    assert_nothing_left(place)
