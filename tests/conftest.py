"""Shared by all tests: fixed seeds, one thread unless a test asks for more, nothing left behind."""

import contextlib
import gc
import hashlib
import os
import signal
from collections import defaultdict
from types import SimpleNamespace

os.environ["HF_HUB_OFFLINE"] = "1"  # no test needs the hub, and one without a network would wait for it

import pytest
import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    # Triton asks when it is first imported, and transformers, which modules of ours import, does that.
    os.environ["TRITON_INTERPRET"] = "1"

from rollout_engine.kernels.cpu.gemm import supports
from rollout_engine.kernels.linear import _plan
from rollout_engine.text.input_processor import InputProcessor
from tests.draws import DRAWS, USUAL_NEXT_SEED
from tests.warm_cores import WarmCores

# An example may take as long as a busy machine makes it take.
settings.register_profile("any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any speed")

# A shell ignores SIGINT for what it runs in the background, and a child process inherits that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow all cases of a test but those that its mark `quick` leaves: some, the same ones on each day."""
    cases = defaultdict(list)
    for item in items:
        if (mark := item.get_closest_marker("quick")) and not item.get_closest_marker("slow"):
            cases[item.path, item.originalname, mark.args[0]].append(item)
    for (_, _, number), some in cases.items():
        # By digests, since neighbours in a list of cases are alike.
        for item in sorted(some, key=lambda case: hashlib.sha256(case.name.encode()).digest())[number:]:
            item.add_marker("slow")


def pytest_collection_finish():
    """No collection of garbage walks the modules and tests, millions of objects, again."""
    gc.freeze()


def pytest_runtest_setup(item):
    DRAWS.begin(item.nodeid)


@pytest.fixture(autouse=True, scope="session")
def draws_by_test():
    """Requests without a seed draw by their test's name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InputProcessor, "next_seed", DRAWS.as_method())
        yield


@pytest.fixture
def usual_draws(monkeypatch):
    """Requests without a seed draw as those of users do, by the engine's seed and their number."""
    monkeypatch.setattr(InputProcessor, "next_seed", USUAL_NEXT_SEED)


@pytest.fixture(autouse=True, scope="session")
def quick_starts():
    """Engines in process start without a collection of garbage: a thousand of them start here, and each takes 0.4 s.

    Nor do they freeze what is there; at its end one would give back what the tests themselves have frozen.
    """
    with pytest.MonkeyPatch.context() as patch:
        quick = SimpleNamespace(collect=lambda: 0, freeze=lambda: None, unfreeze=lambda: None)
        patch.setattr("rollout_engine.engine.local_client.gc", quick)
        yield


@pytest.fixture(autouse=True, scope="session")
def warm_cores():
    """Cores' processes are forked from one that has imported everything: a hundred of them start here, and each would
    import for seconds. Those of tests/faults are started as users' are."""
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(WarmCores()) as cores:
        patch.setattr("rollout_engine.process.core_launcher._start", cores.start)
        yield


@pytest.fixture(scope="module")
def own_products():
    """Products of this process by our own kernel, which the compiled layers need, where the library's are faster."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rollout_engine.kernels.cpu.gemm.is_fast", supports)
        _plan.cache_clear()
        yield
    _plan.cache_clear()


@pytest.fixture(autouse=True)
def fixed_state():
    """Seeded, single-threaded (several threads on a busy machine wait for one another), and restored afterwards."""
    torch.manual_seed(DRAWS.torch_seed())
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def some_of(pytestconfig):
    """A function: so many random cases; a quarter of them where slow tests are left out."""
    divisor = 4 if pytestconfig.option.markexpr == "not slow" else 1
    return lambda number: number // divisor


@pytest.fixture
def thread_count():
    """A function that sets torch's thread count for the rest of the test."""
    return torch.set_num_threads
