"""A store that is pulled over HTTP has the versions of the one that is served, by links if it can."""

import http.client
import json
import logging
import os
import socket
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import numpy as np
import pytest
import torch

import sync
from sync import store_pull
from sync.errors import SyncError, TransferTimeout
from sync.pointer import read_pointer
from sync.store_server import _MAX_CONNECTIONS
from tests.unit.sync.chains import bytes_of, change_some, make_weights

KEY = "a key of 16 characters or more"


class Served:
    """A store, its server and its versions."""

    def __init__(self, directory):
        self.directory, self._random = directory, np.random.default_rng(3)
        self._weights = make_weights(self._random)
        self.versions = {}
        self.publish()
        self.server = sync.serve_store(directory, key=KEY)

    def publish(self, count=1, **options):
        for _ in range(count):
            version = len(self.versions) + 1
            self._weights = change_some(self._random, self._weights, 0.01)
            sync.publish(self.directory, self._weights, version, **{"delta": True, "anchor_every": 4} | options)
            self.versions[version] = bytes_of(self._weights)

    def send(self, path, key=KEY, **headers):
        """Status and body."""
        connection = http.client.HTTPConnection(urllib.parse.urlsplit(self.server.url).netloc, timeout=30)
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} | headers)
        answer = connection.getresponse()
        content = answer.status, answer.read()
        connection.close()
        return content


@pytest.fixture
def served(tmp_path):
    served = Served(tmp_path / "store")
    yield served
    served.server.close()


@pytest.fixture
def copy(tmp_path):
    return tmp_path / "copy"


@pytest.fixture
def fetched(monkeypatch):
    """The parts that were asked for."""
    parts = []
    send_part = sync.store_server._Handler._send_part

    def note(handler, lease, part):
        parts.append((lease.pointer.version, part))
        send_part(handler, lease, part)

    monkeypatch.setattr(sync.store_server._Handler, "_send_part", note)
    return parts


def read(store):
    with sync.open_current(store) as published:
        return published.version, bytes_of(published.tensors)


def test_a_copy_follows_by_links_alone_also_past_anchors(served, copy, fetched):
    sync.pull(served.server.url, copy, key=KEY)
    assert {part for _, part in fetched} == {"tensors"}
    fetched.clear()
    for version in range(2, 12):
        served.publish()
        manifest = sync.pull(served.server.url, copy, key=KEY, num_threads=2)
        assert manifest.version == version and read(copy) == (version, served.versions[version])
        assert len(read_pointer(copy).before) < 4
    assert fetched == [(version, "changes") for version in range(2, 12)]


@pytest.mark.quick(1)
@pytest.mark.parametrize("behind", [1, 2, 4, 5, 9])
def test_a_copy_catches_up_from_any_version(served, copy, fetched, behind):
    served.publish(3)
    sync.pull(served.server.url, copy, key=KEY)
    fetched.clear()
    served.publish(behind)
    sync.pull(served.server.url, copy, key=KEY)
    assert read(copy) == (4 + behind, served.versions[4 + behind])
    # From version 9 on the chain begins there, with changes against version 8: none lead there from 4.
    assert {part for _, part in fetched} == {"tensors" if behind >= 5 else "changes"}


def test_a_copy_that_is_current_fetches_nothing(served, copy, fetched):
    first = sync.pull(served.server.url, copy, key=KEY)
    fetched.clear()
    assert sync.pull(served.server.url, copy, key=KEY) == first and not fetched


def test_a_link_that_arrives_damaged_is_replaced_by_the_whole_version(served, copy, monkeypatch, caplog):
    sync.pull(served.server.url, copy, key=KEY)
    served.publish(2)
    read_changes = sync.store_server._read_changes

    def damage(*arguments):
        for piece in read_changes(*arguments):
            piece[0] ^= 1
            yield piece

    monkeypatch.setattr(sync.store_server, "_read_changes", damage)
    with caplog.at_level(logging.WARNING):
        sync.pull(served.server.url, copy, key=KEY)
    assert read(copy) == (3, served.versions[3])
    [line] = caplog.messages
    assert "changes has checksum" in line and line.endswith("Version 3 is fetched whole.")


def test_a_damaged_copy_is_fetched_anew(served, copy):
    served.publish()
    sync.pull(served.server.url, copy, key=KEY)
    next(copy.glob("versions/*/layer.1.memmap")).unlink()
    sync.pull(served.server.url, copy, key=KEY)
    assert read(copy) == (2, served.versions[2])


@pytest.mark.quick(1)
@pytest.mark.parametrize("newer", [0, 1])
@pytest.mark.parametrize("behind", [0, 2])
def test_bytes_of_a_copy_that_were_changed_are_fetched_anew(served, copy, caplog, fetched, behind, newer):
    sync.pull(served.server.url, copy, key=KEY)
    served.publish(behind)
    sync.pull(served.server.url, copy, key=KEY)
    path = next(copy.glob("versions/*/layer.1.memmap"))
    content = bytearray(path.read_bytes())
    content[5] ^= 1
    with open(path, "r+b") as file:
        file.write(content)
    served.publish(newer)
    with caplog.at_level(logging.WARNING):
        manifest = sync.pull(served.server.url, copy, key=KEY)
    version = 1 + behind + newer
    assert manifest.version == version and read(copy) == (version, served.versions[version])
    assert any("is damaged" in line and "layer.1" in line for line in caplog.messages)
    assert fetched[-1][1] == "tensors"


def test_a_copy_is_digested_once_for_each_state_of_its_files(served, copy, monkeypatch):
    checked = []
    check_tensors = store_pull.check_tensors
    monkeypatch.setattr(store_pull, "check_tensors", lambda *args: checked.append(1) or check_tensors(*args))
    sync.pull(served.server.url, copy, key=KEY)
    assert not checked, "what was fetched has its digests"
    sync.pull(served.server.url, copy, key=KEY)
    sync.pull(served.server.url, copy, key=KEY)
    assert len(checked) == 2, "files that were just written may be written again within a tick of the clock"
    monkeypatch.setattr(store_pull, "_SETTLED_NS", 0)
    for _ in range(3):
        sync.pull(served.server.url, copy, key=KEY)
    assert len(checked) == 3
    path = next(copy.glob("versions/*/layer.1.memmap"))
    path.touch()
    sync.pull(served.server.url, copy, key=KEY)
    assert len(checked) == 4


def test_a_connection_that_breaks_is_made_again_for_the_rest(served, copy, monkeypatch):
    read_tensors = sync.store_server._read_tensors
    broken = []

    def break_once(lease, specs, start, end):
        for piece in read_tensors(lease, specs, start, end):
            if len(piece) > 100 and len(broken) < 3:
                broken.append(start)
                yield piece[:50]
                raise SyncError("broken for a test")
            yield piece

    monkeypatch.setattr(sync.store_server, "_read_tensors", break_once)
    sync.pull(served.server.url, copy, key=KEY)
    assert len(broken) == 3 and read(copy) == (1, served.versions[1])


def test_an_anchor_alone_is_served_and_read_by_ranges(served):
    served.publish(1)
    status, content = served.send("/weights/1?part=tensors")
    assert status == 200
    assert served.send("/weights/1?part=tensors", Range="bytes=3-9") == (206, content[3:10])
    assert served.send("/weights/1?part=tensors", Range=f"bytes={len(content) - 4}-") == (206, content[-4:])
    assert served.send("/weights/1?part=tensors", Range=f"bytes={len(content)}-")[0] == 416
    status, later = served.send("/weights/2?part=tensors")
    assert status == 200 and len(later) == len(content) and later != content
    for first, last in ((3, 9), (5, 20_000), (len(later) - 3, len(later) - 1)):
        assert served.send("/weights/2?part=tensors", Range=f"bytes={first}-{last}") == (206, later[first : last + 1])
    assert served.send("/weights/current?part=changes")[0] == 200
    assert served.send("/weights/1?part=changes")[0] == 404


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "path", ["/weights/7", "/weights/../CURRENT", "/weights/current?part=lease", "/", "/weights/-1"]
)
def test_other_paths_are_not_found(served, path):
    assert served.send(path)[0] == 404


@pytest.mark.parametrize("key", ["", "another key of 16 characters", KEY + "x"])
def test_requests_without_the_key_are_refused(served, copy, key):
    assert served.send("/weights/current", key=key)[0] == 401
    with pytest.raises(SyncError, match="refused with 401: .*key"):
        sync.pull(served.server.url, copy, key=key)
    with pytest.raises(sync.ManifestMismatch):
        sync.open_current(copy)


@pytest.mark.parametrize("key", ["", "short", None, "ü" * 20])
def test_a_server_without_a_key_is_refused(tmp_path, key):
    with pytest.raises(SyncError, match="key is not allowed: must be 16 printable"):
        sync.serve_store(tmp_path, key=key)


def test_a_directory_that_is_not_there_is_not_served(tmp_path):
    with pytest.raises(SyncError, match="is no directory.*sync.publish"):
        sync.serve_store(tmp_path / "typo", key=KEY)


def test_a_server_that_is_gone_or_no_url_is_an_error(served, copy):
    url = served.server.url
    served.server.close()
    with pytest.raises(TransferTimeout, match="cannot be reached"):
        sync.pull(url, copy, key=KEY)
    with pytest.raises(SyncError, match="must be http://HOST:PORT"):
        sync.pull("file:///etc", copy, key=KEY)


def test_the_server_holds_no_steps_that_are_not_current_any_more(served, copy):
    served.publish(2)
    sync.pull(served.server.url, copy, key=KEY)
    served.publish(2)
    sync.pull(served.server.url, copy, key=KEY)
    served.publish()
    assert sorted(path.name for path in (served.directory / "versions").iterdir()) == ["000005", "000006"]


def test_tied_and_empty_tensors_are_kept(tmp_path, copy):
    weight = torch.ones(3)
    sync.publish(tmp_path / "store", {"embed": weight, "head": weight, "empty": torch.empty(0, 2)}, 1)
    with sync.serve_store(tmp_path / "store", key=KEY) as server:
        manifest = sync.pull(server.url, copy, key=KEY)
    assert manifest.aliases == [["embed", "head"]]
    with sync.open_current(copy) as published:
        assert published.tensors["head"] is published.tensors["embed"]


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [8, pytest.param(500, marks=pytest.mark.slow)])
def test_a_pull_that_is_killed_leaves_the_version_before_or_the_new_one(served, copy, num_kills):
    served.publish(5)
    sync.pull(served.server.url, copy, key=KEY)
    served.publish(2)  # links 7 and 8
    script = Path(__file__).with_name("pull_kills.py")
    command = [sys.executable, str(script), served.server.url, KEY, str(copy.parent), str(num_kills), "5"]
    environment = os.environ | {"PYTHONPATH": str(script.parents[3])}
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found = json.loads(done.stdout)
    assert found["after"] == {"8": num_kills}
    assert set(found["killed"]) <= {"6", "8"} and found["killed"]["6"] > num_kills / 5


@pytest.mark.quick(1)
@pytest.mark.parametrize("version", [1, 2, 3])
def test_a_trainer_that_goes_back_to_a_number_has_its_new_weights_pulled(served, copy, version):
    served.publish(2)
    sync.pull(served.server.url, copy, key=KEY)
    weights = change_some(np.random.default_rng(5), served._weights, 0.01)
    sync.publish(served.directory, weights, version, delta=True, reset_version=True)
    sync.pull(served.server.url, copy, key=KEY)
    assert read(copy) == read(served.directory) == (version, bytes_of(weights))
    assert not read_pointer(served.directory).before  # a chain has each version once


def test_connections_beyond_the_most_are_closed_and_make_room_when_they_end(served):
    place = urllib.parse.urlsplit(served.server.url)
    silent = [socket.create_connection((place.hostname, place.port)) for _ in range(_MAX_CONNECTIONS)]
    try:
        with pytest.raises((http.client.HTTPException, OSError)):
            served.send("/weights/current")
    finally:
        for each in silent:
            each.close()
    for _ in range(200):
        try:
            assert served.send("/weights/current")[0] == 200
            break
        except (http.client.HTTPException, OSError):
            time.sleep(0.05)
    else:
        pytest.fail("no connection was taken again")


@pytest.mark.parametrize("text", ["bytes=5-", "bytes=0-0", "bytes=-1", "bytes=9-3"])
def test_no_range_of_changes_without_bytes_has_a_length_below_zero(served, text):
    sync.publish(served.directory, served._weights, 2, delta=True)  # the same weights
    assert served.send("/weights/2?part=changes") == (200, b"")
    status, _ = served.send("/weights/2?part=changes", Range=text)
    assert status in (206, 416)


def test_a_path_that_is_no_url_is_not_found(served):
    place = urllib.parse.urlsplit(served.server.url)
    with socket.create_connection((place.hostname, place.port), timeout=30) as connection:
        connection.sendall(f"GET http://[/ HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 404")
