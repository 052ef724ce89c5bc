"""Recorders are notified of everything that changes a core: an entry that is not marked fails here."""

from inspect import isfunction

import pytest

from rollout_engine.base.errors import RolloutEngineError
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.recorder import ENTRIES, Recorder, call_entry, plain_arguments

READS = {
    "can_progress",
    "cache_usage",
    "check_integrity",
    "has_unfinished_requests",
    "metrics",
    "num_draining",
    "num_using",
}
ARGUMENTS = {"abort_sequences": ([0],), "close_for_update": ("keep",), "commit_version": (1,)}


class Events(Recorder):
    def __init__(self):
        self.events = []

    def record_call(self, name, arguments, options):
        self.events.append((name, plain_arguments(name, arguments, options)))

    def record_request(self, request):
        self.events.append("request")

    def begin_step(self):
        self.events.append("begin")

    def record_schedule(self, work, rows, sampled):
        self.events.append(("schedule", work.step, len(rows), len(sampled)))

    def record_result(self, result, problem):
        self.events.append("result" if problem is None else str(problem))

    def end_step(self, ended, problem):
        self.events.append(("end", [end.finish_reason for end in ended], problem))


@pytest.fixture
def recorded(make_rig_in_turn):
    rig, events = make_rig_in_turn(), Events()
    rig.core.recorders.append(events)
    return rig, events.events


def test_every_public_method_of_the_core_is_recorded_or_changes_nothing():
    methods = {name for name, value in vars(EngineCore).items() if isfunction(value) and not name.startswith("_")}
    assert methods == {*ENTRIES, "step", "add_request"} | READS


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_a_call_of_an_entry_is_recorded_once_even_if_it_is_refused(recorded, name):
    rig, events = recorded
    rig.add("a")
    rig.step()
    events.clear()
    options = {"dirty": False} if name == "end_update" else {}
    try:
        getattr(rig.core, name)(*ARGUMENTS.get(name, ()), **options)
    except RolloutEngineError:
        pass
    assert [event[0] for event in events] == [name]


def test_arguments_are_recorded_in_the_order_of_the_parameters_and_call_the_entry_again(recorded):
    rig, events = recorded
    rig.core.pause(clear_cache=True, mode="keep")
    assert events == [("pause", ["keep", True])]
    rig.core.resume()
    call_entry(rig.core, *events[0])
    call_entry(rig.core, "resume", [])
    call_entry(rig.core, "pause", ["keep"])  # a file of an older release has no clear_cache
    assert events[2:] == [("pause", ["keep", True]), ("resume", []), ("pause", ["keep", False])]


def test_a_step_is_recorded_from_its_call_to_the_sequences_that_it_ended(recorded):
    rig, events = recorded
    rig.fail_at_steps.add(1)
    rig.add("a")
    rig.step()
    rig.step()
    assert events == [
        "request",
        *("begin", ("schedule", 0, 1, 1), "result", ("end", [], None)),
        *("begin", ("schedule", 1, 1, 1), "told to fail at step 1", ("end", ["error"], None)),
    ]


def test_a_refused_request_is_not_recorded(recorded):
    rig, events = recorded
    with pytest.raises(RolloutEngineError):
        rig.add("a", prompt=range(1_000))
    assert events == []
