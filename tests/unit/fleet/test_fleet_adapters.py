"""Changes of a fleet's adapters over replicas that only note what they are told."""

import threading
from types import SimpleNamespace

import pytest

from rollout_engine.base.errors import (
    EngineDeadError,
    LifecycleError,
    RequestError,
    RetryableError,
    TransferTimeoutError,
)
from rollout_engine.base.lora_request import LoRAInfo
from rollout_engine.engine.calls import CallFuture
from rollout_engine.engine.verbs import VERBS
from rollout_engine.fleet.run.adapters import FleetAdapters
from rollout_engine.testing import random_adapter, tiny_model


class Replica:
    """A replica that takes every adapter, or raises `error` at the verb `fails`."""

    def __init__(self, index):
        self.index, self.client, self.updating = index, self, threading.Lock()
        self.num_adapter_changes = 0
        self.loras, self.version, self.fails, self.error = [], 0, None, LifecycleError("it sleeps")
        self.on_commit = lambda: None

    def call(self, name, arguments):
        future = CallFuture()
        if name == self.fails:
            future.fail(self.error)
        elif name == "stage_lora":
            request = arguments["lora_request"]
            digest = str(float(next(iter(request.tensors.values()))[0, 0]))
            future.succeed(LoRAInfo(request.name, request.revision, 8, 100, digest, self.version))
        elif name == "commit_loras":
            self.on_commit()
            self.loras, self.version = arguments["loras"], arguments["version"]
            future.succeed((0.5, 1))
        else:
            future.succeed(None)
        return future


class Rig:
    """A fleet's adapters over two replicas, and what the fleet is told of each change."""

    def __init__(self):
        self.members, self.ended, self.requests, self.is_over = {0: Replica(0), 1: Replica(1)}, [], [], False
        ledger = SimpleNamespace(entries=lambda: self.requests)
        self.brain = SimpleNamespace(policy_version=0, ledger=ledger)
        lock = threading.RLock()
        self.adapters = FleetAdapters(2, self.brain, self.members, lock, lambda: self.is_over, self.note)

    def note(self, members, reports, in_doubt):
        self.ended.append((sorted(reports), sorted(in_doubt)))
        if reports:
            self.brain.policy_version = next(iter(reports.values())).version

    def call(self, name, *args, **options):
        return self.adapters.call(name, VERBS[name].bind(args, options)).result(20)

    def add(self, name, seed=0, revision=0):
        return self.call("add_lora", random_adapter(tiny_model(), name, seed=seed, revision=revision))


@pytest.fixture
def rig():
    return Rig()


def uses(name, *, aborted=False):
    return SimpleNamespace(request=SimpleNamespace(lora=name), live={1: None}, aborted={1} if aborted else set())


def test_a_replica_that_catches_up_while_another_adapter_comes_still_lags(rig):
    rig.add("a")
    late = Replica(2)
    assert rig.adapters.lags(late)
    state = rig.adapters.state
    late.on_commit = lambda: rig.add("b")
    rig.adapters.restore(late, state)
    assert [info.name for info in late.loras] == ["a"]
    assert rig.adapters.lags(late) and rig.brain.policy_version == state.policy_version
    late.on_commit = lambda: None
    rig.adapters.restore(late, rig.adapters.state)
    assert [info.name for info in late.loras] == ["a", "b"] and not rig.adapters.lags(late)


def test_one_replica_that_fails_has_missed_the_change_and_lags(rig):
    rig.members[1].fails = "commit_loras"
    rig.add("a")
    assert rig.ended == [([0], [])]
    assert not rig.adapters.lags(rig.members[0]) and rig.adapters.lags(rig.members[1])


@pytest.mark.parametrize("verb", ["stage_lora", "commit_loras"])
@pytest.mark.parametrize(
    "error, expected, in_doubt",
    [
        (LifecycleError("it sleeps"), LifecycleError, []),
        (EngineDeadError("gone"), RetryableError, []),
        (MemoryError("full"), MemoryError, [0, 1]),
    ],
)
def test_where_every_replica_fails_nothing_has_changed(rig, verb, error, expected, in_doubt):
    first = rig.add("a")
    for member in rig.members.values():
        member.fails, member.error = verb, error
    with pytest.raises(expected):
        rig.add("a", seed=1, revision=1)
    assert rig.call("list_loras") == [first] and rig.brain.policy_version == 0
    assert rig.ended[1:] == ([([], in_doubt)] if verb == "commit_loras" else [])
    for member in rig.members.values():
        member.fails = None
    assert rig.add("a", seed=1, revision=1).policy_version == 1


def test_a_fleet_that_is_over_says_so(rig):
    rig.is_over = True
    for member in rig.members.values():
        member.fails, member.error = "stage_lora", EngineDeadError("shut down")
    with pytest.raises(EngineDeadError, match="shut down"):
        rig.add("a")


def test_an_adapter_stays_while_a_request_anywhere_uses_it(rig):
    rig.add("a")
    rig.requests = [uses("a"), uses("")]
    with pytest.raises(LifecycleError, match="1 unfinished requests use 'a'"):
        rig.call("remove_lora", "a")
    rig.add("b")
    rig.add("c")
    assert [info.name for info in rig.call("list_loras")] == ["a", "c"]
    rig.requests = [uses("a", aborted=True)]
    assert rig.call("remove_lora", "a") and [info.name for info in rig.members[0].loras] == ["c"]


def test_from_the_decision_on_no_request_may_name_what_gives_way(rig):
    def refused():
        with pytest.raises(RequestError, match="Unknown adapter 'a'"):
            rig.adapters.use("a")

    for name in "ab":
        rig.add(name)
    rig.adapters.use("a")
    rig.adapters.use("b")
    rig.members[0].on_commit = refused
    rig.add("c")
    assert [info.name for info in rig.members[1].loras] == ["b", "c"]


def test_the_values_of_the_fleet_do_not_change_with_the_trainers(rig):
    request = random_adapter(tiny_model(), "a")
    rig.call("add_lora", request)
    digest = rig.call("list_loras")[0].digest
    for tensor in request.tensors.values():
        tensor.zero_()
    late = Replica(2)
    rig.adapters.restore(late, rig.adapters.state)
    assert (
        late.loras[0].digest == digest and rig.adapters.state.values[digest].tensors[next(iter(request.tensors))].any()
    )


def test_an_update_of_weights_waits_for_a_change_and_holds_off_the_next(rig):
    with rig.adapters.unchanged(0.0):
        assert rig.adapters.is_changing
        with pytest.raises(TransferTimeoutError, match="adapters were still being changed"), rig.adapters.unchanged(0):
            pass
        waiting = rig.adapters.call("add_lora", VERBS["add_lora"].bind((random_adapter(tiny_model(), "a"),), {}))
        waiting.cancel()
        later = rig.adapters.call("add_lora", VERBS["add_lora"].bind((random_adapter(tiny_model(), "b"),), {}))
        assert not later.done()
    assert later.result(20).name == "b" and [info.name for info in rig.call("list_loras")] == ["b"]


def test_a_replica_that_somebody_else_updates_misses_the_change(rig, monkeypatch):
    monkeypatch.setattr("rollout_engine.fleet.run.adapters._CATCH_UP_SECONDS", 0.01)
    with rig.members[1].updating:
        rig.add("a")
    assert rig.members[1].loras == [] and rig.adapters.lags(rig.members[1])
