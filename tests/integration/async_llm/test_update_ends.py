"""Weight updates of a core in another process that nobody completes, and what transports leave behind: nothing."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from rollout_engine import AsyncLLM, EngineDeadError, SamplingParams, errors
from rollout_engine.testing import tiny_model
from sync import make_sender, publish

ENDLESS = SamplingParams(max_tokens=30_000, ignore_eos=True, detokenize=False)
"""For a request that goes on until somebody ends it: a minute's work."""
SHARED = Path("/dev/shm")


def tiny_weights(seed):
    return tiny_model(seed=seed).state_dict()


def traces(engine):
    name = Path(engine.address).name
    return [path for parent in (SHARED, Path(engine.address)) for path in parent.glob(f"{name}-weights-*")]


async def ask(engine, name, **arguments):
    """Call a verb that no face has."""
    return await asyncio.wrap_future(engine.frontend.client.call(name, arguments))


async def begin_without_sending(engine, version, rendezvous, **options):
    """Open an update that waits for a sender that never comes."""
    manifest = make_sender("inproc").offer(tiny_weights(1), version, await engine.get_model_metadata())
    accepted = await ask(engine, "begin_weight_update", manifest=manifest, rendezvous=rendezvous, options=options)
    assert accepted is True


def test_the_end_of_a_refused_update_does_not_report_the_one_before(engine, tmp_path):
    publish(tmp_path, tiny_weights(0), engine.policy_version + 1)

    async def run():
        for options, refused in (({}, False), ({"timeout": -1.0}, True)):
            staged = ask(engine, "stage_weights", path=str(tmp_path), version=None, options=options)
            with pytest.raises(errors.RolloutEngineError) if refused else contextlib.nullcontext():
                await staged
        with pytest.raises(errors.LifecycleError, match="begun no update"):
            await ask(engine, "end_weight_update")

    async def run_ended():
        await ask(engine, "stage_weights", path=str(tmp_path), version=None, options={})
        assert (await ask(engine, "end_weight_update")).version == engine.policy_version

    asyncio.run(run_ended())
    asyncio.run(run())


def test_an_update_whose_sender_never_comes_keeps_others_out_and_ends_by_its_deadline(engine):
    """The core gives up, and the next update is taken."""
    rendezvous = {"transport": "gloo", "directory": engine.address}

    async def run():
        with AsyncLLM.connect(engine.address) as other:
            await begin_without_sending(other, 10**6, rendezvous | {"timeout": 3600.0, "number": 96}, timeout=3600.0)
            with pytest.raises(errors.LifecycleError, match="UPDATING"):
                await engine.update_weights(tiny_weights(1))
            await ask(other, "abort_weight_update")
            with pytest.raises(errors.WeightUpdateError):
                await ask(other, "end_weight_update")
            await begin_without_sending(other, 10**6, rendezvous | {"timeout": 1.0, "number": 99}, timeout=1.0)
            with pytest.raises(errors.TransferTimeoutError, match="did not form within 1 s"):
                await ask(other, "end_weight_update")
        assert (await engine.update_weights(tiny_weights(0))).version == engine.policy_version

    asyncio.run(run())


@pytest.mark.skipif(sys.platform != "linux", reason="only there a thread has a priority of its own")
@pytest.mark.parametrize("how", ["in one call", "verb by verb"])
def test_what_receives_an_update_gives_way_to_steps(engine, how):
    def priorities(pid):
        """By thread."""
        found = {}
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                found[task.name] = os.getpriority(os.PRIO_PROCESS, int(task.name))
        return found

    async def run():
        pid, version = (await engine.check_health()).pid, engine.policy_version
        before = priorities(pid)
        with AsyncLLM.connect(engine.address) as other:
            if how == "in one call":
                rendezvous = {"transport": "gloo", "directory": engine.address, "timeout": 3600.0, "number": 97}
                await begin_without_sending(other, version + 1, rendezvous)
                waiting = ask(other, "end_weight_update")
            else:
                manifest = make_sender("inproc").offer(tiny_weights(1), version + 1, await other.get_model_metadata())
                await other.collective_rpc("begin_weight_update", None, [manifest])
                place = {"rendezvous": f"file://{engine.address}/n", "rank": 1, "world_size": 2, "timeout": 3600.0}
                waiting = other.collective_rpc("receive_weights", None, ["gloo", place])
            waiting = asyncio.create_task(waiting)
            lower = min(before[str(pid)] + 10, 19)
            while lower not in [n for task, n in priorities(pid).items() if task not in before]:
                await asyncio.sleep(0.01)
            assert priorities(pid)[str(pid)] == before[str(pid)]
        with pytest.raises(EngineDeadError):  # for the client that has left
            await waiting
        while (await engine.get_metrics()).core.state == "UPDATING":
            await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(run(), 600))


@pytest.mark.parametrize("transport", ["gloo", "store"])
def test_an_update_ends_with_the_client_that_began_it(engine, last_of, until_computing, transport):
    """Where it waits for a sender that never comes, or for requests to finish: nobody waits for its deadline."""
    rendezvous = {"transport": transport, "directory": engine.address, "timeout": 3600.0, "number": 98}
    mode = "keep" if transport == "gloo" else "wait"

    async def run(store):
        running = asyncio.create_task(last_of(engine, "hello", ENDLESS, "endless"))
        await until_computing(engine)
        with AsyncLLM.connect(engine.address) as other:
            if transport == "gloo":
                await begin_without_sending(other, 10**6, rendezvous, timeout=3600.0, mode=mode)
            else:
                publish(store, tiny_weights(1), engine.policy_version + 1)
                update = asyncio.create_task(other.update_weights(store, mode=mode, timeout=3600.0))
                while (await engine.get_metrics()).core.state != "UPDATING":
                    await asyncio.sleep(0.01)
            other.shutdown()
            if transport == "store":
                with pytest.raises(EngineDeadError):
                    await update
        while (await engine.get_metrics()).core.state == "UPDATING":
            await asyncio.sleep(0.01)
        version = engine.policy_version
        await until_computing(engine)
        await engine.abort("endless")
        spans = (await running).outputs[0].version_spans
        assert [span.policy_version for span in spans] == [version]
        assert (await engine.update_weights(tiny_weights(0))).version == version + 1

    with tempfile.TemporaryDirectory() as store:
        asyncio.run(run(store))


def test_nothing_is_left_of_the_transports(checkpoint, options):
    with AsyncLLM(checkpoint, **options) as engine:
        with AsyncLLM.connect(engine.address) as other:
            asyncio.run(other.update_weights(tiny_weights(1)))
            assert len(traces(engine)) == 1
        for transport in ("shm", "store", "gloo"):
            asyncio.run(engine.update_weights(tiny_weights(1), transport=transport))
        assert len(traces(engine)) == 1
    assert not traces(engine)


@pytest.mark.slow
def test_nothing_is_left_of_a_client_that_was_killed(engine):
    code = (
        "import asyncio, sys; from rollout_engine import AsyncLLM; from rollout_engine.testing import tiny_model\n"
        "engine = AsyncLLM.connect(sys.argv[1])\n"
        "asyncio.run(engine.update_weights(tiny_model(seed=0)))\n"
        "print('done', flush=True); sys.stdin.read()"
    )
    before = traces(engine)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", code, engine.address], stdin=pipe, stdout=pipe, env=os.environ, text=True
    ) as client:
        assert client.stdout.readline() == "done\n"
        assert len(traces(engine)) == len(before) + 1
        client.kill()
    deadline = time.monotonic() + 60
    while len(traces(engine)) > len(before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert traces(engine) == before


@pytest.mark.slow
def test_an_update_of_a_core_that_dies_raises_at_once(checkpoint, options):
    with AsyncLLM(checkpoint, **options) as engine:

        async def run():
            pid = (await engine.check_health()).pid
            os.kill(pid, signal.SIGSTOP)  # so that the update is under way, however fast it would have been
            update = asyncio.create_task(engine.update_weights(tiny_weights(1)))
            await asyncio.sleep(0.1)
            os.kill(pid, signal.SIGKILL)
            await update

        with pytest.raises(EngineDeadError):
            asyncio.run(run())
    assert not traces(engine)
