"""Every kind of `EngineClient`: what any of them does, all do. A new kind gets a line in `CLIENTS`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from rollout_engine.engine.local_client import LocalClient
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.process.process_client import ProcessClient


@contextmanager
def started(start, *args) -> Iterator:
    """A client that ends with the block."""
    client = start(*args)
    try:
        yield client
    finally:
        client.shutdown()


@contextmanager
def connected(config) -> Iterator[ProcessClient]:
    """The second client of a core."""
    with started(ProcessClient.start, config) as owner, started(ProcessClient.connect, owner.address) as client:
        yield client


CLIENTS = {
    "turned by its caller": partial(started, LocalClient.start),
    "own thread": partial(started, partial(LocalClient.start, own_thread=True)),
    "own process": partial(started, ProcessClient.start),
    "connected": connected,
    "fleet of two": partial(started, partial(FleetClient.start, num_replicas=2)),
}
"""Name -> a context manager of a client of a new engine: `CLIENTS[name](config)`."""
MARKS = {"connected": [pytest.mark.slow], "fleet of two": [pytest.mark.slow]}
_NO_REPLICA_ASKED = "a fleet knows its adapters, and asks no replica"
_RANKS = "it expects the result of one rank, and a fleet's are those of all replicas"
_ONE_CORE = 'it looks into one core; a fleet\'s are looked into one by one, as "own process"'
NOT_OVER_FLEETS = {
    "-updating]": "a fleet takes weights by update_weights alone",
    "test_verbs.py::test_a_verb_does_the_same_over_every_client[fleet of two-collective_rpc]": _RANKS,
    "test_verbs.py::test_a_verb_does_the_same_over_every_client[fleet of two-get_cache_usage]": "it is the mean of two",
    "test_a_slow_call_is_late": _RANKS,
    "test_an_update_by_calls_that_cannot_begin": "a fleet takes weights by update_weights alone",
    "test_an_interrupted_update_ends_on_both_sides": _RANKS,
    "test_an_update_whose_task_is_cancelled_ends_on_both_sides": _RANKS,
    "test_a_call_that_finds_no_thread_fails_alone": _ONE_CORE,
    "test_a_call_that_is_cancelled_before_it_begins": _RANKS,
    "test_cancelled_calls_leave_nobody_waiting": _ONE_CORE,
    "test_a_call_that_is_late_leaves_nobody_waiting[fleet of two-sleep]": "the replica without requests sleeps at once",
    "test_a_call_that_is_late_leaves_nobody_waiting[fleet of two-remove_lora]": _NO_REPLICA_ASKED,
    "test_a_call_that_is_late_leaves_nobody_waiting[fleet of two-pin_lora]": _NO_REPLICA_ASKED,
    "test_a_call_that_is_late_leaves_nobody_waiting[fleet of two-list_loras]": _NO_REPLICA_ASKED,
    "test_a_deadline_is_a_number_of_seconds[fleet of two-1e+300]": _RANKS,
    "test_verbs.py::test_a_verb_does_the_same_over_every_client[fleet of two-pause_generation]": "each replica pauses",
    "test_every_kind_of_source_brings_the_same_weights[fleet of two-part]": "a fleet is sent all weights first",
    "test_refused_weights_change_nothing[fleet of two-change8": "a fleet has one transport, and says so otherwise",
    "test_a_failure_in_place_is_dirty": "a partial update of a fleet is staged like any other",
}
"""Part of a test's id -> why it does not run over a fleet."""
