"""Connectors by name, those of the user included."""

import logging

import numpy as np
import pytest

from rollout_engine.base.errors import ConfigError
from rollout_engine.kv.directory import DiskConnector, SharedMemoryConnector
from rollout_engine.kv.host import HostConnector
from rollout_engine.kv.tiers import make_connector
from tests.unit.kv import users
from tests.unit.kv.blocks import LAYOUT, NAMESPACE, data, key

USERS = "tests.unit.kv.users"


def test_names_make_connectors(memory):
    assert type(make_connector("host", 5)) is HostConnector
    assert type(make_connector("shm")) is SharedMemoryConnector
    assert type(make_connector("disk:relative")) is DiskConnector
    assert make_connector("host", 5).max_bytes == 5 and 0 < make_connector("host").max_bytes <= 4 << 30


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("", "must be 'host' .*, 'shm' .*, 'disk:DIRECTORY', or a class of yours"),
        ("hots", "Did you mean 'host'"),
        ("host:4", "kv_connector='host:4' is not allowed.* kv_connector_bytes=4 << 30 is 4 GiB"),
        ("host:1GB", "Its size in bytes is an option of its own"),
        ("cpu:1GB", "Did you mean 'host'.* kv_connector_bytes="),
        ("cpu", "Did you mean 'host'"),
        ("Memory", "Did you mean 'host'"),
        ("ssd", "Did you mean 'disk:DIRECTORY'"),
        ("memory:Store", "'memory:Store' cannot be made"),
        ("shm:here", "is not allowed"),
        ("disk", "is not allowed"),
        ("disk:", "must name a directory"),
        ("mine:", "is not allowed"),
        ("redis://host", "cannot be made: .*package.module:Class"),
        ("no.such.module:Class", "'no.such.module:Class' cannot be made: ModuleNotFoundError"),
        (f"{USERS}:Absent", "cannot be made: AttributeError"),
        (f"{USERS}:Unmade", "cannot be made: SystemExit: never"),
        (f"{USERS}:Incomplete", "has no method meet or fetch or load or save or holds"),
    ],
)
def test_other_names_are_refused(spec, words):
    with pytest.raises(ConfigError, match=words):
        make_connector(spec)


def test_a_bound_below_one_byte_is_refused():
    with pytest.raises(ConfigError, match="kv_connector_bytes=0 is not allowed"):
        make_connector("host", 0)


def test_a_class_of_the_users_gets_its_argument_and_frames(connect):
    made = make_connector(f"{USERS}:Dictionary:host:1234", 77)
    assert made.open(LAYOUT) == {
        "connector": f"{USERS}:Dictionary:host:1234",
        "namespace": NAMESPACE,
        "argument": "host:1234",
        "max_bytes": "77",
    }
    inner = made._inner
    source = bytearray(data(0))
    made.save(key(0), memoryview(source))
    source[:] = bytes(len(source))
    assert made.holds(key(0)) and made.load(key(0)) == data(0) and made.load(key(1)) is None
    assert made.fetch([key(0)])(1.0) is True
    made.meet([{"a": "b"}])
    assert inner.peers == [{"a": "b"}] and inner.frames[key(0)].readonly
    stats = made.stats()
    assert (stats.num_blocks, stats.num_saved, stats.num_loaded, stats.num_misses) == (1, 1, 1, 1)
    assert (stats.num_saved_bytes, stats.num_loaded_bytes) == (4096, 4096)
    made.drop(iter([key(0)]))
    assert not made.holds(key(0))
    made.reset()
    made.close()
    assert inner.is_closed


def test_bytes_of_a_users_class_that_were_not_saved_by_that_key_are_misses_with_one_line(connect, caplog):
    made = connect(f"{USERS}:Dictionary")
    frames = made._inner.frames
    made.save(key(0), data(0))
    whole = bytes(frames[key(0)])
    damaged = [
        whole[:60],
        whole[:-1],
        whole + b"0",
        b"",
        bytes(len(whole)),
        "text",
        5,
        np.zeros((3, 4), np.float32)[:, 1:],
    ]
    for place in range(0, len(whole), 97):
        damaged.append(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    for frame in damaged:
        frames[key(0)] = frame
        assert made.load(key(0)) is None
    frames[key(1)] = whole
    assert made.load(key(1)) is None
    assert made.stats().num_refused == len(damaged) + 1 == made.stats().num_misses
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    for frame in (whole, bytearray(whole), np.frombuffer(whole, np.uint8), np.frombuffer(whole, np.uint32)):
        frames[key(0)] = frame
        assert made.load(key(0)) == data(0)


def test_bytes_stay_as_they_were_checked_if_a_users_class_writes_to_its_buffer(connect):
    made = connect(f"{USERS}:Dictionary")
    frames = made._inner.frames
    made.save(key(0), data(0))
    own = frames[key(0)] = bytearray(frames[key(0)])
    for frame in (own, memoryview(own).toreadonly(), np.frombuffer(own, np.uint8)):
        frames[key(0)] = frame
        loaded = made.load(key(0))
        own[-5] ^= 1
        assert loaded == data(0) and loaded.readonly
        own[-5] ^= 1


def test_errors_of_a_users_class_are_misses_with_one_line_for_each_call(connect, caplog):
    made = connect(f"{USERS}:Failing")
    for _ in range(2):
        made.save(key(0), data(0))
        assert made.load(key(0)) is None and not made.holds(key(0)) and made.fetch([key(0)]) is None
        made.drop([key(0)])
        made.reset()
        assert made.stats().num_dropped > 0
    made.close()
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(messages) == 8 and all("raised OSError: the store is gone" in message for message in messages)
    assert made.stats().num_dropped == 2 and made.stats().num_misses == 2


def test_a_wait_that_fails_is_over(connect):
    assert connect(f"{USERS}:FailingWait").fetch([key(0)])(1.0) is True


@pytest.mark.parametrize(
    ("name", "words"), [("FailingStart", "OSError: no such host"), ("OddMetadata", "Expected `str`")]
)
def test_a_class_that_cannot_be_opened_stops_the_start(name, words):
    with pytest.raises(ConfigError, match=f"{name}' cannot be opened: .*{words}"):
        make_connector(f"{USERS}:{name}").open(LAYOUT)


def test_the_example_has_all_methods():
    assert all(callable(getattr(users.Dictionary, name)) for name in ("open", "load", "save"))
