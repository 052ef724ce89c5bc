"""Messages over a channel arrive whole and in order, within bounds of length and time."""

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from rollout_engine.children.channel import Channel
from tests.forking import in_fork


@pytest.fixture
def ends():
    channels = [Channel(end, 1 << 20) for end in socket.socketpair()]
    yield channels
    for channel in channels:
        channel.close()


def test_messages_arrive_as_they_were_sent(ends):
    here, there = ends
    sent = [b"", b"x" * 300_000, [1, "two", None], {"a": 1.5}]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: [here.send(message) for message in sent])
        assert [there.receive(kind) for kind in (bytes, bytes, list, dict)] == sent
        sending.result()


def test_threads_that_send_at_once_do_not_mix_their_messages(ends):
    here, there = ends
    with ThreadPoolExecutor(4) as pool:
        sending = [pool.submit(here.send, str(number % 10) * 100_000) for number in range(40)]
        received = [there.receive(str) for _ in range(40)]
        for each in sending:
            each.result()
    assert sorted(received) == sorted(str(number % 10) * 100_000 for number in range(40))


def test_a_message_of_which_a_part_is_late_is_received_by_a_later_call(ends):
    here, there = ends
    body = msgspec.msgpack.encode("hello")
    frame = len(body).to_bytes(8, "little") + body
    for byte in frame[:-1]:
        here.socket.sendall(bytes([byte]))
        with pytest.raises(TimeoutError):
            there.receive(str, 0.001)
    here.socket.sendall(frame[-1:])
    assert there.receive(str, 60) == "hello"


def test_a_peer_that_reads_nothing_is_too_late_and_receiving_has_no_limit_of_sending(ends):
    here, there = ends
    with pytest.raises(BlockingIOError):
        here.send(b"x" * 10_000_000, 0.01)
    there.send("answer")
    assert here.receive(str) == "answer"


@pytest.mark.parametrize(
    "data", [b"garbage, and more of it", ((1 << 20) + 1).to_bytes(8, "little"), (1).to_bytes(8, "little") + b"\xc1"]
)
def test_bytes_that_are_no_message_are_refused_before_memory_is_taken(ends, data):
    here, there = ends
    here.socket.sendall(data)
    with pytest.raises(msgspec.DecodeError):
        there.receive(str)


def test_a_message_of_another_kind_is_refused_and_the_next_one_is_not(ends):
    here, there = ends
    here.send(5)
    here.send("five")
    with pytest.raises(msgspec.ValidationError):
        there.receive(str)
    assert there.receive(str) == "five"


def test_the_end_of_the_other_process_is_noticed_by_a_thread_that_waits(ends):
    here, there = ends
    found = []

    def wait():
        try:
            there.receive(str)
        except EOFError as problem:
            found.append(problem)

    waiting = threading.Thread(target=wait)
    waiting.start()
    here.close()
    waiting.join()
    assert found


def test_a_forked_process_has_no_copy_of_a_channel(ends):
    here, there = ends

    def check():
        with pytest.raises(OSError):
            here.send("mine")
        with pytest.raises(OSError):
            there.receive(str)

    in_fork(check)
    here.send("ours")
    assert there.receive(str) == "ours"
