"""A core's process is killed, stopped, told to end, or loses its parent: everybody is told, and nothing is left."""

import asyncio
import os
import signal
import time

import psutil
import pytest

from rollout_engine import AsyncLLM, ConfigError, EngineConfig, EngineDeadError, SamplingParams
from rollout_engine.frontend.lifeline import CoreProcess, lock_directory, sweep_stale_directories
from tests.faults.deaths import OPTIONS, kill_parent, wait_gone

LONG = SamplingParams(max_tokens=1900, ignore_eos=True)


async def drain(engine, prompt):
    return [output async for output in engine.generate(prompt, LONG)][-1]


async def run_long(engine, count):
    """Start `count` requests and return their tasks once all of them are computed."""
    tasks = [asyncio.create_task(drain(engine, [5, 6 + i])) for i in range(count)]
    while (await engine.get_metrics()).core.num_running < count:
        await asyncio.sleep(0.01)
    return tasks


async def all_dead(engine, tasks, limit):
    """Every task raises `EngineDeadError`, the last at most `limit` seconds after the call."""
    start = time.perf_counter()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.perf_counter() - start
    assert {type(result) for result in results} == {EngineDeadError}
    assert len(set(map(id, results))) == len(results), "each request raises an error of its own"
    assert seconds < limit
    assert engine.errored and not engine.is_running
    with pytest.raises(EngineDeadError):
        await drain(engine, [5])
    with pytest.raises(EngineDeadError):
        await engine.check_health()
    return str(engine.dead_error)


def test_a_killed_core_and_a_stopped_one_fail_their_own_requests_and_no_others(checkpoint):
    config = EngineConfig(model=str(checkpoint), **OPTIONS)
    with (
        AsyncLLM.from_config(config, hang_seconds=60.0) as killed,
        AsyncLLM.from_config(config, hang_seconds=1.0) as stopped,
    ):
        killed_pid, stopped_pid = killed.remote.ready.pid, stopped.remote.ready.pid

        async def run():
            doomed, others = await run_long(killed, 16), await run_long(stopped, 16)
            os.kill(killed_pid, signal.SIGKILL)
            assert "status -9" in await all_dead(killed, doomed, limit=10.0)
            assert not any(task.done() for task in others)
            os.kill(stopped_pid, signal.SIGSTOP)
            assert "no sign of life" in await all_dead(stopped, others, limit=30.0)

        asyncio.run(run())
        wait_gone(killed_pid, killed.address, 60)
        wait_gone(stopped_pid, stopped.address, 60)


def test_a_core_told_to_end_gives_out_what_it_has_and_ends_once(checkpoint):
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        process = psutil.Process(engine.remote.ready.pid)

        async def run():
            with AsyncLLM.connect(engine.address) as other:
                tasks = await run_long(engine, 4)
                tasks.append(asyncio.create_task(drain(other, [9, 9])))
                while (await engine.get_metrics()).core.num_running < 5:
                    await asyncio.sleep(0.01)
                for _ in range(3):
                    process.send_signal(signal.SIGTERM)
                results = await asyncio.gather(*tasks)
                assert {result.outputs[0].finish_reason for result in results} == {"abort"}
                assert all(result.outputs[0].token_ids for result in results)
                while not (engine.errored and other.errored):
                    await asyncio.sleep(0.01)
                assert "SIGTERM" in str(engine.dead_error) and "SIGTERM" in str(other.dead_error)

        asyncio.run(run())
        wait_gone(process.pid, engine.address, 60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_core_does_not_outlive_its_parent(checkpoint, number):
    kill_parent(checkpoint, number)


def test_what_prevents_the_start_is_told_as_in_process(tmp_path, checkpoint):
    start = time.monotonic()
    before = set(psutil.Process().children())
    with pytest.raises(ConfigError, match="does-not-exist"):
        AsyncLLM(tmp_path / "does-not-exist", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="max_num_seq"):
        AsyncLLM("model", max_num_seq=3)
    with pytest.raises(EngineDeadError, match="not ready within"):
        AsyncLLM.from_config(EngineConfig(model=str(checkpoint), **OPTIONS), start_seconds=0.01)
    assert set(psutil.Process().children()) == before
    assert time.monotonic() - start < 60


def test_nobody_lives_in_an_empty_directory(tmp_path):
    with pytest.raises(EngineDeadError, match="No core lives in"):
        AsyncLLM.connect(str(tmp_path))


def test_only_directories_of_dead_engines_are_swept(tmp_path):
    names = ("rollout-engine-dead", "rollout-engine-live", "rollout-engine-new", "rollout-engine-empty", "other")
    stale, live, new, empty, other = (tmp_path / name for name in names)
    for path in (stale, live, new, empty, other):
        path.mkdir()
    for path in (stale, new, other):
        os.close(lock_directory(path))
    held = lock_directory(live)
    old = time.time() - 3600
    for path in (stale, live, empty, other):
        os.utime(path, (old, old))
    sweep_stale_directories(str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "rollout-engine-live", "rollout-engine-new"]
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
