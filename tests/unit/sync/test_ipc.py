"""The ipc transport's protocol, with memory of the host in place of the device's."""

import threading
import time

import msgspec
import pytest
import torch
import zmq

from sync.errors import ManifestMismatch, SyncError, TransferTimeout
from sync.ipc import HandleReceiver, HandleSender
from sync.ipc_channel import Filled, InPlaceTensor, Request, Taken
from tests.unit.sync.host_memory import HostMemory, shared
from tests.unit.sync.receiving import Receiving

WEIGHTS = {f"w{i}": torch.full((100,), float(i)) for i in range(10)} | {"none": torch.empty(0)}


@pytest.fixture
def ends(tmp_path):
    directory = tmp_path / "ipc"
    sender = HandleSender(directory, HostMemory(tmp_path), timeout=60.0, bucket_bytes=1000)
    receiver = HandleReceiver(directory, HostMemory(tmp_path), timeout=60.0)
    yield sender, receiver
    receiver.close()
    sender.close()


def push(sender, receiver, source, version=1):
    manifest = sender.offer(source, version, {})
    receiving = Receiving(receiver, manifest)
    sender.send()
    receiving.join()
    assert receiving.problem is None
    assert {n: t.tolist() for n, t in receiving.tensors.items()} == {n: t.tolist() for n, t in source.items()}


def await_request(sender, timeout):
    """Until an engine's request has come; from here on the sender waits no longer than `timeout`."""
    assert sender.channel._is_ready(zmq.POLLIN, 60.0)
    sender.channel._timeout = timeout


def test_buffers_are_opened_once_and_again_when_they_had_to_grow(ends):
    sender, receiver = ends
    opened = []
    for version, size in enumerate([1.0, 1.0, 1.0], start=1):
        push(sender, receiver, {name: tensor + size for name, tensor in WEIGHTS.items()}, version)
        opened.append(receiver._memory.num_opened)
    push(sender, receiver, {"large": torch.arange(5000)}, 4)
    push(sender, receiver, WEIGHTS, 5)
    assert [*opened, receiver._memory.num_opened] == [2, 2, 2, 4]


def test_nothing_at_all_is_delivered_too(ends):
    push(*ends, {})


def test_what_lies_in_shared_memory_in_its_form_is_read_there(ends):
    sender, receiver = ends
    one, two = shared(sender._memory, torch.arange(100.0), torch.arange(50).int())
    (other,) = shared(sender._memory, torch.ones(3, 4, dtype=torch.bfloat16))
    source = {"one": one, "two": two, "other": other, "nothing": torch.empty(0)}
    manifest = sender.offer(source, 1, {})
    placed = []
    sender._held[0].copy = lambda i, out: placed.append(i)
    receiving = Receiving(receiver, manifest)
    sender.send()
    receiving.join()
    assert receiving.problem is None and placed == [3], "only what is empty has no memory to share"
    assert all(torch.equal(receiving.tensors[name], tensor) for name, tensor in source.items())
    one += 5
    push(sender, receiver, {"one": one, "other": other}, 2)
    push(sender, receiver, {"two": two}, 3)
    assert receiver._memory.num_opened == 2 + 2, "two buffers, and two memories, each once"


def test_what_is_cast_strided_or_elsewhere_is_packed_beside_it(ends):
    sender, receiver = ends
    whole, cast, strided = shared(sender._memory, torch.arange(600.0), torch.rand(300), torch.rand(20, 30))
    source = {"whole": whole, "cast": cast, "strided": strided.t(), "elsewhere": torch.arange(300.0)}
    manifest = sender.offer(source, 1, {"cast": ("bfloat16", (300,))})
    receiving = Receiving(receiver, manifest)
    sender.send()
    receiving.join()
    assert receiving.problem is None
    assert all(torch.equal(receiving.tensors[n], t) for n, t in (source | {"cast": cast.bfloat16()}).items())


@pytest.mark.parametrize(
    "place",
    [
        InPlaceTensor("unknown", 2, 0),
        InPlaceTensor("w", 3, 0),
        InPlaceTensor("w", -1, 0),
        InPlaceTensor("w", 2, -4),
        InPlaceTensor("w", 2, 2),
        InPlaceTensor("w", 2, 4),
    ],
)
def test_a_place_where_nothing_can_lie_is_refused(ends, place):
    sender, receiver = ends
    source = dict(zip("w", shared(sender._memory, torch.arange(10.0)), strict=True))
    manifest = sender.offer(source, 1, {})
    make = sender._share
    sender._share = lambda transfer, in_place: msgspec.structs.replace(make(transfer, in_place), in_place=[place])
    receiving = Receiving(receiver, manifest)
    with pytest.raises(SyncError, match="The engine took no more of the weights: The trainer shares"):
        sender.send()
    receiving.join()
    assert "The trainer shares" in str(receiving.problem) and not receiving.tensors


def test_a_bucket_is_taken_out_while_the_one_before_it_still_is(ends):
    """Its buffer is given back once that is done, not before; and a bucket is told of once it is packed."""
    sender, receiver = ends
    trace = receiver._memory.trace
    told = receiver.channel.send
    receiver.channel.send = lambda message: (
        trace.append((type(message).__name__, getattr(message, "k", 0))) or told(message)
    )
    packed, tell = sender._memory.trace, sender.channel.send
    sender.channel.send = lambda message: (
        packed.append((type(message).__name__, getattr(message, "k", 0))) or tell(message)
    )
    push(sender, receiver, {f"w{i}": torch.full((250,), float(i)) for i in range(3)})
    assert receiver._memory.trace == [
        *[("Request", 0), ("mark", 0), ("mark", 1), ("wait", 0), ("Taken", 0), ("mark", 2), ("wait", 1), ("Taken", 1)],
        *[("mark", 3), ("wait", 3), ("wait", 2), ("Taken", 2), ("Done", 0)],
    ]
    assert sender._memory.trace == [
        *[("mark", 0), ("wait", 0), ("Shared", 0), ("mark", 1), ("wait", 1), ("Filled", 0)],
        *[("mark", 2), ("wait", 2), ("Filled", 1), ("mark", 3), ("wait", 3), ("Filled", 2)],
    ]


def test_another_version_than_the_one_on_offer_is_refused_on_both_sides(ends):
    sender, receiver = ends
    old = sender.offer(WEIGHTS, 1, {})
    sender.offer({name: tensor + 1 for name, tensor in WEIGHTS.items()}, 2, {})
    receiving = Receiving(receiver, old)
    with pytest.raises(ManifestMismatch, match="Version 1 is not, or no longer, on offer: version 2 is"):
        sender.send()
    receiving.join()
    assert isinstance(receiving.problem, ManifestMismatch)
    push(sender, receiver, WEIGHTS, 3)


def test_an_engine_on_another_device_is_refused_with_advice(ends):
    sender, receiver = ends
    receiver._memory.name = "another"
    receiving = Receiving(receiver, sender.offer(WEIGHTS, 1, {}))
    with pytest.raises(ManifestMismatch, match="different devices: use 'nccl'"):
        sender.send()
    receiving.join()
    assert isinstance(receiving.problem, ManifestMismatch)


@pytest.mark.parametrize("stop_after", [1, 5, 11])
def test_an_engine_that_broke_off_may_start_over(ends, stop_after):
    sender, receiver = ends
    manifest = sender.offer(WEIGHTS, 1, {})
    receiving = Receiving(receiver, manifest, stop_after)
    with pytest.raises(SyncError, match="The engine took no more of the weights: its update was ended"):
        sender.send()
    receiving.join()
    push(sender, receiver, WEIGHTS, 2)


def test_a_request_that_was_given_up_is_passed_over(ends):
    sender, receiver = ends
    manifest = sender.offer(WEIGHTS, 1, {})
    receiver.channel._timeout = 0.1
    with pytest.raises(TransferTimeout):
        next(receiver.receive(manifest))
    receiver.channel._timeout = 60.0
    receiving = Receiving(receiver, manifest)
    first = [sender.channel._receive_message() for _ in range(2)]  # it is not read before both have come
    is_ready, received = sender.channel._is_ready, sender.channel._receive_message
    sender.channel._is_ready = lambda *args: True if first else is_ready(*args)
    sender.channel._receive_message = lambda: first.pop(0) if first else received()
    sender.send()
    receiving.join()
    assert receiving.problem is None and receiving.tensors.keys() == WEIGHTS.keys()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x80\x04cos\nsystem\n(S'false'\ntR.",
        msgspec.msgpack.encode(Request(1, 1, "digest", "memory")).replace(b"digest", b"dig\xffst"),
        msgspec.msgpack.encode({"type": "Request", "transfer": 1, "version": "1", "digest": "", "memory": ""}),
        msgspec.msgpack.encode({"type": "Request", "transfer": 1, "version": 1, "digest": "", "memory": "", "more": 1}),
        msgspec.msgpack.encode(Filled(1, 1)),
        msgspec.msgpack.encode(Taken(1, 1)),
    ],
)
def test_a_frame_that_is_no_request_is_counted_and_dropped(ends, frame):
    sender, receiver = ends
    receiver.channel._socket.send(frame)
    push(sender, receiver, WEIGHTS)
    assert sender.channel.num_dropped == 1


def test_a_buffer_smaller_than_its_bucket_is_refused(ends, tmp_path):
    sender, receiver = ends
    manifest = sender.offer(WEIGHTS, 1, {})
    receiver._memory.open = lambda handle: torch.zeros(10, dtype=torch.uint8)
    receiving = Receiving(receiver, manifest)
    with pytest.raises(SyncError, match="bytes 0 to 400 of 10 as 'w0'"):
        sender.send()
    receiving.join()
    assert "The trainer shares bytes 0 to 400 of 10 as 'w0'" in str(receiving.problem)


def test_a_trainer_that_never_sends_is_a_timeout(ends):
    sender, receiver = ends
    receiver.channel._timeout = 0.1
    with pytest.raises(TransferTimeout, match="silent for 0.1 s"):
        next(receiver.receive(sender.offer(WEIGHTS, 1, {})))


def test_without_an_offer_nothing_is_sent(ends):
    with pytest.raises(SyncError, match="Nothing is on offer"):
        ends[0].send()


@pytest.mark.parametrize("options", [{"timeout": 0}, {"bucket_bytes": 0}, {"bucket_bytes": True}])
def test_what_cannot_be_is_refused(tmp_path, options):
    with pytest.raises(SyncError, match="is not allowed"):
        HandleSender(tmp_path / "ipc", HostMemory(tmp_path), **{"timeout": 1.0, "bucket_bytes": 10} | options)


def test_a_directory_open_to_others_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(SyncError, match="others have rights to it .mode 0755; chmod 0700"):
        HandleSender(tmp_path, HostMemory(tmp_path), timeout=1.0, bucket_bytes=10)


def test_a_second_trainer_in_the_directory_is_refused(ends, tmp_path):
    with pytest.raises(SyncError, match="cannot meet"):
        HandleSender(tmp_path / "ipc", HostMemory(tmp_path), timeout=1.0, bucket_bytes=10)
    push(*ends, WEIGHTS)


def test_the_engine_first_sends_a_request(ends):
    sender, receiver = ends
    manifest = sender.offer(WEIGHTS, 7, {})
    receiver.channel._timeout = 0.01
    with pytest.raises(TransferTimeout):
        next(receiver.receive(manifest))
    request = sender.channel.expect(Request)
    assert (request.version, request.digest, request.memory) == (7, manifest.digest, "host")


def test_frames_that_never_end_do_not_move_the_deadline(ends):
    """A peer that sends garbage without a pause is silent all the same."""
    sender, receiver = ends
    left = iter(range(100_000))

    def one_more(events, seconds):
        next(left)
        time.sleep(0.001)
        return True

    sender.channel._is_ready, sender.channel._receive_message = one_more, lambda: None
    sender.channel._timeout = 0.2
    sender.offer(WEIGHTS, 1, {})
    with pytest.raises(TransferTimeout, match="was silent for 0.2 s"):
        sender.send()
    assert sender.channel.num_dropped > 0


@pytest.mark.parametrize("end", ["sender", "receiver"])
def test_a_socket_is_not_closed_while_another_thread_waits_at_it(ends, end, monkeypatch):
    sender, receiver = ends
    manifest = sender.offer(WEIGHTS, 1, {})
    channel = (sender if end == "sender" else receiver).channel
    waiting, at_it, poll, close = threading.Event(), [], zmq.Poller.poll, zmq.Socket.close
    closed_beside = []

    def noted_poll(*args):
        at_it.append(threading.get_ident())
        waiting.set()
        try:
            return poll(*args)
        finally:
            at_it.clear()

    monkeypatch.setattr(zmq.Poller, "poll", noted_poll)
    monkeypatch.setattr(zmq.Socket, "close", lambda *args: closed_beside.append([*at_it]) or close(*args))
    problems = []

    def run():
        try:
            channel.expect(Request) if end == "sender" else list(receiver.receive(manifest))
        except SyncError as problem:
            problems.append(str(problem))

    thread = threading.Thread(target=run)
    thread.start()
    assert waiting.wait(60)
    channel.close()
    thread.join(60)
    assert not thread.is_alive() and problems == ["This end of the weight transport was closed."]
    assert closed_beside == [[]] and channel._context.closed


def test_a_closed_channel_raises_and_may_be_closed_again(ends):
    sender, receiver = ends
    for _ in range(2):
        receiver.close()
    assert receiver.channel._socket.closed and receiver.channel._context.closed
    with pytest.raises(SyncError, match="was closed"):
        next(receiver.receive(sender.offer(WEIGHTS, 1, {})))


@pytest.mark.parametrize("changes", [{"handles": []}, {"bucket_bytes": 0}, {"bucket_bytes": -5}])
def test_memory_that_cannot_hold_buckets_is_refused(ends, changes):
    sender, receiver = ends
    manifest = sender.offer(WEIGHTS, 1, {})
    make = sender._share
    sender._share = lambda transfer, in_place: msgspec.structs.replace(make(transfer, in_place), **changes)
    receiving = Receiving(receiver, manifest)
    with pytest.raises(SyncError, match="The engine took no more of the weights"):
        sender.send()
    receiving.join()
    assert isinstance(receiving.problem, SyncError) and not receiving.tensors


def test_memory_that_cannot_be_opened_is_told_to_the_trainer_at_once(ends):
    sender, receiver = ends

    def refuse(handle):
        raise SyncError("no rights")

    receiver._memory.open = refuse
    receiving = Receiving(receiver, sender.offer(WEIGHTS, 1, {}))
    with pytest.raises(SyncError, match="The engine took no more of the weights: no rights"):
        sender.send()
    receiving.join()
    assert str(receiving.problem) == "no rights" and not receiving.tensors


def test_memory_is_closed_by_its_own_way_and_copies_are_awaited_where_an_update_breaks_off(ends):
    sender, receiver = ends
    push(sender, receiver, WEIGHTS)
    push(sender, receiver, {"large": torch.arange(5000)}, 2)
    assert receiver._memory.num_closed == 2, "the smaller buffers"
    receiver._memory.trace.clear()
    receiving = Receiving(receiver, sender.offer(WEIGHTS, 3, {}), stop_after=1)
    with pytest.raises(SyncError):
        sender.send()
    receiving.join()
    assert receiver._memory.trace == [("mark", 0), ("wait", 0)]
    receiver.close()
    assert (receiver._memory.num_closed, receiver._memory.num_kept) == (4, 0), "nobody else holds it"


def test_a_device_that_never_ends_its_copies_ends_the_wait(ends):
    sender, receiver = ends
    sender._memory.mark = lambda: lambda seconds: False
    receiver.channel._timeout = 1.0
    receiving = Receiving(receiver, sender.offer(WEIGHTS, 1, {}))
    with pytest.raises(TransferTimeout, match="The device has not copied weights within 60 s"):
        sender.send()
    receiving.join()
    assert isinstance(receiving.problem, TransferTimeout)
