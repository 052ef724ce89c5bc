"""Every verb in every state: it works, or raises an error that names state and verb; the same over every client."""

import re

import pytest

from rollout_engine.base.errors import DirtyWeightsError, LifecycleError, RequestError
from rollout_engine.engine.verbs import VERBS
from sync import make_sender
from tests.conformance.running import ENDLESS, bring_back, step_further, weights
from tests.conformance.scenarios import ADAPTER, SCENARIOS


def freeze(engine):
    engine.add_request("frozen", "hello", ENDLESS)
    step_further(engine)
    engine.pause_generation(mode="keep")


def forget_weights(engine):
    engine.sleep(level=2)
    engine.wake_up()


def begin_update(engine):
    sender = make_sender("inproc")
    manifest = sender.offer(weights(1), engine.policy_version + 1, engine.get_model_metadata())
    assert engine.collective_rpc("begin_weight_update", args=[manifest]) == [True]
    sender.close()


STATES = {
    "paused": (lambda engine: engine.pause_generation(), r"PAUSED\(abort\)"),
    "frozen": (freeze, r"PAUSED\(keep\)"),
    "asleep": (lambda engine: engine.sleep(), "ASLEEP"),
    "dirty": (forget_weights, "weights are incomplete"),
    "updating": (begin_update, "UPDATING"),
}
"""Name -> how an engine comes to it, and how errors say it."""
_PUBLIC_NAMES = {"update_lora": "update_weights", "call_function": "collective_rpc"}
"""Verb -> the method that users call for it, where that has another name."""


@pytest.mark.quick(6)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_works_or_names_the_state_that_forbids_it(engine, same, state, verb, tmp_path):
    enter, name = STATES[state]
    row = SCENARIOS[verb]
    arguments = row.arguments | ({"path": tmp_path / "state"} if verb == "save_sharded_state" else {})
    if verb == "pin_lora":
        engine.add_lora(ADAPTER)
    enter(engine)
    if verb == "stop_profile":
        engine.start_profile(tmp_path)
    try:
        error = error_of(engine, verb, arguments)
    finally:
        bring_back(engine)
    if error is not None and "functions do not cross processes" in str(error):
        assert not VERBS[verb].crosses
        return
    assert (error is not None) == (state in row.refused_in), error
    if error is not None:
        called = row.arguments.get("verb", _PUBLIC_NAMES.get(verb, verb))
        assert re.search(name, str(error)) and str(error).startswith(called)
    same(error and (type(error).__name__, str(error)))


def error_of(engine, verb, arguments):
    """What a call raises of what a state may forbid; None: it works."""
    try:
        engine.frontend.client.call(verb, VERBS[verb].bind((), arguments)).result()
    except (LifecycleError, DirtyWeightsError) as error:
        return error
    except RequestError as error:
        assert "takes no pictures" in str(error)  # nor does it in any other state
    return None
