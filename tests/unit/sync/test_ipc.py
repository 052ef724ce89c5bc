"""The ipc transport's protocol, with memory of the host in place of the device's."""

import mmap
import time

import msgspec
import pytest
import torch

import sync
from sync.errors import ManifestMismatch, SyncError, TransferTimeout
from sync.ipc import Filled, HandleReceiver, HandleSender, MemoryHandle, Taken, Want
from tests.unit.sync.receiving import Receiving

WEIGHTS = {f"w{i}": torch.full((100,), float(i)) for i in range(10)} | {"none": torch.empty(0)}


class HostMemory:
    """Buffers as files; a handle is a file's name."""

    name = "host"

    def __init__(self, directory):
        self.directory, self.names, self.num_opened = directory, {}, 0

    def allocate(self, num_bytes):
        path = self.directory / f"buffer{len(self.names)}"
        path.write_bytes(bytes(num_bytes))
        buffer = self._map(path)
        self.names[buffer.data_ptr()] = path.name
        return buffer

    def export(self, buffer):
        return MemoryHandle(self.names[buffer.data_ptr()].encode(), buffer.numel(), 0, b"", 0, b"", False)

    def open(self, handle):
        self.num_opened += 1
        return self._map(self.directory / handle.storage.decode())

    def settle(self):
        pass

    def _map(self, path):
        with path.open("r+b") as file:
            return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)


@pytest.fixture
def ends(tmp_path):
    directory = tmp_path / "ipc"
    sender = HandleSender(directory, HostMemory(tmp_path), timeout=5.0, bucket_bytes=1000)
    receiver = HandleReceiver(directory, HostMemory(tmp_path), timeout=5.0)
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
    sender.channel._timeout = 0.2
    manifest = sender.offer(WEIGHTS, 1, {})
    receiving = Receiving(receiver, manifest, stop_after)
    with pytest.raises(TransferTimeout, match="silent for 0.2 s"):
        sender.send()
    receiving.join()
    sender.channel._timeout = 5.0
    push(sender, receiver, WEIGHTS, 2)


def test_a_request_that_was_given_up_is_passed_over(ends):
    sender, receiver = ends
    manifest = sender.offer(WEIGHTS, 1, {})
    receiver.channel._timeout = 0.1
    with pytest.raises(TransferTimeout):
        next(receiver.receive(manifest))
    receiver.channel._timeout = 5.0
    receiving = Receiving(receiver, manifest)
    time.sleep(0.2)
    sender.send()
    receiving.join()
    assert receiving.problem is None and receiving.tensors.keys() == WEIGHTS.keys()


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x80\x04cos\nsystem\n(S'false'\ntR.",
        msgspec.msgpack.encode(Want(1, 1, "digest", "memory")).replace(b"digest", b"dig\xffst"),
        msgspec.msgpack.encode({"type": "Want", "transfer": 1, "version": "1", "digest": "", "memory": ""}),
        msgspec.msgpack.encode({"type": "Want", "transfer": 1, "version": 1, "digest": "", "memory": "", "more": 1}),
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
    sender.channel._timeout = 0.5
    receiver._memory.open = lambda handle: torch.zeros(10, dtype=torch.uint8)
    receiving = Receiving(receiver, manifest)
    with pytest.raises(TransferTimeout):
        sender.send()
    receiving.join()
    assert "The trainer's buffer has 10 bytes" in str(receiving.problem)


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
    with pytest.raises(SyncError, match="mode 0700"):
        HandleSender(tmp_path, HostMemory(tmp_path), timeout=1.0, bucket_bytes=10)


def test_a_second_trainer_in_the_directory_is_refused(ends, tmp_path):
    with pytest.raises(SyncError, match="cannot meet"):
        HandleSender(tmp_path / "ipc", HostMemory(tmp_path), timeout=1.0, bucket_bytes=10)
    push(*ends, WEIGHTS)


def test_the_wire_says_want_before_anything_else(ends):
    sender, receiver = ends
    manifest = sender.offer(WEIGHTS, 7, {})
    receiver.channel._timeout = 0.01
    with pytest.raises(TransferTimeout):
        next(receiver.receive(manifest))
    want = sender.channel.expect(Want)
    assert (want.version, want.digest, want.memory) == (7, manifest.digest, "host")
    assert sync.ipc.Want is Want
