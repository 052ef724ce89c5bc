"""Peers that send garbage or pickles, on every socket and in every file of ours: refused, counted, nobody dies."""

import asyncio
import contextlib
import random
import socket
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import psutil
import pytest
import torch

import sync
from rollout_engine import AsyncLLM, SamplingParams
from rollout_engine.children.channel import Channel
from rollout_engine.children.failure import Failure
from rollout_engine.children.values import pack
from rollout_engine.engine.verbs import VERBS
from rollout_engine.process.lifeline import MAX_LIFELINE_BYTES, CoreSettings
from rollout_engine.process.weight_server import WEIGHT_VERBS
from rollout_engine.process.wire import Call, Encoder, Ready
from sync import ipc
from tests.faults.canaries import Canary
from tests.faults.clean import assert_clean
from tests.faults.garbage import client_messages, core_messages, mutants, restore, throw_mutants
from tests.faults.peers import RawClient, RawCore

OPTIONS = dict(num_kv_blocks=256, max_num_seqs=16, num_threads=1, skip_tokenizer_init=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True, detokenize=False)


@pytest.fixture(scope="module")
def engine(checkpoint):
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def canary(tmp_path):
    canary = Canary(tmp_path)
    assert canary.works()
    yield canary
    canary.assert_silent()


@pytest.fixture
def raw_core(tmp_path):
    core = RawCore(tmp_path)
    yield core
    core.close()


def lives(engine):
    """The core answers, computes, and holds nothing."""

    async def run():
        outputs = [output async for output in engine.generate([5, 6], SHORT)]
        assert len(outputs[-1].outputs[0].token_ids) == 5
        await assert_clean(engine)
        return (await engine.check_health()).io

    return asyncio.run(run())


def calls_of_every_verb(canary):
    array = np.frombuffer(canary.bytes, np.uint8)
    for name, verb in (VERBS | WEIGHT_VERBS).items():
        fields = verb.arguments.__struct_fields__ if verb.crosses else ("fn",)
        for value in (canary.bytes, canary.text, [canary.bytes], {"x": canary.text}, array):
            yield Call(1, name, *pack({field: value for field in fields}))
            yield from (Call(1, name, *pack({field: value})) for field in fields)
    for text in (canary.text, "get_memory", "ping"):
        arguments = dict(method=text, args=[canary.bytes, canary.text], kwargs={canary.text: canary.bytes})
        yield Call(1, "collective_rpc", pack(arguments | {"timeout": None}).body, [array])
        yield Call(1, "collective_rpc", *pack(arguments | {"args": canary.bytes}))
        yield Call(1, text, *pack(arguments))
    yield Call(1, "collective_rpc", pack(canary.bytes).body, [array])


@pytest.mark.slow
def test_no_pickle_sent_to_a_core_is_unpickled(engine, canary):
    encoder = Encoder()
    rejected = lives(engine).num_rejected
    with RawClient(engine.address) as client:
        for frames in core_messages():
            for planted in canary.planted(frames):
                client.throw(planted)
        for call in calls_of_every_verb(canary):
            client.throw([bytes(frame) for frame in encoder.encode(call)])
        client.wait_rejected()
        bad = client.num_bad
    assert bad > 100
    asyncio.run(restore(engine))
    assert lives(engine).num_rejected == rejected + bad


@pytest.mark.slow
def test_no_pickle_sent_to_a_client_is_unpickled(raw_core, canary):
    choose = random.Random(2)
    planted = [planted for frames in client_messages() for planted in canary.planted(frames)]
    assert len(planted) > 200
    for frames in choose.sample(planted, 60):
        assert raw_core.tell([frames]) is not None


def test_no_pickle_on_the_lifeline_is_unpickled(canary):
    for kind in (CoreSettings, Ready | Failure):
        for planted in canary.planted_values({"type": "ready", "pid": 3, "config": {"model": "m"}}):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                body = msgspec.msgpack.encode(planted)
                for data in (canary.bytes[:8] + canary.bytes, len(body).to_bytes(8, "little") + body):
                    ours.sendall(data)
                ours.shutdown(socket.SHUT_WR)
                with pytest.raises((EOFError, msgspec.MsgspecError)):
                    Channel(theirs, MAX_LIFELINE_BYTES).receive(kind, 60)


def test_garbage_on_the_lifeline_is_an_error_of_whoever_reads_it():
    choose = random.Random(8)
    message = msgspec.msgpack.encode({"type": "ready", "pid": 3, "config": {"model": "m"}})
    for count in range(500):
        body = bytearray(message)
        body[choose.randrange(len(body))] = choose.randrange(256)
        lengths = [len(body), choose.randrange(1 << 32), choose.randrange(len(body))]
        ours, theirs = socket.socketpair()
        with ours, theirs:
            ours.sendall(lengths[count % 3].to_bytes(8, "little") + body)
            ours.shutdown(socket.SHUT_WR)
            with pytest.raises((EOFError, msgspec.MsgspecError)):
                Channel(theirs, MAX_LIFELINE_BYTES).receive(CoreSettings, 60)


def test_no_pickle_on_the_channel_of_a_weight_transport_is_unpickled(tmp_path, canary):
    handle = ipc.MemoryHandle(b"s", 1, 0, b"c", 0, b"e", False)
    messages = [
        ipc.Request(1, 2, "digest", "memory"), ipc.Taken(1, 0), ipc.Filled(1, 0), ipc.Refused(1, "no"),
        ipc.Shared(1, [handle, handle], 100, [ipc.InPlaceTensor("w", 1, 0)]), ipc.Done(1),
    ]  # fmt: skip
    either = ipc.Request | ipc.Taken | ipc.Filled | ipc.Refused | ipc.Shared | ipc.Done
    ours = ipc.Channel(tmp_path / "meet", binds=True, accepts=either, timeout=60)
    theirs = ipc.Channel(tmp_path / "meet", binds=False, accepts=either, timeout=60)
    sent = 0
    for message in messages:
        for (planted,) in canary.planted([msgspec.msgpack.encode(message)]):
            theirs._socket.send(planted)
            sent += 1
    theirs.send(ipc.Taken(7, 1))
    assert ours.expect(ipc.Taken, 7).k == 1
    assert ours.num_dropped == sent
    ours.close()
    theirs.close()


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_garbage_on_the_sockets_of_a_weight_group_changes_no_weight(tmp_path, scheme):
    choose, process = random.Random(7), psutil.Process()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    rendezvous = f"file://{tmp_path}/meet" if scheme == "file" else f"tcp://127.0.0.1:{port}"
    place = dict(rendezvous=rendezvous, world_size=2, bucket_bytes=2000, timeout=60.0)
    sender, receiver = sync.make_sender("gloo", **place), sync.make_receiver("gloo", rank=1, **place)
    weights = {f"w{i}": torch.full((100,), float(i)) for i in range(20)}
    while not (sender.ready() and receiver.ready()):
        throw_at_ports(process, choose)
    for version in range(1, 6):
        throw_at_ports(process, choose)
        manifest = sender.offer(weights, version, {})
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(lambda manifest: {n: t.clone() for n, t in receiver.receive(manifest)}, manifest)
            throw_at_ports(process, choose)
            sender.send()
        assert all(torch.equal(received.result()[name], weights[name]) for name in weights)
    receiver.close()
    sender.close()


def throw_at_ports(process, choose):
    """Connect to whatever this process listens on, say something and leave."""
    for connection in process.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN:
            for _ in range(5):
                with (
                    contextlib.suppress(ConnectionError),  # somebody else's, closed by now; or it was quick to refuse
                    socket.create_connection(connection.laddr, timeout=60) as stranger,
                ):
                    stranger.sendall(choose.randbytes(choose.choice([0, 1, 8, 100, 5000])))


@pytest.mark.slow
def test_no_pickle_in_a_file_of_weights_is_unpickled(engine, tmp_path, canary):
    weights = {"a": torch.ones(4), "b": torch.ones(3)}
    sync.publish(tmp_path / "good", weights, 1)
    names = sorted(path.relative_to(tmp_path / "good") for path in (tmp_path / "good").rglob("*") if path.is_file())
    assert len(names) >= 5
    for i, name in enumerate([*names, "versions/000001/other.pickle", "pytorch_model.bin", "model.safetensors"]):
        store = tmp_path / f"store{i}"
        sync.publish(store, weights, 1)
        (store / name).write_bytes(canary.bytes)
        with pytest.raises(sync.SyncError):
            asyncio.run(engine.update_weights(store, version=9))
    with_sender = sync.make_sender("shm", directory=tmp_path / "shm")
    manifest = with_sender.offer(weights, 1, {})
    with open(tmp_path / "shm" / "weights", "r+b") as file:
        file.write(canary.bytes)
    with pytest.raises(sync.SyncError):
        dict(sync.make_receiver("shm", directory=tmp_path / "shm").receive(manifest))
    with_sender.close()
    lives(engine)


def test_mutated_messages_leave_a_live_core_alive_and_every_bad_one_is_counted(engine):
    rejected = lives(engine).num_rejected
    found = throw_mutants(engine.address, count=20_000, seed=3)
    asyncio.run(restore(engine))
    assert lives(engine).num_rejected == rejected + found.num_bad
    assert 0 < found.num_bad <= found.num_sent


def test_a_second_welcome_ends_the_client_in_order(raw_core):
    welcome, *_ = client_messages()
    assert "welcomed this client twice" in str(raw_core.tell([welcome]))


def test_a_core_that_says_nonsense_is_a_dead_core(raw_core):
    deaths = [raw_core.tell([frames]) for frames in mutants(client_messages(), 30, random.Random(5))]
    assert all(deaths)
    assert any("no message" in str(error) for error in deaths)
