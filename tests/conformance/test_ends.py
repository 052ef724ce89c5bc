"""After shutdown and in a forked child: over every client every method raises, and whoever waits is told."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from rollout_engine import LLMEngine, SamplingParams
from rollout_engine.base.errors import EngineDeadError, LifecycleError
from rollout_engine.base.messages import EngineCoreRequest, UpdateOptions
from rollout_engine.engine.verbs import VERBS
from tests.conformance.clients import CLIENTS
from tests.conformance.running import ENDLESS, step_further, weights
from tests.conformance.scenarios import SCENARIOS
from tests.forking import in_fork

GONE = (LifecycleError, EngineDeadError)
REQUEST = EngineCoreRequest(
    prompt_token_ids=[5, 6], params=SamplingParams(max_tokens=3), max_tokens=3, seed=0, first_sequence_id=1 << 30
)


def methods_of(client):
    """Every method of a client that does something, and every verb that crosses."""
    verbs = {
        name: lambda name=name: client.call(name, VERBS[name].bind((), SCENARIOS[name].arguments)).result()
        for name in VERBS
    }
    return verbs | {
        "add_request": lambda: client.add_request(REQUEST),
        "update_weights": lambda: client.update_weights(weights(1), None, UpdateOptions(timeout=5)),
        "require_usable": client.require_usable,
    }


@pytest.mark.quick(1)
def test_after_shutdown_every_method_raises_and_whoever_waits_is_told(kind, config):
    with CLIENTS[kind](config) as client, ThreadPoolExecutor(2) as pool:
        engine = LLMEngine.from_client(client)
        engine.add_request("endless", "hello", ENDLESS)
        step_further(engine)
        waiting = [pool.submit(engine.wait_for_requests_to_drain), pool.submit(engine.sleep, mode="wait")]
        step_further(engine)
        client.shutdown()
        client.shutdown()
        for call in (*(each.result for each in waiting), engine.step, lambda: engine.add_request("next", "hello")):
            with pytest.raises(GONE):
                call()
        for name, call in methods_of(client).items():
            if name in VERBS and VERBS[name].after_shutdown:
                continue
            with pytest.raises(GONE, match=f"^{name}: .*DEAD|shut down"):
                call()
                pytest.fail(name)
        assert isinstance(client.dead_error, EngineDeadError)
        client.abort([0])


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_in_a_forked_child_every_method_raises_and_the_parent_goes_on(engine):
    client = engine.frontend.client
    engine.add_request("endless", "hello", ENDLESS)
    step_further(engine)
    touches = methods_of(client) | {"abort": lambda: client.abort([0]), "turn": lambda: client.turn(lambda: False)}

    def check():
        for name, touch in (touches | {"step": engine.step}).items():
            with pytest.raises(LifecycleError, match=f"belongs to process {os.getppid()}; this is process"):
                touch()
                pytest.fail(name)
        client.shutdown()

    in_fork(check)
    step_further(engine)
    engine.abort_request("endless", discard=True)
