"""A store that is published as changes: read as whole weights, bit for bit; damaged links are never used."""

import logging
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch

import sync
from sync.errors import ChecksumMismatch, ManifestMismatch, StaleVersion, SyncError
from sync.pointer import read_pointer
from tests.unit.sync.chains import bytes_of, change_some, make_weights

ROOT = Path(__file__).parents[3]


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


class Publisher:
    """Publishes versions, each with a few changes, and keeps them."""

    def __init__(self, store, anchor_every=4, seed=0):
        self.store, self._random, self._anchor_every = store, np.random.default_rng(seed), anchor_every
        self.versions = {}
        self._weights = make_weights(self._random)

    def publish(self, count=1, share=0.01, **options):
        for _ in range(count):
            version = len(self.versions) + 1
            if self.versions:
                self._weights = change_some(self._random, self._weights, share)
            choices = {"delta": True, "anchor_every": self._anchor_every} | options
            sync.publish(self.store, self._weights, version, **choices)
            self.versions[version] = bytes_of(self._weights)
        return self


def names(store):
    return sorted(path.name for path in (store / "versions").iterdir())


def num_links(store):
    return len(read_pointer(store).before)


def read(store):
    with sync.open_current(store) as published:
        return published.version, bytes_of(published.tensors)


@pytest.mark.quick(1)
@pytest.mark.parametrize("anchor_every", [1, 2, 4, 16])
def test_every_version_has_the_bits_that_were_published(store, anchor_every):
    publisher = Publisher(store, anchor_every)
    for version in range(1, 12):
        publisher.publish()
        assert read(store) == (version, publisher.versions[version])
        assert num_links(store) == (version - 1) % anchor_every


def test_a_link_is_a_small_part_of_its_version(store):
    weights = {"w": torch.randn(500, 600).bfloat16()}
    sync.publish(store, weights, 1, delta=True)
    weights["w"][3, ::50] += 1
    sync.publish(store, weights, 2, delta=True)
    assert sum(path.stat().st_size for path in (store / "versions" / "000002").iterdir()) < 1500


def test_steps_that_no_anchor_needs_are_removed_but_not_under_a_reader(store):
    publisher = Publisher(store).publish(3)
    with sync.open_current(store) as held:
        publisher.publish(4)
        assert names(store) == [f"{version:06d}" for version in (1, 2, 3, 5, 6, 7)]
        assert bytes_of(held.tensors) == publisher.versions[3]
    publisher.publish()
    assert names(store) == [f"{version:06d}" for version in (5, 6, 7, 8)]
    publisher.publish(2)
    assert names(store) == ["000009", "000010"]


def test_tensors_that_are_read_later_keep_their_version(store):
    publisher = Publisher(store).publish(3)
    source = sync.published.read_current(store)
    publisher.publish(6)
    assert bytes_of({name: each.materialize() for name, each in source.items()}) == publisher.versions[3]


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: weights | {"scalar": torch.ones(3)},
        lambda weights: weights | {"scalar": torch.ones(())},
        lambda weights: weights | {"more": torch.ones(3)},
        lambda weights: weights | {"tied": weights["tied"].clone()},
        lambda weights: {name: tensor for name, tensor in weights.items() if name != "mask"},
    ],
    ids=["shape", "dtype", "name added", "untied", "name removed"],
)
def test_weights_of_another_form_are_published_whole(store, change):
    publisher = Publisher(store).publish(2)
    changed = change(make_weights(np.random.default_rng(0)))
    sync.publish(store, changed, 3, delta=True)
    assert num_links(store) == 0 and read(store) == (3, bytes_of(changed))
    assert publisher.versions[2] != bytes_of(changed)


def test_changes_of_most_bytes_are_followed_by_an_anchor(store):
    publisher = Publisher(store, 16).publish(1).publish(share=1.0)
    assert num_links(store) == 1
    publisher.publish()
    assert num_links(store) == 0 and read(store) == (3, publisher.versions[3])


def test_a_whole_version_among_changes_is_an_anchor(store):
    publisher = Publisher(store).publish(2).publish(delta=False).publish()
    assert num_links(store) == 1 and read(store) == (4, publisher.versions[4])


def test_a_sender_takes_a_link_back_and_publishes_others(store):
    weights = make_weights(np.random.default_rng(0))
    later = [change_some(np.random.default_rng(i), weights, 0.1) for i in range(3)]
    sender = sync.make_sender("store", directory=store, delta=True)
    sender.offer(weights, 1, {})
    sender.offer(later[0], 2, {})
    sender.offer(later[1], 3, {})
    sender.take_back()
    assert read(store) == (2, bytes_of(later[0]))
    sender.offer(later[2], 3, {})
    sender.close()
    assert read(store) == (3, bytes_of(later[2])) and num_links(store) == 2


def test_versions_move_forward_only_and_the_same_one_is_no_change(store):
    publisher = Publisher(store).publish(3)
    before = names(store)
    weights = dict(sync.open_current(store).tensors)
    assert sync.publish(store, weights, 3, delta=True).version == 3 and names(store) == before
    with pytest.raises(StaleVersion):
        sync.publish(store, weights, 2, delta=True)
    sync.publish(store, weights, 2, delta=True, reset_version=True)
    assert read(store) == (2, publisher.versions[3])


@pytest.mark.parametrize("anchor_every", [0, 258, 2.0, True])
def test_an_interval_of_anchors_that_cannot_be_is_refused(store, anchor_every):
    with pytest.raises(SyncError, match=r"anchor_every=.* must be an int in \[1, 257\]"):
        sync.publish(store, {"w": torch.ones(3)}, 1, delta=True, anchor_every=anchor_every)


def tear(path):
    os.truncate(path, path.stat().st_size - 1)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def swap(versions):
    (versions / "000002").rename(versions / "elsewhere")
    (versions / "000003").rename(versions / "000002")
    (versions / "elsewhere").rename(versions / "000003")


def put_foreign(versions):
    Publisher(versions.parent.with_name("other"), seed=9).publish(3)
    shutil.rmtree(versions / "000003")
    shutil.copytree(versions.parent.with_name("other") / "versions" / "000003", versions / "000003")


LINK_DAMAGES = {
    "torn changes": (lambda versions: tear(versions / "000002" / "changes"), "versions/000002/changes"),
    "flipped changes": (lambda versions: flip(versions / "000003" / "changes"), "versions/000003/changes"),
    "missing changes": (lambda versions: (versions / "000003" / "changes").unlink(), "missing: changes"),
    "torn link": (lambda versions: tear(versions / "000003" / "link.json"), "versions/000003/link.json"),
    "torn manifest": (lambda versions: tear(versions / "000002" / "manifest.json"), "versions/000002/manifest.json"),
    "missing step": (lambda versions: shutil.rmtree(versions / "000002"), "000002"),
    "further file": (lambda versions: (versions / "000002" / "x").write_text(""), "extra: x"),
    "other order": (swap, "versions/000002"),
    "other store": (put_foreign, "versions/000003"),
    "link of the file system": (
        lambda versions: (
            (versions / "000003" / "changes").rename(versions.parent / "x"),
            (versions / "000003" / "changes").symlink_to(versions.parent / "x"),
        ),
        "versions/000003/changes",
    ),
}


@pytest.mark.quick(6)
@pytest.mark.parametrize("damage", LINK_DAMAGES)
def test_a_damaged_link_falls_back_to_the_anchor_with_one_line_and_is_mended_by_publishing(store, caplog, damage):
    publisher = Publisher(store).publish(3)
    harm, named = LINK_DAMAGES[damage]
    harm(store / "versions")
    with caplog.at_level(logging.WARNING):
        assert read(store) == (1, publisher.versions[1])
    [line] = caplog.messages
    assert named in line and line.endswith("Version 1, its anchor, is read instead.")
    publisher.publish()
    assert read(store) == (4, publisher.versions[4]) and num_links(store) == 0


@pytest.mark.quick(5)
@pytest.mark.parametrize("damage", LINK_DAMAGES)
def test_if_the_anchor_fails_too_the_error_names_both(store, damage):
    publisher = Publisher(store).publish(3)
    harm, named = LINK_DAMAGES[damage]
    harm(store / "versions")
    (store / "versions" / "000001" / "mask.memmap").unlink()
    with pytest.raises((ManifestMismatch, ChecksumMismatch), match=re.escape(named)) as found:
        sync.open_current(store)
    assert "mask.memmap" in str(found.value) and len(str(found.value)) < 1500
    publisher.publish()
    assert read(store) == (4, publisher.versions[4])


def test_bits_of_the_anchor_that_rot_are_found_by_the_digests_of_every_version(store):
    publisher = Publisher(store).publish(3)
    flip(store / "versions" / "000001" / "layer.3.memmap")
    with pytest.raises(ChecksumMismatch, match=r"'layer\.3' of version 3 does not have its digest"):
        sync.open_current(store)
    publisher.publish()  # the damaged tensor is sent whole
    assert read(store) == (4, publisher.versions[4])


def test_the_same_version_is_published_again_over_damaged_links(store):
    publisher = Publisher(store).publish(3)
    whole = dict(sync.open_current(store).tensors)
    tear(store / "versions" / "000002" / "changes")
    sync.publish(store, whole, 3, delta=True)
    assert read(store) == (3, publisher.versions[3])


READER = """
import sys, sync
from sync.digests import tensor_digest
seen = 0
while True:
    with sync.open_current(sys.argv[1]) as published:
        values = {float(value) for t in published.tensors.values() for value in (t.min(), t.max())}
        assert values == {float(published.version)}, (published.version, values)
        seen += 1
        if published.version >= int(sys.argv[2]):
            print(seen)
            break
"""


@pytest.mark.slow
def test_readers_in_other_processes_see_whole_versions_while_links_are_published(store):
    shapes = {"a": (300, 40), "b": (7,), "c": (64, 64)}
    sync.publish(store, {name: torch.full(shape, 1.0) for name, shape in shapes.items()}, 1, delta=True)
    last = 60
    command = [sys.executable, "-c", textwrap.dedent(READER), str(store), str(last)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    readers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    version = 1
    while version < last or any(reader.poll() is None for reader in readers):
        version += 1
        weights = {name: torch.full(shape, float(version)) for name, shape in shapes.items()}
        sync.publish(store, weights, version, delta=True, anchor_every=5)
    counts = [reader.communicate()[0] for reader in readers]
    assert all(reader.returncode == 0 for reader in readers) and all(int(count) >= 1 for count in counts)
