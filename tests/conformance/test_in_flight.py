"""Every verb over a fleet of two with work in flight on both: one that any one replica answers is alike on all.

Replica 0 has one request, replica 1 has two. A verb without `combine` (`Verb.combine`) goes to one replica alone, so
its answer has to be that of each, and it must change none.
"""

import time
from contextlib import contextmanager

import msgspec
import pytest

from rollout_engine import LLMEngine
from rollout_engine.base.errors import DrainTimeoutError, RolloutEngineError
from rollout_engine.engine.verbs import VERBS
from rollout_engine.fleet.run.adapters import ADAPTER_VERBS
from tests.conformance.clients import CLIENTS
from tests.conformance.conftest import what_is_left
from tests.conformance.running import ENDLESS, bring_back, plain
from tests.conformance.scenarios import SCENARIOS, TRACES

KIND = "fleet of two"
NAMES = [name for name, verb in VERBS.items() if verb.crosses]
LOADS = (1, 2)
ONE_IDLE = {"wait_for_requests_to_drain", "reset_prefix_cache", "get_cache_usage"}
"""Verbs that are played with nothing in flight on replica 0, which would answer another way than the fleet."""
ARGUMENTS = {"wait_for_requests_to_drain": {"drain_timeout": 0.3}}
BEFORE = {
    "resume_generation": lambda engine: engine.pause_generation(mode="keep"),
    "wake_up": lambda engine: engine.sleep(),
    "is_paused": lambda engine: call_one(engine, 0, "pause_generation"),
    "is_sleeping": lambda engine: call_one(engine, 1, "sleep"),
    "stop_profile": lambda engine: engine.start_profile(TRACES.name),
    "remove_lora": lambda engine: engine.add_lora(SCENARIOS["add_lora"].arguments["lora_request"]),
    "pin_lora": lambda engine: engine.add_lora(SCENARIOS["add_lora"].arguments["lora_request"]),
}
"""Verb -> what is done to the fleet before it is called."""
RESULTS = {
    "is_paused": lambda engine, result: result is False,  # one of the two runs
    "is_sleeping": lambda engine, result: result is True,
    "wait_for_requests_to_drain": lambda engine, result: isinstance(result, DrainTimeoutError),
    "reset_prefix_cache": lambda engine, result: result is False,
    "get_num_unfinished_requests": lambda engine, result: result == 3,
    "check_health": lambda engine, result: result.num_unfinished_requests == 3,
    "get_core_metrics": lambda engine, result: (result.num_requests, result.num_running) == (3, 3),
    "get_cache_usage": lambda engine, result: 0 < result < 1,
    "collective_rpc": lambda engine, result: len(result) == 2,
    "start_profile": lambda engine, result: len(engine.stop_profile()) == 2,
    "stop_profile": lambda engine, result: len(result) == 2,
}
"""Verb -> whether its result is that of the whole fleet."""
UNSEEN = {
    "check_integrity": "it changes nothing and returns nothing",
    "add_kept_samples": "these engines draft nothing, so that they keep none",
    "get_kept_samples": "these engines draft nothing, so that they keep none",
    "meet_kv_peers": "these engines have no KV connector",
    "reset_mm_cache": "it changes no result and returns nothing",
    "reset_encoder_cache": "it changes no result and returns nothing",
}
"""Verbs of which this file would not notice that `combine` is missing, and why."""
CALLED_ONCE = {"save_sharded_state": "replicas of one machine would write the same files"}
"""Verbs that are not called again on each replica, and why."""


@pytest.fixture
def fleet(engines, config):
    """An engine over a fleet of two, found running and empty, and to be left so."""
    started, at_end = engines
    if KIND not in started:
        started[KIND] = LLMEngine.from_client(at_end.enter_context(CLIENTS[KIND](config)))
    engine = started[KIND]
    yield engine
    bring_back(engine)
    assert what_is_left(engine) == {}


@pytest.mark.quick(1)
@pytest.mark.parametrize("verb", NAMES)
def test_a_verb_answers_for_a_whole_fleet_at_work(fleet, verb):
    check(fleet, verb)


@pytest.mark.quick(1)
@pytest.mark.parametrize("verb", [name for name in NAMES if VERBS[name].combine and name not in UNSEEN])
def test_a_verb_that_lacks_combine_is_noticed(fleet, verb, monkeypatch):
    monkeypatch.setitem(VERBS, verb, msgspec.structs.replace(VERBS[verb], combine=None))
    with pytest.raises((AssertionError, RolloutEngineError)):
        check(fleet, verb)


def check(engine, verb):
    """Call a verb of a fleet at work. AssertionError if it has reached one replica and not the other."""
    arguments = VERBS[verb].bind((), SCENARIOS[verb].arguments | ARGUMENTS.get(verb, {}))
    with at_work(engine, (0, 2) if verb in ONE_IDLE else LOADS):
        BEFORE.get(verb, lambda engine: None)(engine)
        before = states(engine)
        result = outcome(engine.frontend.client.call(verb, arguments))
        after = states(engine)
        changes = [
            {key: now[key] for key in now if now[key] != then[key]} for then, now in zip(before, after, strict=True)
        ]
        assert changes[0] == changes[1], f"{verb} has changed one replica alone: its row of the table lacks `combine`"
        assert RESULTS.get(verb, lambda *_: True)(engine, result), f"{verb} has answered {result} for the fleet"
        if VERBS[verb].combine is None and verb not in {*ADAPTER_VERBS, *CALLED_ONCE}:
            each = outcome(engine.frontend.client.calls.on_each(verb, arguments))
            found = [each] * 2 if isinstance(each, RolloutEngineError) else each.values()
            assert list(map(plain, found)) == [plain(result)] * 2, f"{verb}: replicas differ; give it `combine`"


@contextmanager
def at_work(engine, loads):
    """Requests that compute, `loads` of them on each replica; aborted in the end."""
    frontend, calls = engine.frontend, engine.frontend.client.calls
    streams = [
        frontend.add_request("hello", ENDLESS, None, lambda stream: None, replica_index=index)
        for index, count in enumerate(loads)
        for _ in range(count)
    ]
    try:
        deadline = time.monotonic() + 60
        while [each.num_running for each in calls.on_each("get_core_metrics", {}).result().values()] != [*loads]:
            assert time.monotonic() < deadline, "the requests do not run"
        yield
    finally:
        for stream in streams:
            frontend.close(stream)


def states(engine):
    """What verbs may change of each replica, by name."""
    calls = engine.frontend.client.calls
    health, adapters, asleep = (
        calls.on_each(verb, {}).result().values() for verb in ("check_health", "list_loras", "is_sleeping")
    )
    return [
        {
            "state": one.state,
            "requests": one.num_unfinished_requests,
            "version": one.policy_version,
            "adapters": [(lora.name, lora.revision, lora.is_pinned) for lora in loras],
            "asleep": sleeps,
        }
        for one, loras, sleeps in zip(health, adapters, asleep, strict=True)
    ]


def outcome(call):
    """The result of a call, or its error."""
    try:
        return call.result(60)
    except RolloutEngineError as error:
        return error


def call_one(engine, index, verb):
    """Call a verb on one replica, past the fleet."""
    arguments = VERBS[verb].bind((), {})
    return engine.frontend.client.calls.on_one(index, verb, arguments).result(60)
