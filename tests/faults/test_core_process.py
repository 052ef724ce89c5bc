"""A core's process is killed, stopped, told to end, or loses its parent: everybody is told, and nothing is left."""

import asyncio
import contextlib
import os
import signal
import time

import psutil
import pytest

from rollout_engine import AsyncLLM, ConfigError, EngineConfig, EngineDeadError, RetryableError, SamplingParams
from rollout_engine.process.core_launcher import CoreProcess
from sync.locked_directories import lock_directory, sweep_stale_directories
from tests.faults.deaths import ENDLESS, OPTIONS, kill_parent, wait_gone


async def drain(engine, prompt, begun=None):
    """How the request ended. `begun` is called when it has tokens."""
    async for output in engine.generate(prompt, ENDLESS):
        if begun is not None and output.outputs[0].token_ids:
            begun()
        last = output
    return last.outputs[0].finish_reason


async def run_endless(engine, count):
    """Start `count` requests that nobody ends, and return their tasks once all of them have tokens."""
    begun = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(drain(engine, [5, 6 + i], event.set)) for i, event in enumerate(begun)]
    for event in begun:
        await event.wait()
    return tasks


async def all_dead(engine, tasks):
    """Every task raises `EngineDeadError`; returns the reason that the engine gives."""
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} == {EngineDeadError}
    assert len(set(map(id, results))) == len(results), "each request raises an error of its own"
    assert engine.errored and not engine.is_running
    with pytest.raises(EngineDeadError):
        await drain(engine, [5])
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    return str(engine.dead_error)


@pytest.mark.slow
def test_a_killed_core_and_a_stopped_one_fail_their_own_requests_and_no_others(checkpoint):
    config = EngineConfig(model=str(checkpoint), **OPTIONS)
    with (
        AsyncLLM.from_config(config, hang_seconds=600.0) as killed,
        AsyncLLM.from_config(config, hang_seconds=600.0) as stopped,
    ):
        killed_pid, stopped_pid = killed.frontend.client.pid, stopped.frontend.client.pid

        async def run():
            doomed, others = await run_endless(killed, 16), await run_endless(stopped, 16)
            os.kill(killed_pid, signal.SIGKILL)
            assert "status -9" in await all_dead(killed, doomed)
            assert not any(task.done() for task in others)
            os.kill(stopped_pid, signal.SIGSTOP)
            # Only now: a busy machine may leave a core no time for as long.
            stopped.frontend.client._socket._hang_seconds = 1.0
            assert "no sign of life" in await all_dead(stopped, others)

        asyncio.run(run())
        wait_gone(killed_pid, killed.address, 60)
        wait_gone(stopped_pid, stopped.address, 60)


@pytest.mark.slow
def test_a_core_told_to_end_gives_out_what_it_has_and_ends_once(checkpoint):
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        process = psutil.Process(engine.frontend.client.pid)

        async def run():
            with AsyncLLM.connect(engine.address) as other:
                tasks = [*await run_endless(engine, 4), *await run_endless(other, 1)]
                process.send_signal(signal.SIGTERM)
                while (health := await engine.check_health()).state != "ENDING":
                    await asyncio.sleep(0.01)
                assert health.num_unfinished_requests == 5 and not health.is_ready
                with pytest.raises(RetryableError, match="about to end .*SIGTERM.*another engine"):
                    await drain(engine, [7])
                for _ in range(2):
                    with contextlib.suppress(psutil.NoSuchProcess):  # the first may have ended it by now
                        process.send_signal(signal.SIGTERM)
                assert await asyncio.gather(*tasks) == ["abort"] * 5
                while not (engine.errored and other.errored):
                    await asyncio.sleep(0.01)
                assert "SIGTERM" in str(engine.dead_error) and "SIGTERM" in str(other.dead_error)

        asyncio.run(run())
        wait_gone(process.pid, engine.address, 60)


@pytest.mark.slow
def test_a_core_told_to_end_lets_its_requests_end_first(checkpoint):
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        process = psutil.Process(engine.frontend.client.pid)
        params = SamplingParams(max_tokens=300, ignore_eos=True, detokenize=False, output_kind="delta")

        async def run():
            reasons = []
            async for output in engine.generate([5, 6], params):
                if not reasons:
                    process.send_signal(signal.SIGTERM)
                reasons.append(output.outputs[0].finish_reason)
            assert reasons[-1] == "length"
            while not engine.errored:
                await asyncio.sleep(0.01)
            assert "SIGTERM" in str(engine.dead_error)

        asyncio.run(run())
        wait_gone(process.pid, engine.address, 60)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_core_does_not_outlive_its_parent(checkpoint, number):
    kill_parent(checkpoint, number)


@pytest.mark.slow
def test_what_prevents_the_start_is_told_as_in_process(tmp_path, checkpoint):
    before = set(psutil.Process().children())
    with pytest.raises(ConfigError, match="does-not-exist"):
        AsyncLLM(tmp_path / "does-not-exist", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="max_num_seq"):
        AsyncLLM("model", max_num_seq=3)
    with pytest.raises(EngineDeadError, match="not ready within"):
        AsyncLLM.from_config(EngineConfig(model=str(checkpoint), **OPTIONS), start_seconds=0.01)
    assert set(psutil.Process().children()) == before


def test_nobody_lives_in_an_empty_directory(tmp_path):
    with pytest.raises(EngineDeadError, match="No core lives in"):
        AsyncLLM.connect(str(tmp_path))


def test_only_directories_of_dead_engines_are_swept(tmp_path):
    ages = dict(dead=3600, live=3600, new=0, empty=3600, starting=0, other=3600)
    paths = {name: tmp_path / (name if name == "other" else f"rollout-engine-{name}") for name in ages}
    for path in paths.values():
        path.mkdir(mode=0o700)
    for name in ("dead", "new", "other"):
        os.close(lock_directory(paths[name]))
    held = lock_directory(paths["live"])
    for name, age in ages.items():
        os.utime(paths[name], (time.time() - age,) * 2)
    sweep_stale_directories(str(tmp_path))
    assert {name for name, path in paths.items() if path.exists()} == {"live", "new", "starting", "other"}
    os.close(held)


@pytest.mark.parametrize(
    ("wishes", "spins"), [({}, "20000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_idle_threads_of_a_core_spin_briefly_unless_the_user_says_otherwise(checkpoint, monkeypatch, wishes, spins):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in wishes.items():
        monkeypatch.setenv(name, value)
    process = CoreProcess(
        EngineConfig(model=str(checkpoint), **OPTIONS), heartbeat_seconds=0.5, max_backlog_bytes=1 << 20
    )
    try:
        while not (environment := psutil.Process(process.pid).environ()):
            time.sleep(0.001)  # the kernel is still setting it up
    finally:
        process.end(kill=True)
    assert environment.get("GOMP_SPINCOUNT") == spins
    assert wishes.items() <= environment.items()
