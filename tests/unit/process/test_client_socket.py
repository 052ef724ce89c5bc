"""A client's end of the socket, over a real core's end with nobody behind it."""

import socket
import threading
import time
from types import SimpleNamespace

import pytest

from rollout_engine.messages import EngineCoreOutputs
from rollout_engine.process import client_socket
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_launcher import address_in
from rollout_engine.process.core_socket import CoreSocket
from rollout_engine.process.wire import Outputs
from tests.faults.peers import READY


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path)


@pytest.fixture
def core(directory):
    parent, child = socket.socketpair()
    with parent, child:
        io = CoreSocket(address_in(directory), child, heartbeat_seconds=60.0, max_backlog_bytes=1 << 20)
        io.start(lambda: READY, on_orphaned=lambda: None)
        yield io


def test_what_a_core_sent_before_it_ended_is_heard_by_a_client_that_was_late(core, directory, monkeypatch):
    numbers, deaths, dead = [], [], threading.Event()
    standing, go_on = threading.Event(), threading.Event()

    def stand_still():  # as on a machine that has no time for this thread
        standing.set()
        go_on.wait(60)

    client = ClientSocket.connect(directory, hang_seconds=60)
    client.wait_welcome()
    client.listen(lambda outputs: numbers.append(outputs.number), lambda error: (deaths.append(str(error)), dead.set()))
    monkeypatch.setattr(client, "_send_outbox", stand_still)
    assert standing.wait(60)
    for number in range(20):
        core.send(0, Outputs(number, [EngineCoreOutputs(0)]))
    core.close("the test ends it")
    assert client._monitor.poll(60_000), "the connection is lost, and what came before that has come"
    time.sleep(0.2)  # for zmq to act on it
    go_on.set()
    assert dead.wait(60)
    client.close()
    assert numbers == list(range(20))
    assert len(deaths) == 1 and "the test ends it" in deaths[0]


def test_how_a_core_ended_is_told_though_its_status_comes_after_its_silence(core, directory, monkeypatch):
    class Process:
        """Its files are closed, and the kernel is not done with it."""

        def __init__(self, lifeline):
            self.directory, self.lifeline, self.gone = directory, SimpleNamespace(socket=lifeline), threading.Event()

        def wait(self, seconds):
            return -9 if self.gone.wait(seconds) else None

        def keep_stacks(self, *, abort):
            return ""

        def end(self, *, kill):
            self.gone.set()

    monkeypatch.setattr(client_socket, "_DISCONNECT_SECONDS", 0.01)  # its connection does not end with it
    ours, theirs = socket.socketpair()
    process, deaths, dead = Process(ours), [], threading.Event()
    with ours:
        client = ClientSocket.start(process, hang_seconds=600)
        client.wait_welcome()
        client.listen(lambda _: None, lambda error: (deaths.append(str(error)), dead.set()))
        theirs.close()
        threading.Timer(0.3, process.gone.set).start()
        assert dead.wait(60)
        core.close("the test ends it")
        client.close()
    assert len(deaths) == 1 and "ended with status -9" in deaths[0]
