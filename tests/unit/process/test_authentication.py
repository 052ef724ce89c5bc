"""Nothing but the handshake is read of a peer that does not know the token of the core."""

import os
import socket
import stat

import pytest

from rollout_engine.base.errors import EngineDeadError
from rollout_engine.process.authentication import make_token
from rollout_engine.process.client_socket import ClientSocket
from rollout_engine.process.core_socket import CoreSocket
from rollout_engine.process.wire import MAX_FRAME_BYTES
from tests.faults.peers import READY, RawClient

PIECE = 1 << 16
MORE = b"\x03" + PIECE.to_bytes(8, "big") + bytes(PIECE)
"""A long frame of a ZMTP message, after which more are to come."""


def command(name, *data):
    body = bytes([len(name)]) + name + b"".join(bytes([len(each)]) + each for each in data)
    return b"\x04" + bytes([len(body)]) + body


def greeting(mechanism, version=b"\x03\x00"):
    return b"\xff" + bytes(8) + b"\x7f" + version + mechanism.ljust(20, b"\0") + bytes(32)


STRANGERS = {
    "no mechanism": greeting(b"NULL") + b"\x04\x1f\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
    "another token": greeting(b"PLAIN") + command(b"HELLO", b"client", b"f" * 64),
    "no token": greeting(b"PLAIN"),
    "initiates": greeting(b"PLAIN") + command(b"INITIATE"),
    "another protocol": greeting(b"CURVE") + command(b"HELLO"),
    "ZMTP 2": b"\xff" + bytes(8) + b"\x7f" + b"\x01\x05\x00\x00",
    "ZMTP 1": b"\x01\x00",
}


@pytest.fixture
def core(tmp_path):
    parent, child = socket.socketpair()
    with parent, child:
        io = CoreSocket(str(tmp_path), child, heartbeat_seconds=60.0, max_backlog_bytes=1 << 20)
        io.start(lambda: READY, on_orphaned=lambda: None)
        yield io
        io.close("the test is over")


def num_taken(peer, piece, most):
    """Bytes of endlessly repeated pieces that a core takes before it ends the connection; `most` if it does not."""
    peer.settimeout(60)
    count = 0
    try:
        while count < most:
            count += peer.send(piece[count % len(piece) :])
    except (BrokenPipeError, ConnectionResetError):
        return count
    return most


@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS)
def test_an_endless_message_of_a_stranger_is_not_read(core, tmp_path, words):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"{tmp_path}/core")
        stranger.sendall(words)
        assert num_taken(stranger, MORE, 64 << 20) < 2 * MAX_FRAME_BYTES
    with RawClient(tmp_path):
        assert core.stats.num_clients == 1


def test_the_handshake_itself_has_a_bound(core, tmp_path):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"{tmp_path}/core")
        stranger.sendall(greeting(b"PLAIN") + b"\x06" + (1 << 40).to_bytes(8, "big"))
        assert num_taken(stranger, bytes(PIECE), 64 << 20) < 2 * MAX_FRAME_BYTES


def test_the_token_is_for_its_user_alone_and_never_the_same(tmp_path):
    tokens = set()
    for name in "ab":
        os.mkdir(tmp_path / name)
        tokens.add(make_token(tmp_path / name))
        assert stat.S_IMODE((tmp_path / name / "token").stat().st_mode) == 0o600
    assert len(tokens) == 2 and {len(token) for token in tokens} == {64}
    with pytest.raises(FileExistsError):
        make_token(tmp_path / "a")


def test_a_token_is_not_written_through_a_link(tmp_path):
    (tmp_path / "token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        make_token(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_a_client_with_another_token_is_told_and_one_without_any_too(core, tmp_path):
    (tmp_path / "token").write_text("another")
    client = ClientSocket.connect(str(tmp_path), hang_seconds=60)
    with pytest.raises(EngineDeadError, match="did not take the token in its directory"):
        client.wait_welcome()
    client.close()
    (tmp_path / "token").unlink()
    with pytest.raises(EngineDeadError, match="No core lives in"):
        ClientSocket.connect(str(tmp_path), hang_seconds=60)
    assert core.stats.num_clients == 0
