"""Ranks of one engine on the nodes of a Ray cluster. Each test is a program of `scenarios.py`."""

import sys

import pytest

from rollout_engine import LLM, ConfigError

pytestmark = pytest.mark.ray


def test_without_ray_the_error_names_what_needs_it(monkeypatch, checkpoint):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"executor='ray' needs Ray.*pip install \"rollout-engine\[ray\]\""):
        LLM(str(checkpoint), tensor_parallel_size=2, executor="ray", skip_tokenizer_init=True)


@pytest.mark.slow
def test_ranks_over_two_nodes_give_the_bits_of_one_process(run_scenarios):
    run_scenarios("ranks_over_two_nodes_give_the_bits_of_one_process")


@pytest.mark.slow
def test_a_rank_on_a_node_that_ends_is_named(run_scenarios):
    run_scenarios("a_rank_on_a_node_that_ends_is_named")


@pytest.mark.slow
def test_ranks_of_a_core_join_the_cluster_of_its_client(run_scenarios):
    run_scenarios("ranks_of_a_core_join_the_cluster_of_its_client")


@pytest.mark.slow
def test_ranks_that_find_no_room_are_refused(run_scenarios):
    run_scenarios("ranks_that_find_no_room_are_refused")


@pytest.mark.slow
def test_a_replica_on_ray_has_ranks_on_ray(run_scenarios):
    run_scenarios("a_replica_on_ray_has_ranks_on_ray")
