"""A core that was started by hand and listens on TCP, and clients that join it with its keys."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from transformers import AutoModelForCausalLM

from rollout_engine import AsyncLLM, DrainTimeoutError, EngineDeadError, SamplingParams, WeightUpdateError
from rollout_engine.base.config import EngineConfig
from rollout_engine.cli.main import main
from rollout_engine.process.core_launcher import CoreProcess, config_digest
from rollout_engine.process.keys import Keys
from rollout_engine.process.process_client import ProcessClient
from sync import make_sender, publish

PARAMS = SamplingParams(n=2, max_tokens=8, ignore_eos=True, seed=3, logprobs=2, prompt_logprobs=1)
ENDLESS = SamplingParams(max_tokens=30_000, ignore_eos=True, detokenize=False)
EXTENSIONS = ("tests.faults.stuck_code:StuckExtension",)


@pytest.fixture(scope="module")
def key_file(tmp_path_factory):
    return tmp_path_factory.mktemp("keys") / "keys"


@pytest.fixture(scope="module")
def address(checkpoint, options, key_file):
    """Where a core listens that the command line has started; it is told to end by SIGTERM, and does so in order."""
    overrides = [f"{name}={value}" for name, value in options.items()]
    command = ["core", str(checkpoint), "--listen", "tcp://127.0.0.1:0", "--key-file", str(key_file), *overrides]
    with subprocess.Popen([sys.executable, "-m", "rollout_engine", *command], stdout=subprocess.PIPE) as process:
        try:
            yield process.stdout.readline().decode().strip()
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()


@pytest.fixture
def remote(address, key_file):
    """A client over TCP."""
    with AsyncLLM.connect(address, key_file=key_file) as engine:
        yield engine


@contextmanager
def core(checkpoint, options, **engine_kwargs):
    """A core of its own on TCP; its process, address and keys."""
    config, keys = EngineConfig.from_kwargs(model=str(checkpoint), **options, **engine_kwargs), Keys.make()
    place = dict(listen="tcp://127.0.0.1:0", keys=keys)
    process = CoreProcess(config, heartbeat_seconds=0.1, max_backlog_bytes=1 << 20, **place)
    try:
        ready = process.wait_ready(600)
        yield process, ready.address, keys
    finally:
        process.end(kill=True)


@pytest.mark.slow
def test_requests_get_what_they_get_in_process(remote, llm, last_of, assert_same):
    theirs = asyncio.run(last_of(remote, "one and two", PARAMS))
    [ours] = llm.generate(["one and two"], PARAMS)
    assert_same(theirs, ours)
    metrics = theirs.metrics
    assert metrics.arrival_time <= metrics.scheduled_time <= metrics.finished_time


@pytest.mark.slow
def test_several_clients_share_a_core_and_leave_it_running(remote, address, key_file, last_of):
    async def both(other):
        return await asyncio.gather(*(last_of(engine, [5, 6], PARAMS) for engine in (remote, other)))

    with AsyncLLM.connect(address, key_file=key_file) as other:
        first, second = asyncio.run(both(other))
        assert other.client_index != remote.client_index and other.address == remote.address == address
    assert [sample.token_ids for sample in first.outputs] == [sample.token_ids for sample in second.outputs]
    assert asyncio.run(last_of(remote, [5, 6], PARAMS)).finished


def test_verbs_work_and_a_call_has_its_deadline(remote, last_of, until_computing):
    async def run():
        endless = asyncio.create_task(last_of(remote, [5, 6], ENDLESS, "endless"))
        await until_computing(remote)
        with pytest.raises(DrainTimeoutError):
            await remote.wait_for_requests_to_drain(0.05)
        await remote.abort("endless")
        assert (await endless).outputs[0].finish_reason == "abort"
        await remote.wait_for_requests_to_drain(60.0)
        await remote.pause_generation()
        assert await remote.is_paused()
        await remote.resume_generation()
        assert len(await remote.collective_rpc("get_weight_digest", 60.0)) == 1
        await remote.check_integrity()

    asyncio.run(run())


def test_a_client_knows_the_configuration_of_its_core(remote):
    client = remote.frontend.client
    assert client.config_digest == config_digest(client.info.config)


def test_weights_come_by_a_path_or_a_group_and_what_needs_a_directory_says_so(remote, checkpoint, tmp_path, last_of):
    trainer = AutoModelForCausalLM.from_pretrained(checkpoint)
    for transport in (None, "shm", "store", "gloo", "ipc"):
        with pytest.raises(
            WeightUpdateError, match="needs a directory of both ends.*: publish the weights .*, connect by"
        ):
            asyncio.run(remote.update_weights(trainer, transport=transport))
    before = asyncio.run(last_of(remote, [5, 6], PARAMS))
    publish(tmp_path / "store", {name: tensor * 1.5 for name, tensor in trainer.state_dict().items()}, 1)
    report = asyncio.run(remote.update_weights(tmp_path / "store"))
    after = asyncio.run(last_of(remote, [5, 6], PARAMS))
    assert after.outputs[0].version_spans[0].policy_version == report.version == 1
    by_group(remote, trainer, 2)
    again = asyncio.run(last_of(remote, [5, 6], PARAMS))
    assert [sample.token_ids for sample in again.outputs] == [sample.token_ids for sample in before.outputs]
    assert remote.frontend.client.policy_version == 2


def by_group(engine, trainer, version):
    """Send a trainer's weights by gloo, over an address that both ends name."""

    def call(method, *args):
        return asyncio.run(engine.collective_rpc(method, 60, args))[0]

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    sender = make_sender("gloo", rendezvous=f"tcp://127.0.0.1:{port}", world_size=2, timeout=30.0)
    call("init_weight_update_group", "127.0.0.1", port, 1, 2, "gloo", 30.0)
    while not call("check_nccl_group_ready"):
        pass
    call("begin_weight_update", sender.offer(trainer, version, call("get_model_metadata")))
    sending = threading.Thread(target=sender.send)
    sending.start()
    call("receive_weights")
    sending.join()
    call("verify_weights")
    call("commit_weight_update", version)
    sender.close()


@pytest.mark.slow
def test_a_core_that_is_killed_is_told_and_a_stopped_one_too(checkpoint, options, until_computing, last_of):
    async def run(engine, pid, number):
        request = asyncio.create_task(last_of(engine, [5, 6], ENDLESS))
        await until_computing(engine)
        os.kill(pid, number)
        with pytest.raises(EngineDeadError):
            await request

    with core(checkpoint, options) as (process, address, keys):
        with AsyncLLM.from_client(ProcessClient.connect(address, keys=keys, hang_seconds=2.0)) as engine:
            asyncio.run(run(engine, process.pid, signal.SIGSTOP))
            assert "it has given no sign of life for 2 s" in str(engine.dead_error)
            assert "or the network to it is cut" in str(engine.dead_error)
        process.signal(signal.SIGCONT)
        with AsyncLLM.from_client(ProcessClient.connect(address, keys=keys, hang_seconds=60.0)) as engine:
            asyncio.run(run(engine, process.pid, signal.SIGKILL))
            assert "is gone: its connection is lost" in str(engine.dead_error)


@pytest.mark.slow
def test_a_core_whose_interpreter_is_held_is_alive(checkpoint, options, last_of):
    with (
        core(checkpoint, options, worker_extensions=EXTENSIONS) as (process, address, keys),
        AsyncLLM.from_client(ProcessClient.connect(address, keys=keys, hang_seconds=2.0)) as engine,
    ):
        asyncio.run(engine.collective_rpc("hold_interpreter", args=[5]))
        assert asyncio.run(last_of(engine, [5, 6], PARAMS)).finished
        client = engine.frontend.client._socket
        client._step_deadline = 1.0
        with pytest.raises(EngineDeadError, match="by a call into C that does not return"):
            asyncio.run(engine.collective_rpc("hold_interpreter", args=[600]))
        process.end(kill=True)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "arguments,problem",
    [
        (["--listen", "tcp://127.0.0.1:0"], "nobody connects over TCP without keys"),
        (["--listen", "ipc://core", "--key-file", "KEYS"], "is no TCP address"),
        (["--listen", "tcp://192.0.2.1:0", "--key-file", "KEYS"], "Cannot assign requested address"),
        (
            ["--listen", "tcp://127.0.0.1:0", "--key-file", "KEYS", "max_tokens=5"],
            "sampling params come with each request",
        ),
    ],
)
def test_a_core_that_cannot_be_started_so_is_refused_in_words(checkpoint, key_file, capsys, arguments, problem):
    Keys.read_or_write(key_file)
    assert main(["core", str(checkpoint), *[str(key_file) if each == "KEYS" else each for each in arguments]]) == 2
    assert problem in capsys.readouterr().err
