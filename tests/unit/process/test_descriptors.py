"""File descriptors that run out: an error in words here, and a core that lives on, where zmq would end the process."""

import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest
import zmq

from rollout_engine import EngineConfig
from rollout_engine.base.errors import ConfigError, RetryableError
from rollout_engine.process import descriptors
from rollout_engine.process.authentication import read_token, show_token
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_launcher import CoreProcess, address_in
from rollout_engine.process.parts import receive
from rollout_engine.process.strangers import GREETING, Strangers
from rollout_engine.process.wire import PROTOCOL, Decoder, Encoder, Farewell, Heartbeat, Hello, ToClient, Welcome
from tests.faults.peers import RawClient, RawCore

CORE = """
import resource, socket, sys
from rollout_engine.process import descriptors
from rollout_engine.process.core_socket import CoreSocket
from tests.faults.peers import READY

directory, hard = sys.argv[1], int(sys.argv[2])
parent, child = socket.socketpair()
resource.setrlimit(resource.RLIMIT_NOFILE, (hard // 2, hard))
descriptors.raise_limit()
connections = descriptors.connections_possible()
options = dict(heartbeat_seconds=0.2, max_backlog_bytes=1 << 20, connections=connections)
io = CoreSocket(directory, child, **options)
io.start(lambda: READY, on_orphaned=lambda: None)
descriptors.write_places(directory, connections.num_clients)
print(connections.num_clients, flush=True)
sys.stdin.read()
io.close("the test is over")
"""
FLOOD = """
import socket, sys
from rollout_engine.process import descriptors

descriptors.raise_limit()
ends = []
for _ in range(int(sys.argv[2])):
    ends.append(socket.socket(socket.AF_UNIX))
    ends[-1].connect(sys.argv[1])
while ends[0].recv(4096):
    pass
print("closed", flush=True)
sys.stdin.read()
"""
HARD = 128


@contextmanager
def spare(count):
    """Leave this process `count` descriptors."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 60, hard))
    try:
        with pytest.raises(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(opened.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in opened:
            os.close(descriptor)


@pytest.fixture
def core(request, tmp_path):
    """A core's socket in a process that may open 128 files; its directory, and how many clients it takes."""
    command = [sys.executable, "-c", CORE, str(tmp_path), str(getattr(request, "param", HARD))]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield tmp_path, int(process.stdout.readline())
            process.communicate()
            assert process.returncode == 0, "it lives to its end"
        finally:
            process.kill()


@pytest.mark.parametrize("count", [0, 4, 13])
def test_a_process_without_descriptors_is_told_so_before_it_connects_or_starts(tmp_path, count):
    (tmp_path / "core").touch()
    with spare(count):
        with pytest.raises(RetryableError, match=f"this process can open {count} more .*ulimit -n"):
            ClientSocket.connect(str(tmp_path), hang_seconds=5.0)
        with pytest.raises(RetryableError, match="An engine in a process of its own takes up to"):
            CoreProcess(EngineConfig(model="m"), heartbeat_seconds=1.0, max_backlog_bytes=1)


@pytest.mark.slow
def test_more_clients_than_a_core_has_descriptors_for_are_refused_and_it_lives_on(core):
    directory, max_clients = core
    assert HARD // 4 < max_clients < HARD, "from the hard limit, with a reserve"
    context, encoder, decoder, clients, heard = zmq.Context(), Encoder(), Decoder(ToClient), [], []
    for _ in range(max_clients + 20):
        client = context.socket(zmq.DEALER)
        show_token(client, read_token(directory))
        client.connect(address_in(directory))
        client.send(bytes(encoder.encode(Hello(PROTOCOL))[0]))
        assert client.poll(60_000)
        heard.append(decoder.decode(client.recv_multipart()))
        clients.append(client)
    assert [type(message) for message in heard] == [Welcome] * max_clients + [Farewell] * 20
    assert f"{max_clients} clients already" in heard[-1].reason
    assert clients[0].poll(60_000) and isinstance(decoder.decode(clients[0].recv_multipart()), Heartbeat)
    context.destroy(linger=0)


@pytest.mark.slow
@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_NOFILE)[1] < 4096, reason="it takes 3000 descriptors")
@pytest.mark.parametrize("core", [2048], indirect=True)
def test_more_connections_that_say_nothing_than_a_core_has_descriptors_for_do_it_no_harm(core):
    directory, _ = core
    with RawClient(str(directory)) as client:
        command = [sys.executable, "-c", FLOOD, f"{directory}/core", "3000"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
            assert flood.stdout.readline() == "closed\n", "the oldest"
            with RawClient(str(directory)) as newest:
                for each in (client, newest):
                    assert isinstance(each.hear(skip=()), Heartbeat) and not each.is_gone
            flood.communicate()


def test_a_connection_without_messages_is_no_stranger_once_it_has_given_a_sign(tmp_path):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        endpoint = f"ipc://{tmp_path}/core"
        router.bind(endpoint)
        strangers, ends = Strangers(context, router, 3), []
        for number in range(8):
            ends.append(context.socket(zmq.DEALER))
            ends[-1].setsockopt(zmq.RECONNECT_IVL, 1 << 30)
            ends[-1].connect(endpoint)
            if number < 2:
                ends[-1].send(GREETING)
                assert router.poll(60_000)
                sender, greeting = receive(router)
                assert greeting == GREETING
                strangers.greet(sender)
            else:
                while len(strangers._waiting) + strangers.num_closed < number - 1:
                    strangers.look()
        assert strangers.num_closed == 3 and len(strangers._waiting) == 3
        for end in ends:
            with suppress(zmq.Again):  # its connection is closed
                end.send(b"x", zmq.NOBLOCK)
        heard = set()
        while router.poll(60_000 if len(heard) < 5 else 100):
            heard.add(bytes(receive(router)[0]))
        assert len(heard) == 5
        router.unbind(endpoint)
        strangers.close()
        for end in ends:
            end.close(0)


def test_clients_take_places_and_give_them_back(tmp_path):
    assert descriptors.take_place(tmp_path) is None, "a core that does not count"
    descriptors.write_places(tmp_path, 3)
    places = [descriptors.take_place(tmp_path) for _ in range(3)]
    with pytest.raises(RetryableError, match="has 3 clients, as many as its file descriptors allow"):
        descriptors.take_place(tmp_path)
    child = os.fork()  # it holds copies of all of them
    if child == 0:
        signal.pause()
    descriptors.leave_place(places.pop())
    places.append(descriptors.take_place(tmp_path))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for place in places:
        os.close(place)
    descriptors.leave_place(descriptors.take_place(tmp_path))


def test_a_client_holds_a_place_until_it_closes(tmp_path):
    core = RawCore(tmp_path)
    descriptors.write_places(tmp_path, 1)
    for _ in range(3):
        client = ClientSocket.connect(str(tmp_path), hang_seconds=60.0)
        with pytest.raises(RetryableError, match="has 1 clients"):
            ClientSocket.connect(str(tmp_path), hang_seconds=60.0)
        client.close()
    core.close()


def test_a_core_without_descriptors_for_one_client_is_an_error_of_the_configuration(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (70, 70))
    with pytest.raises(ConfigError, match=r"a core has 70 file descriptors.*ulimit -Hn"):
        descriptors.connections_possible()
