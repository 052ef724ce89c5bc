"""One engine for each kind of client, over the same tiny model; each test runs over all and has to find the same."""

import time
from contextlib import ExitStack

import pytest

from rollout_engine import EngineConfig, LLMEngine
from rollout_engine.testing import tiny_checkpoint
from tests.conformance.clients import CLIENTS, MARKS, NOT_OVER_FLEETS
from tests.conformance.running import bring_back
from tests.integration.sample_extensions import Sample


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Requests of it may be so long that none ends before a test ends it, however slow the test is."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)


@pytest.fixture(scope="session")
def config(checkpoint):
    return EngineConfig(
        model=checkpoint,
        num_kv_blocks=2048,
        max_num_seqs=64,
        num_threads=1,
        worker_extensions=[Sample],
        log_stats=False,
    )


@pytest.fixture(scope="session", params=[pytest.param(kind, marks=MARKS.get(kind, ())) for kind in CLIENTS])
def kind(request):
    return request.param


@pytest.fixture(autouse=True)
def possible(request):
    """Skip what a kind of client says is not its own."""
    if "kind" in request.fixturenames and "fleet" in request.getfixturevalue("kind"):
        for test, why in NOT_OVER_FLEETS.items():
            if test in request.node.nodeid:
                pytest.skip(why)


@pytest.fixture(scope="session")
def engines():
    """Engines that were started, by kind, for the tests of all files: starting a process takes longer than most."""
    with ExitStack() as at_end:
        yield {}, at_end


@pytest.fixture(scope="session")
def shared(kind, config, engines):
    started, at_end = engines
    if kind not in started:
        started[kind] = LLMEngine.from_client(at_end.enter_context(CLIENTS[kind](config)))
    return started[kind]


@pytest.fixture
def engine(shared):
    """An engine over one kind of client, found running and empty, and to be left so."""
    yield shared
    left = what_is_left(shared)
    bring_back(shared)
    assert left == {}


@pytest.fixture(scope="session")
def found_before():
    return {}


@pytest.fixture
def same(request, kind, found_before):
    """Call it with what a test has found: it has to be equal over every kind of client."""

    def check(found):
        test = request.node.nodeid.replace(kind, "*")
        first_kind, expected = found_before.setdefault(test, (kind, found))
        assert found == expected, f"{kind} differs from {first_kind}"

    return check


def what_is_left(engine):
    """What an engine that should be idle and running holds, by name; what is about to end is given some seconds."""
    client, deadline = engine.frontend.client, time.monotonic() + 10
    while client.call("get_num_unfinished_requests", {}).result() and time.monotonic() < deadline:
        engine.step()
    engine.check_integrity()
    core = engine.get_metrics().core
    left = {
        "state": core.state.replace("RUNNING", ""),
        "requests": core.num_requests,
        "streams": len(engine.frontend.streams),
        "blocks": engine.get_cache_usage(),
        "calls": num_open_calls(client),
    }
    return {name: value for name, value in left.items() if value}


def num_open_calls(client):
    """Calls whose results have not come."""
    if hasattr(client, "driver"):
        return len(client.driver._waiting)
    sockets = [member.client._socket for member in client._members.values()] if hasattr(client, "_members") else None
    return sum(len(socket._calls._calls) for socket in sockets or [client._socket])
