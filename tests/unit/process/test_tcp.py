"""A core's socket on TCP: whoever has the keys is served, anybody else is told nothing and takes nothing."""

import socket
import time
from contextlib import ExitStack, contextmanager

import pytest
import zmq

from rollout_engine.base.errors import ConfigError, EngineDeadError
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_socket import CoreSocket
from rollout_engine.process.keys import Keys
from rollout_engine.process.tcp_address import TcpAddress
from rollout_engine.process.wire import MAX_FRAME_BYTES
from tests.faults.peers import READY, RawClient
from tests.unit.process.test_authentication import MORE, PIECE, STRANGERS, command, greeting, num_taken

KEYS = Keys.make()


@contextmanager
def listening(directory, listen="tcp://127.0.0.1:0"):
    """A core's socket without a core."""
    parent, child = socket.socketpair()
    with parent, child:
        options = dict(heartbeat_seconds=0.05, max_backlog_bytes=1 << 20, listen=listen, keys=KEYS)
        io = CoreSocket(str(directory), child, **options)
        io.start(lambda: READY, on_orphaned=lambda: None)
        yield io
        io.close("the test is over")


@pytest.fixture
def core(tmp_path):
    with listening(tmp_path) as io:
        yield io


def connect(address, keys=KEYS):
    return ClientSocket.connect(address, keys=keys, hang_seconds=60)


def refusal(address, keys=KEYS):
    """Why a client is not connected."""
    client = connect(address, keys)
    with pytest.raises(EngineDeadError, match=f"^No connection to the core at {address}: ") as caught:
        client.wait_welcome()
    client.close()
    return str(caught.value)


def test_one_core_takes_clients_in_its_directory_and_over_tcp(core, tmp_path):
    remote, local = connect(core.address), ClientSocket.connect(str(tmp_path), hang_seconds=60)
    assert remote.wait_welcome() == local.wait_welcome() == READY
    assert core.stats.num_clients == 2
    deadline = time.monotonic() + 60
    while core._strangers._waiting:  # two connections of the remote one, one of the other
        assert time.monotonic() < deadline, "clients count as strangers"
        time.sleep(0.01)
    remote.close()
    local.close()


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    "listen,host", [("tcp://*:*", "0.0.0.0"), ("tcp://localhost:0", None), ("tcp://[::1]:0", "[::1]")]
)
def test_a_core_listens_where_it_is_told(tmp_path, listen, host):
    if "::" in listen and not has_ipv6():
        pytest.skip("no IPv6 on this machine")
    with listening(tmp_path, listen) as core:
        at = TcpAddress.parse(core.address, "address", to_listen=True)
        assert at.port and (host is None or at.host == host)
        client = connect(core.address.replace("0.0.0.0", "localhost"))
        client.wait_welcome()
        client.close()


def has_ipv6():
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_a_port_in_use_is_an_error_of_the_configuration(core, tmp_path):
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="Address already in use"), listening(tmp_path / "other", core.address):
        pass


def test_another_key_is_told_at_once_on_either_side(core):
    other = Keys.make()
    assert "it does not know the client's key" in refusal(core.address, Keys(server=KEYS.server, client=other.client))
    for wrong in (other, Keys(server=other.server, client=KEYS.client)):
        assert "it has another key than this client's key_file says" in refusal(core.address, wrong)
    assert core.stats.num_clients == 0


def test_nobody_and_somebody_else_at_the_address_are_told(core, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    assert "nobody listens there" in refusal(address)
    context = zmq.Context()
    plain = context.socket(zmq.ROUTER)
    port = plain.bind_to_random_port("tcp://127.0.0.1")
    assert "is no core that listens with keys" in refusal(f"tcp://127.0.0.1:{port}")
    context.destroy(linger=0)


@pytest.mark.parametrize(
    "address,problem",
    [
        ("tcp://127.0.0.1", "is no TCP address: write tcp://HOST:PORT"),
        ("tcp://127.0.0.1:99999", "is no TCP address"),
        ("tcp://:5555", "is no TCP address"),
        ("tcp://a b:5555", "is no TCP address"),
        ("tcp://127.0.0.1:0", "is where a core listens"),
        ("tcp://*:5555", "is where a core listens"),
        ("tcp://0.0.0.0:5555", "is where a core listens"),
        ("tcp://no-such-host.invalid:5555", "the host 'no-such-host.invalid' is unknown here"),
        ("/a/directory", "key_file is for a core on TCP"),
    ],
)
def test_an_address_that_cannot_be_used_is_refused_in_words(address, problem):
    with pytest.raises(ConfigError, match=problem):
        connect(address)


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:5555", "tcp://10.0.0.7:5555"])
def test_there_is_no_tcp_without_keys_on_loopback_or_off(address):
    with pytest.raises(ConfigError, match="nobody connects over TCP without keys.*: give key_file"):
        connect(address, None)


ON_TCP = STRANGERS | {"no CURVE": greeting(b"CURVE") + command(b"HELLO", bytes(194))}
ON_TCP["the token's mechanism"] = ON_TCP.pop("another token")


@pytest.mark.quick(1)
@pytest.mark.parametrize("words", ON_TCP.values(), ids=ON_TCP)
def test_an_endless_message_of_a_stranger_is_not_read(core, words):
    at = TcpAddress.parse(core.address, "address")
    with socket.create_connection(at) as stranger:
        stranger.sendall(words)
        assert num_taken(stranger, MORE, 64 << 20) < 8 * MAX_FRAME_BYTES  # the system's buffers included
    client = connect(core.address)
    client.wait_welcome()
    client.close()


def test_the_token_of_the_directory_opens_no_door_on_tcp(core, tmp_path):
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.plain_username, stranger.plain_password = b"client", (tmp_path / "token").read_bytes()
    monitor = stranger.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
    stranger.connect(core.address)
    assert monitor.poll(60_000)
    stranger.disable_monitor()
    monitor.close()
    context.destroy(linger=0)
    with RawClient(tmp_path):
        assert core.stats.num_clients == 1


@pytest.mark.slow
def test_strangers_that_say_nothing_are_put_out_and_keep_nobody_out(core):
    at = TcpAddress.parse(core.address, "address")
    with ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(at)) for _ in range(100)]
        client = connect(core.address)
        client.wait_welcome()
        client.close()
        for stranger in strangers:
            stranger.settimeout(60)
            while stranger.recv(PIECE):  # the greeting, then the end
                pass


def test_the_farewell_of_a_core_is_heard(tmp_path):
    errors = []
    with listening(tmp_path) as core:
        client = connect(core.address)
        client.wait_welcome()
        client.listen(lambda _: None, lambda error: errors.append(str(error)))
    while client.dead_error is None:
        time.sleep(0.01)
    client.close()
    assert "is gone: the test is over" in str(client.dead_error)
