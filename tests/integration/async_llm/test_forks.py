"""Forked children of a process that has an engine in another one: an error at once, and the engine goes on."""

import asyncio
import os

import pytest

from rollout_engine import LifecycleError, RolloutPolicy, SamplingParams
from tests.forking import in_fork

SHORT = SamplingParams(max_tokens=4)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_is_refused_and_the_parent_goes_on(engine, last_of):
    policy = RolloutPolicy(engine)
    touches = {
        "generate": lambda: asyncio.run(last_of(engine, "hello", SHORT)),
        "check_health": lambda: asyncio.run(engine.check_health()),
        "do_log_stats": lambda: asyncio.run(engine.do_log_stats()),
        "rollout": lambda: policy.rollout(["hello"], SHORT, use_tqdm=False),
        "pause": policy.pause_generation,
        "update": lambda: policy.update_weights({}),
    }

    def check():
        for name, touch in touches.items():
            with pytest.raises(LifecycleError, match=f"belongs to process {os.getppid()}; this is process"):
                touch()
                pytest.fail(name)
        engine.shutdown()

    in_fork(check)
    assert os.path.exists(engine.address)
    assert asyncio.run(last_of(engine, "hello", SHORT)).finished
