"""A checkpoint that is rewritten while it is read gives one version, whole, or an error that names the file."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

import sync
from sync import checkpoint, file_snapshot
from sync.errors import ChecksumMismatch
from sync.source import read_source

NAMES = ["a", "b", "c"]
SIZE = 150_000
"""Elements of a tensor: two pieces of bytes that are read at once."""


def save(directory, version):
    """`a` and `b` in the first shard, `c` in the second; every value is `version`."""
    directory.mkdir(exist_ok=True)
    tensors = {name: torch.full((SIZE,), float(version)) for name in NAMES}
    (directory / "config.json").write_text(json.dumps({"version": "x" * version}))
    save_file({name: tensors[name] for name in "ab"}, directory / "1.safetensors")
    save_file({"c": tensors["c"]}, directory / "2.safetensors")
    weight_map = {"a": "1.safetensors", "b": "1.safetensors", "c": "2.safetensors"}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map, "v": "x" * version}))
    return directory


@pytest.fixture
def old(tmp_path):
    return save(tmp_path / "old", 1)


@pytest.fixture
def new(tmp_path):
    return save(tmp_path / "new", 2)


def copy_over(source, target):
    """As `cp` does: the file is cut, then written."""
    target.write_bytes(source.read_bytes())


def write_over(source, target):
    with target.open("r+b") as file:
        file.write(source.read_bytes())


def cut(source, target):
    os.truncate(target, target.stat().st_size // 3)


def rename_over(source, target):
    os.replace(source, target)


def write_over_and_set_times_back(source, target):
    before = target.stat()
    write_over(source, target)
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))


def remove(source, target):
    target.unlink()


CHANGES = {
    change.__name__: change
    for change in (copy_over, write_over, cut, rename_over, write_over_and_set_times_back, remove)
}
FILES = ["config.json", "model.safetensors.index.json", "1.safetensors", "2.safetensors"]


class AfterReads:
    """Calls `act` once, after the `count`-th read of the files of a checkpoint that has been opened."""

    def __init__(self, monkeypatch, count, act):
        self.left, self._act, self._is_open = count, act, False
        self._read, self._open = os.preadv, checkpoint.open_snapshot
        monkeypatch.setattr(os, "preadv", self.read)
        monkeypatch.setattr(checkpoint, "open_snapshot", self.open)

    def open(self, *arguments):
        result = self._open(*arguments)
        self._is_open = True
        return result

    def read(self, *arguments):
        result = self._read(*arguments)
        if self._is_open:
            self.left -= 1
            if self.left == 0:
                self._act()
        return result


def offer(directory):
    """The values that arrive."""
    sender = sync.make_sender("inproc")
    manifest = sender.offer(directory, 1, {})
    shadow = {spec.name: torch.zeros(spec.shape) for spec in manifest.tensors}
    arrivals = sync.make_receiver("inproc", sender=sender).receive_into(shadow, manifest)
    assert all(arrivals[spec.name].digest == spec.digest for spec in manifest.tensors)
    return {float(value) for tensor in shadow.values() for value in tensor.unique()}


NUM_READS = 5 + 2 * 2 * len(NAMES)
"""Two headers in two parts and the configuration, then each tensor in two pieces, twice."""


def test_what_is_read_is_what_is_there(old, monkeypatch):
    reads = AfterReads(monkeypatch, NUM_READS + 1, lambda: None)
    assert offer(old) == {1.0} and reads.left == 1


@pytest.mark.quick(9)
@pytest.mark.parametrize("count", [1, 8, NUM_READS])
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_at_any_point_of_the_reading_is_named(old, new, monkeypatch, change, name, count):
    AfterReads(monkeypatch, count, lambda: CHANGES[change](new / name, old / name))
    with pytest.raises(ChecksumMismatch, match=f"{name} .* while it was read. Nothing of it was used"):
        offer(old)


@pytest.mark.parametrize("transport", ["store", "shm"])
def test_a_file_cut_while_a_sender_reads_it_is_an_error(old, tmp_path, monkeypatch, transport):
    sender = sync.make_sender(transport, directory=tmp_path / "elsewhere")
    AfterReads(monkeypatch, 6, lambda: cut(None, old / "2.safetensors"))
    with pytest.raises(ChecksumMismatch, match=r"2\.safetensors changed its size from \d+ to \d+ bytes"):
        sender.offer(old, 1, {})
    sender.close()


def test_shards_that_are_exchanged_while_they_are_opened_are_opened_again(old, new, monkeypatch):
    real = file_snapshot.SnapshotFile

    def open_and_exchange(path):
        file = real(path)
        if path.name == "1.safetensors" and new.exists():
            for name in FILES:
                os.replace(new / name, old / name)
            new.rmdir()
        return file

    monkeypatch.setattr(checkpoint, "SnapshotFile", open_and_exchange)
    assert offer(old) == {2.0}


def test_files_that_never_rest_are_refused(old, monkeypatch):
    real = file_snapshot.SnapshotFile

    def open_and_touch(path):
        os.utime(path)
        return real(path)

    monkeypatch.setattr(checkpoint, "SnapshotFile", open_and_touch)
    monkeypatch.setattr(file_snapshot, "_PATIENCE_NS", 50_000_000)
    with pytest.raises(ChecksumMismatch, match="is being rewritten: .* sync.publish is atomic"):
        read_source(old)


def test_a_save_that_was_broken_off_is_told_in_the_log(old, new, caplog):
    index = (old / "model.safetensors.index.json").stat()
    os.utime(old / "2.safetensors", ns=(0, index.st_mtime_ns + 10**9))
    os.utime(old / "1.safetensors", ns=(0, index.st_mtime_ns))
    offer(old)
    (record,) = caplog.records
    assert "2.safetensors is newer than model.safetensors.index.json and 1.safetensors is older" in record.message


def test_a_finished_save_is_not_remarked_upon(old, caplog):
    offer(old)
    assert not caplog.records
