"""Blocks of KV that engines of a Ray cluster share. Each test is a program of `scenarios.py`."""

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_blocks_are_shared_while_their_engines_live(run_scenarios):
    run_scenarios(
        "blocks_are_found_by_other_engines_until_their_engine_ends",
        "the_index_is_made_again_when_the_engine_that_made_it_is_killed",
        "an_engine_keeps_its_own_bound",
        "a_connector_without_its_cluster_is_a_miss",
        "a_cluster_that_is_none_is_refused",
    )


def test_blocks_cross_from_node_to_node(run_scenarios):
    run_scenarios("blocks_cross_from_node_to_node")
