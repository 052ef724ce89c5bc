"""Services on Ray: what dies, hangs or is far costs no token, and nothing is left. Each test is a program."""

import pytest

pytestmark = pytest.mark.ray


def test_a_service_takes_weights_and_answers(run_scenarios):
    run_scenarios("a_service_of_one_replica_takes_weights_and_answers")


@pytest.mark.slow
def test_a_service_loses_a_replica_and_not_a_token(run_scenarios):
    run_scenarios("a_service_loses_a_replica_and_not_a_token")


@pytest.mark.slow
def test_a_service_does_what_an_engine_does(run_scenarios):
    run_scenarios(
        "one_replica_on_ray_is_a_fleet_too",
        "calls_reach_all_replicas_of_a_service",
        "a_service_grows_and_shrinks_under_load",
        "a_policy_on_ray_rolls_out_the_same",
    )


@pytest.mark.slow
def test_kills_and_hangs_cost_no_token(run_scenarios):
    run_scenarios(
        "twenty_kills_under_load_lose_and_repeat_nothing",
        "a_core_that_hangs_costs_no_token",
        "an_actor_that_is_killed_costs_no_token",
    )


@pytest.mark.slow
def test_calls_whose_answers_are_lost_are_reconciled(run_scenarios):
    run_scenarios("calls_whose_answers_are_lost_are_reconciled")


@pytest.mark.slow
def test_two_nodes_have_the_same_weights_and_lose_no_token(run_scenarios):
    run_scenarios(
        "weights_are_copied_once_to_each_node",
        "a_path_is_read_by_each_node_itself",
        "a_node_that_dies_costs_no_token",
        "kills_on_another_node_lose_nothing",
    )
