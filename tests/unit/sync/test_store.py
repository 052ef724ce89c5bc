"""A published version is read whole or not at all."""

import os
import shutil
import threading

import pytest
import torch
from tensordict import TensorDict

import sync
from sync.errors import ChecksumMismatch, ManifestMismatch, StaleVersion, SyncError
from sync.manifest import describe
from sync.offer import Offer


def weights(value=1.0):
    return {
        "embed.weight": torch.full((50, 8), value),
        "norm": torch.full((8,), value).bfloat16(),
        "steps": torch.tensor(int(value)),
        "nothing": torch.empty(0, 4),
    }


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def versions(store):
    return sorted(path.name for path in (store / "versions").iterdir())


def current(store):
    with sync.open_current(store) as published:
        return published.version, float(published.tensors["embed.weight"][0, 0])


@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_is_published_is_what_is_opened(store, num_threads):
    source = weights()
    manifest = sync.publish(store, source, 3, num_threads=num_threads)
    with sync.open_current(store, num_threads=num_threads) as published:
        assert (published.version, published.digest, published.manifest) == (3, manifest.digest, manifest)
        assert {name: describe(name, t) for name, t in published.tensors.items()} == {
            name: describe(name, t) for name, t in source.items()
        }


def test_a_version_is_a_memory_mapped_tensordict_too(store):
    source = weights()
    sync.publish(store, source, 1)
    loaded = TensorDict.load_memmap(store / "versions" / "000001")
    assert all(torch.equal(loaded[name], tensor) for name, tensor in source.items())


def test_tied_names_share_one_tensor(store):
    weight = torch.ones(3)
    sync.publish(store, {"embed": weight, "head": weight}, 1)
    with sync.open_current(store) as published:
        assert published.tensors["head"] is published.tensors["embed"]
    assert sync.publish(store.with_name("copy"), store, 1).aliases == [["embed", "head"]]


def test_floats_are_published_in_the_dtypes_asked_for(store):
    sync.publish(store, weights(), 1, metadata={"embed.weight": ("bfloat16", (50, 8)), "steps": ("float32", ())})
    with sync.open_current(store) as published:
        assert published.tensors["embed.weight"].dtype == torch.bfloat16
        assert published.tensors["steps"].dtype == torch.int64


def test_the_store_is_closed_to_other_users(store):
    sync.publish(store, weights(), 1)
    folders = [store, store / "versions", store / "versions" / "000001"]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in folders[2].iterdir()} == {0o600}


def test_an_old_version_becomes_the_next_when_nobody_reads_it(store):
    inodes = []
    for version in range(1, 6):
        sync.publish(store, weights(version), version)
        inodes.append((store / "versions" / f"{version:06d}" / "norm.memmap").stat().st_ino)
        assert len(versions(store)) <= 2
        assert current(store) == (version, version)
    assert inodes[2:] == [inodes[0], inodes[1], inodes[0]]


def test_a_recycled_version_keeps_nothing_of_the_old_one(store):
    sync.publish(store, weights() | {"old": torch.ones(9)}, 1)
    (store / "versions" / "000001" / "litter").mkdir()
    for version in (2, 3):
        sync.publish(store, weights(version) | {"norm": torch.ones(3)}, version)
    with sync.open_current(store) as published:
        assert published.version == 3 and "old" not in published.tensors and published.tensors["norm"].shape == (3,)


def test_a_leased_version_stays_as_it_is_while_others_are_published(store):
    sync.publish(store, weights(1), 1)
    with sync.open_current(store) as published:
        for version in range(2, 7):
            sync.publish(store, weights(version), version)
        assert {describe(name, tensor) for name, tensor in published.tensors.items()} == set(published.manifest.tensors)
        assert "000001" in versions(store)
    sync.publish(store, weights(7), 7)
    assert "000001" not in versions(store)


def test_a_tensor_held_after_close_keeps_its_values(store):
    sync.publish(store, weights(1), 1)
    with sync.open_current(store) as published:
        held = published.tensors["embed.weight"]
    with pytest.raises(SyncError, match="lease on version 1 is closed"):
        _ = published.tensors
    for version in range(2, 5):
        sync.publish(store, weights(version), version)
    assert (held == 1).all()
    del held
    sync.publish(store, weights(5), 5)
    assert versions(store) == ["000004", "000005"]


def test_writing_to_an_opened_tensor_changes_nothing_in_the_store(store):
    sync.publish(store, weights(1), 1)
    with sync.open_current(store) as published:
        published.tensors["embed.weight"].zero_()
    assert current(store) == (1, 1.0)


@pytest.mark.slow
def test_readers_see_whole_versions_while_others_are_published(store):
    sync.publish(store, weights(1), 1)
    seen, errors, done = [], [], threading.Event()

    def read():
        while not done.is_set():
            try:
                with sync.open_current(store) as published:
                    values = {float(t.flatten()[0]) for t in published.tensors.values() if t.numel()}
                    seen.append((float(published.version), values))
            except SyncError as problem:
                errors.append(problem)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    version = 1
    while version < 40 or len(seen) < 12 and not errors:
        version += 1
        sync.publish(store, weights(version), version)
    done.set()
    for reader in readers:
        reader.join()
    assert not errors
    assert all(values == {version} for version, values in seen)


def test_versions_move_forward_only(store):
    sync.publish(store, weights(5), 5)
    with pytest.raises(StaleVersion, match="Version 4 is older than version 5"):
        sync.publish(store, weights(4), 4)
    with pytest.raises(StaleVersion, match="Version 5 is published with other weights"):
        sync.publish(store, weights(4), 5)
    assert sync.publish(store, weights(5), 5).version == 5
    assert current(store) == (5, 5.0)


def test_a_trainer_that_restarted_may_go_back(store):
    for version in (5, 5, 3):
        sync.publish(store, weights(version + 0.5), version, reset_version=True)
        assert current(store) == (version, version + 0.5)


def test_two_trainers_at_once_are_refused(store):
    first = sync.make_sender("store", directory=store)
    first.offer(weights(1), 1, {})
    with pytest.raises(SyncError, match="Another trainer sends weights"):
        sync.make_sender("store", directory=store)
    with pytest.raises(SyncError, match="Another trainer sends weights"):
        sync.publish(store, weights(2), 2)
    first.offer(weights(2), 2, {})
    first.close()
    sync.publish(store, weights(3), 3)
    assert current(store) == (3, 3.0)


def test_what_is_no_store_is_refused_with_advice(tmp_path):
    with pytest.raises(ManifestMismatch, match="is not a published store"):
        sync.open_current(tmp_path)
    with pytest.raises(ManifestMismatch, match="nowhere does not exist"):
        sync.open_current(tmp_path / "nowhere")
    TensorDict(weights(), []).memmap(tmp_path / "bare")
    with pytest.raises(ManifestMismatch, match=r"bare memory-mapped TensorDict.*sync\.publish"):
        sync.open_current(tmp_path / "bare")
    with pytest.raises(ManifestMismatch, match="bare memory-mapped TensorDict"):
        sync.publish(tmp_path / "store", tmp_path / "bare", 1)


@pytest.mark.parametrize("name", ["a/b", "../up", ".hidden", "x" * 300])
def test_a_name_that_is_no_file_name_is_refused(store, name):
    sync.publish(store, weights(1), 1)
    with pytest.raises(ManifestMismatch, match="cannot be the name of a published tensor"):
        sync.publish(store, {name: torch.ones(1)}, 2)
    assert current(store) == (1, 1.0)


class FullDisk:
    """`os.pwrite` and `os.posix_fallocate` that fail once `num_bytes` have been written or promised."""

    def __init__(self, monkeypatch, num_bytes):
        self.left = num_bytes
        self._pwrite, self._allocate = os.pwrite, os.posix_fallocate
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "posix_fallocate", self.allocate)

    def pwrite(self, file, content, offset):
        self._take(len(content))
        return self._pwrite(file, content, offset)

    def allocate(self, file, offset, length):
        self._take(length)
        return self._allocate(file, offset, length)

    def _take(self, num_bytes):
        self.left -= num_bytes
        if self.left < 0:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("num_bytes", [0, 1000, 1620, 3000, 3400])
def test_a_full_disk_leaves_the_old_version_and_no_litter(store, monkeypatch, num_bytes):
    sync.publish(store, weights(1), 1)
    with monkeypatch.context() as patch:
        FullDisk(patch, num_bytes)
        with pytest.raises(SyncError, match="No space left on device; version 1 is still current"):
            sync.publish(store, weights(2), 2)
    assert versions(store) == ["000001"]
    assert current(store) == (1, 1.0)
    sync.publish(store, weights(2), 2)
    assert current(store) == (2, 2.0)


def test_a_store_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SyncError, match="cannot be published to"):
        sync.publish(tmp_path / "file" / "store", weights(), 1)


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    os.truncate(path, path.stat().st_size - 1)


def grow(path):
    os.truncate(path, path.stat().st_size + 1)


def link(path):
    shutil.move(path, path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def link_the_directory(version):
    shutil.move(version, version.parent.parent / "elsewhere")
    version.symlink_to(version.parent.parent / "elsewhere")


def rewrite(name, old, new):
    def damage(version):
        content = (version / name).read_bytes()
        assert old in content
        (version / name).write_bytes(content.replace(old, new))

    return damage


DAMAGES = {
    "missing tensor": lambda version: (version / "norm.memmap").unlink(),
    "truncated tensor": lambda version: cut(version / "norm.memmap"),
    "grown tensor": lambda version: grow(version / "norm.memmap"),
    "flipped bit": lambda version: flip_a_bit(version / "embed.weight.memmap"),
    "extra tensor": lambda version: (version / "extra.memmap").write_bytes(b"1234"),
    "symlinked tensor": lambda version: link(version / "norm.memmap"),
    "symlinked manifest": lambda version: link(version / "manifest.json"),
    "symlinked lease": lambda version: link(version / "lease"),
    "symlinked version": link_the_directory,
    "pickle inside": lambda version: (version / "other.pickle").write_bytes(b"cos\nsystem\n(S'false'\ntR."),
    "tensor that is a directory": lambda version: (
        (version / "norm.memmap").unlink(),
        (version / "norm.memmap").mkdir(),
    ),
    "wrong dtype in the manifest": rewrite("manifest.json", b'"bfloat16"', b'"float16"'),
    "wrong shape in the manifest": rewrite("manifest.json", b"[50,8]", b"[8,50]"),
    "other version in the manifest": rewrite("manifest.json", b'"version":1', b'"version":2'),
    "wrong dtype in TensorDict's metadata": rewrite("meta.json", b"torch.bfloat16", b"torch.float16"),
    "wrong shape in TensorDict's metadata": rewrite("meta.json", b"[50, 8]", b"[8, 50]"),
    "missing manifest": lambda version: (version / "manifest.json").unlink(),
    "missing TensorDict metadata": lambda version: (version / "meta.json").unlink(),
    "empty manifest": lambda version: (version / "manifest.json").write_bytes(b""),
    "missing lease": lambda version: (version / "lease").unlink(),
    "missing version": lambda version: shutil.rmtree(version),
    "CURRENT names another directory": lambda version: rewrite("CURRENT", b"000001", b"../../x")(version.parent.parent),
    "CURRENT names a version that is not there": lambda version: rewrite("CURRENT", b"000001", b"000002")(
        version.parent.parent
    ),
    "CURRENT is garbage": lambda version: (version.parent.parent / "CURRENT").write_bytes(b"\x80\x04}"),
    "CURRENT is empty": lambda version: (version.parent.parent / "CURRENT").write_bytes(b""),
}


@pytest.mark.quick(14)
@pytest.mark.parametrize("damage", DAMAGES)
def test_every_damage_is_refused_and_mended_by_publishing_again(store, damage):
    sync.publish(store, weights(1), 1)
    DAMAGES[damage](store / "versions" / "000001")
    with pytest.raises((ManifestMismatch, ChecksumMismatch)):
        sync.open_current(store)
    shadow = {}
    receiver = sync.make_receiver("store", directory=store)
    manifest = sync.make_sender("inproc").offer(weights(1), 1, {})
    if damage != "flipped bit":  # which the engine finds by the manifest's digest
        with pytest.raises((ManifestMismatch, ChecksumMismatch)):
            shadow.update(receiver.receive(manifest))
        assert not shadow
    if "CURRENT" not in damage:
        sync.publish(store, weights(2), 2)
        sync.publish(store, weights(3), 3)
        assert current(store) == (3, 3.0)


def test_a_store_of_another_form_of_digests_is_refused_by_that_and_mended_by_publishing(store, monkeypatch):
    monkeypatch.setattr(sync.manifest, "DIGEST_FORM", "xxh3-128")
    sync.publish(store, weights(1), 1)
    monkeypatch.undo()
    with pytest.raises(ManifestMismatch, match="digests of another form: .* came 'xxh3-128'. .* publish a store again"):
        sync.open_current(store)
    sync.publish(store, weights(2), 2)
    assert current(store) == (2, 2.0)


@pytest.mark.quick(21)
@pytest.mark.parametrize("bit", [0, 7])
@pytest.mark.parametrize("byte", range(0, 96, 5))
def test_any_bit_of_current_is_told_or_means_the_same(store, byte, bit):
    sync.publish(store, weights(1), 1)
    sync.publish(store, weights(2), 2)
    content = bytearray((store / "CURRENT").read_bytes())
    content[byte % len(content)] ^= 1 << bit
    (store / "CURRENT").write_bytes(content)
    with pytest.raises((ManifestMismatch, ChecksumMismatch)):
        sync.open_current(store)


def test_a_file_cut_while_it_is_received_is_an_error_not_the_end_of_the_process(store):
    manifest = sync.publish(store, {"a": torch.ones(4), "b": torch.ones(10_000), "c": torch.ones(10_000)}, 1)
    receiving = sync.make_receiver("store", directory=store).receive(manifest)
    next(receiving)
    os.truncate(store / "versions" / "000001" / "c.memmap", 100)
    with pytest.raises((ChecksumMismatch, ManifestMismatch)):
        dict(receiving)


def test_files_cut_after_they_were_opened_leave_tensors_as_they_were(store):
    sync.publish(store, weights(3), 3)
    with sync.open_current(store) as published:
        for path in (store / "versions" / "000003").glob("*.memmap"):
            os.truncate(path, 0)
        assert all(bool((tensor == 3).all()) for tensor in published.tensors.values())


@pytest.mark.parametrize("harm", [cut, flip_a_bit])
def test_a_store_that_is_harmed_while_its_tensors_are_cast_is_an_error(store, harm):
    sync.publish(store, weights(3), 3)
    offer = Offer(store, {"embed.weight": ("bfloat16", (50, 8))})
    harm(store / "versions" / "000003" / "embed.weight.memmap")
    with pytest.raises((ChecksumMismatch, ManifestMismatch), match=r"'embed\.weight'.* publish"):
        offer.manifest_in_place(1)


@pytest.mark.parametrize("name", ["store", "shm"])
def test_a_shadow_need_not_be_contiguous(store, name):
    source = {"w": torch.randn(6, 5)}
    sender = sync.make_sender(name, directory=store)
    shadow = {"w": torch.zeros(5, 6).t()}
    manifest = sender.offer(source, 1, {})
    arrivals = sync.make_receiver(name, directory=store).receive_into(shadow, manifest)
    sender.close()
    assert torch.equal(shadow["w"], source["w"])
    assert arrivals == {"w": (manifest.tensors[0].digest, True)}
