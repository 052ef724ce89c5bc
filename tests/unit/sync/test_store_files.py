"""A publisher writes to no file or directory that others could change, or that is one of something else."""

import os

import pytest
import torch

import sync
from sync.errors import SyncError


@pytest.fixture
def store(tmp_path):
    return tmp_path / "store"


def weights(value):
    return {"norm": torch.full((8,), float(value)), "steps": torch.tensor(value)}


def current(store):
    with sync.open_current(store) as published:
        return published.version, float(published.tensors["norm"][0])


def pipe(path):
    path.unlink()
    os.mkfifo(path)


def hard_link(path):
    os.link(path, path.parents[2] / "backup")


DAMAGES_BY_KIND = {"pipe": pipe, "hard link": hard_link, "open mode": lambda path: path.chmod(0o666)}


@pytest.mark.parametrize("part", ["norm.memmap", "manifest.json", "meta.json", "lease"])
@pytest.mark.parametrize("damage", DAMAGES_BY_KIND)
def test_an_old_version_that_others_could_change_is_recycled_without_it(store, part, damage):
    sync.publish(store, weights(1), 1)
    sync.publish(store, weights(2), 2)
    DAMAGES_BY_KIND[damage](store / "versions" / "000001" / part)
    before = (store / "backup").read_bytes() if damage == "hard link" else b""
    sync.publish(store, weights(3), 3)
    assert current(store) == (3, 3.0)
    if damage == "hard link":
        assert (store / "backup").read_bytes() == before, "another name of the file was written through"


def test_versions_are_not_published_through_a_link(store, tmp_path):
    sync.publish(store, weights(1), 1)
    (store / "versions").rename(tmp_path / "elsewhere")
    (store / "versions").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(SyncError, match="it is a symbolic link, not a directory; version 1 is still current"):
        sync.publish(store, weights(2), 2)
    assert sorted(path.name for path in (tmp_path / "elsewhere").iterdir()) == ["000001"]


@pytest.mark.parametrize("kind", ["link", "open"])
def test_a_store_that_is_a_link_or_open_to_others_is_not_published_to(store, tmp_path, kind):
    (tmp_path / "real").mkdir()
    (tmp_path / "real").chmod(0o700 if kind == "link" else 0o777)
    place = tmp_path / "real"
    if kind == "link":
        store.symlink_to(place)
        place = store
    with pytest.raises(SyncError, match=r"cannot be published to: .*(a symbolic link|mode 0777)"):
        sync.publish(place, weights(1), 1)
    assert not list((tmp_path / "real").iterdir())
