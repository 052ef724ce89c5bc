"""Shared memory holds one version at a time, whole."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sync
from sync import shm
from sync.errors import ChecksumMismatch, GatherFailed, SyncError

ROOT = Path(__file__).parents[3]


@pytest.fixture
def directory(tmp_path):
    return tmp_path / "shm"


@pytest.fixture
def ends(directory):
    sender = sync.make_sender("shm", directory=directory)
    yield sender, sync.make_receiver("shm", directory=directory)
    sender.close()


def weights(value, size=1000):
    return {"a": torch.full((size,), float(value)), "b": torch.full((3, 3), float(value))}


def test_tensors_are_views_of_one_mapping_that_persists(ends):
    sender, receiver = ends
    places = []
    for version in (1, 2, 3):
        manifest = sender.offer(weights(version), version, {})
        places.append([tensor.data_ptr() for _, tensor in receiver.receive(manifest)])
    assert places[0] == places[1] == places[2]
    assert places[0][1] - places[0][0] == 4032  # 4000 bytes, to the next multiple of 64


def memory(directory):
    """The path by which others open the memory that is announced in `directory`."""
    announced = json.loads((directory / "weights").read_bytes())
    return Path(f"/proc/{announced['pid']}/fd/{announced['descriptor']}")


def test_the_memory_grows_and_never_shrinks(ends, directory):
    sender, receiver = ends
    sizes = []
    for version, size in enumerate([1000, 9000, 10], start=1):
        manifest = sender.offer(weights(version, size), version, {})
        assert all((tensor == version).all() for _, tensor in receiver.receive(manifest))
        sizes.append(memory(directory).stat().st_size)
    assert sizes[0] < sizes[1] == sizes[2]


def test_an_offer_while_the_last_is_received_is_noticed(ends):
    sender, receiver = ends
    receiving = receiver.receive(sender.offer(weights(1), 1, {}))
    next(receiving)
    sender.offer(weights(2), 2, {})
    with pytest.raises(ChecksumMismatch, match="Version 1 was overwritten while it was received"):
        list(receiving)


def test_an_offer_that_broke_off_cannot_be_received(ends):
    sender, receiver = ends
    manifest = sender.offer(weights(1), 1, {})
    with pytest.raises(GatherFailed, match="no such luck"):
        sender.offer([("a", torch.ones(1000)), ("b", Unreadable(torch.ones(3, 3)))], 2, {})
    with pytest.raises(SyncError, match="holds nothing complete, not version 1"):
        list(receiver.receive(manifest))


class Unreadable(torch.Tensor):
    """Its values cannot be had."""

    def full_tensor(self):
        raise RuntimeError("no such luck")


def test_two_trainers_at_once_are_refused(ends, directory):
    with pytest.raises(SyncError, match="Another trainer sends weights"):
        sync.make_sender("shm", directory=directory)


def test_what_a_killed_trainer_left_is_taken_over(directory):
    lines = ["import sync, torch, os, signal, sys", "sender = sync.make_sender('shm', directory=sys.argv[1])"]
    lines += ["sender.offer({'a': torch.ones(5)}, 1, {})", "os.kill(os.getpid(), signal.SIGKILL)"]
    command = [sys.executable, "-c", "\n".join(lines), str(directory)]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert (directory / "weights").exists()
    sender = sync.make_sender("shm", directory=directory)
    manifest = sender.offer(weights(2), 1, {})
    assert all((tensor == 2).all() for _, tensor in sync.make_receiver("shm", directory=directory).receive(manifest))
    sender.close()
    assert not list(directory.iterdir())


def test_a_directory_open_to_others_is_refused(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    with pytest.raises(SyncError, match="others have rights to it .mode 0755; chmod 0700"):
        sync.make_sender("shm", directory=tmp_path / "shared")


def test_a_link_in_place_of_the_file_is_refused(tmp_path, directory):
    directory.mkdir(mode=0o700)
    (directory / "weights").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SyncError, match="cannot be opened"):
        sync.make_sender("shm", directory=directory)
    manifest = sync.make_sender("inproc").offer(weights(1), 1, {})
    with pytest.raises(SyncError, match="No sender offers weights"):
        list(sync.make_receiver("shm", directory=directory).receive(manifest))


def test_without_room_the_offer_is_refused(ends, monkeypatch):
    def full(file, offset, length):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SyncError, match="No room for .* No space left on device"):
        ends[0].offer(weights(1), 1, {})


def test_a_manifest_larger_than_the_memory_is_refused(ends):
    sender, receiver = ends
    sender.offer(weights(1), 1, {})
    other = sync.make_sender("inproc").offer(weights(1, size=10_000), 1, {})
    with pytest.raises(SyncError, match="the manifest needs"):
        list(receiver.receive(other))


@pytest.mark.parametrize(
    "content",
    [
        b"\xff" * 8,
        (300).to_bytes(8, "little"),
        (4).to_bytes(8, "little") + b"\x80\x04..",
        (4).to_bytes(8, "little") + b"\x81\xa1\xff\x01",
    ],
)
def test_a_header_that_is_none_is_refused(ends, directory, content):
    sender, receiver = ends
    manifest = sender.offer(weights(1), 1, {})
    with memory(directory).open("r+b") as file:
        file.write(content)
    with pytest.raises(SyncError, match="holds nothing complete"):
        list(receiver.receive(manifest))


def test_nobody_can_cut_memory_that_is_mapped(ends, directory):
    sender, receiver = ends
    receiving = receiver.receive(sender.offer(weights(1), 1, {}))
    with pytest.raises(OSError, match="not permitted"), memory(directory).open("r+b") as file:
        file.truncate(0)
    assert all((tensor == 1).all() for _, tensor in receiving)


@pytest.mark.parametrize("content", [b"", b"{}", b'{"pid":1,"descriptor":99999,"inode":1}', b"\xff" * 5000])
def test_a_file_that_announces_no_memory_is_refused_and_mended_by_the_next_offer(ends, directory, content):
    sender, receiver = ends
    manifest = sender.offer(weights(1), 1, {})
    (directory / "weights").write_bytes(content)
    with pytest.raises(SyncError, match="announces no weights|cannot be opened|at most 4096 are read"):
        list(receiver.receive(manifest))
    manifest = sender.offer(weights(2), 2, {})
    assert all((tensor == 2).all() for _, tensor in receiver.receive(manifest))


def test_memory_that_could_be_cut_is_refused(ends, directory, tmp_path):
    sender, receiver = ends
    manifest = sender.offer(weights(1), 1, {})
    with (tmp_path / "plain").open("wb") as file:
        file.write(memory(directory).read_bytes())
        file.flush()
        place = {"pid": os.getpid(), "descriptor": file.fileno(), "inode": os.fstat(file.fileno()).st_ino}
        (directory / "weights").write_text(json.dumps(place))
        with pytest.raises(SyncError, match="is not what was announced"):
            list(receiver.receive(manifest))


def test_more_than_is_available_is_refused(ends, monkeypatch):
    monkeypatch.setattr(shm.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    with pytest.raises(SyncError, match="No room for .* Cannot allocate memory"):
        ends[0].offer(weights(1), 1, {})


def test_a_closed_sender_offers_no_more(ends):
    sender, _ = ends
    sender.close()
    sender.close()
    with pytest.raises(SyncError, match="closed"):
        sender.offer(weights(1), 1, {})


def test_a_pipe_in_place_of_the_announcement_is_refused_at_once(ends, directory):
    sender, receiver = ends
    manifest = sender.offer(weights(1), 1, {})
    (directory / "weights").unlink()
    os.mkfifo(directory / "weights")
    with pytest.raises(SyncError, match="weights: it is a named pipe, not a regular file"):
        list(receiver.receive(manifest))


def test_a_pipe_in_place_of_the_memory_is_refused_at_once(ends, directory, tmp_path):
    """Opening it again, to read, would wait for somebody who writes."""
    sender, receiver = ends
    manifest = sender.offer(weights(1), 1, {})
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    place = {"pid": os.getpid(), "descriptor": pipe, "inode": os.fstat(pipe).st_ino}
    (directory / "weights").write_text(json.dumps(place))
    with pytest.raises(SyncError, match="is not what was announced"):
        list(receiver.receive(manifest))
    os.close(pipe)


def test_memory_too_large_to_map_is_refused(ends, directory):
    sender, receiver = ends
    manifest = sender.offer(weights(1), 1, {})
    os.truncate(memory(directory), 2**62)
    with pytest.raises(SyncError, match="The sender's memory cannot be mapped"):
        list(receiver.receive(manifest))
