"""What a core that dies leaves behind: its last steps and calls, or the stacks of a crash."""

import asyncio
import os
import signal

import pytest

from rollout_engine import AsyncLLM, EngineDeadError
from rollout_engine.process.post_mortem import StepLine, read_post_mortem
from tests.faults.deaths import ENDLESS, OPTIONS, wait_gone


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT])
def test_a_core_that_gets_a_signal_leaves_a_file_that_the_error_names(checkpoint, post_mortems, number):
    async def run(engine):
        async for output in engine.generate([5, 6], ENDLESS):
            if output.outputs[0].token_ids:
                os.kill(engine.frontend.client.pid, number)
                break
        with pytest.raises(EngineDeadError):
            while True:
                await engine.check_health()

    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        pid = engine.frontend.client.pid
        asyncio.run(run(engine))
        (path,) = post_mortems.iterdir()
        assert str(path) in str(engine.dead_error)
    wait_gone(pid, engine.address, 60)
    if number == signal.SIGTERM:
        header, *lines = read_post_mortem(path)
        assert "SIGTERM" in header.reason and any(isinstance(line, StepLine) for line in lines)
    else:
        assert "Fatal Python error" in path.read_text() and "in step" in path.read_text()


@pytest.mark.slow
def test_an_engine_that_is_shut_down_leaves_nothing(checkpoint, post_mortems):
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        pid = engine.frontend.client.pid
    wait_gone(pid, engine.address, 60)
    assert not post_mortems.exists()
