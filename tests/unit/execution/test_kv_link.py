"""A connector that raises, hangs or gives something else is a miss, and one that hangs is not called again."""

import asyncio
import threading

import pytest

from rollout_engine.base.errors import ConfigError
from rollout_engine.execution import kv_link
from rollout_engine.execution.kv_link import KVLink
from rollout_engine.kv.connector import KVConnectorStats, KVLayout

LAYOUT = KVLayout(model="m", dtype="float32", block_size=4, block_bytes=8)


class Scripted:
    """Every method returns, raises or calls the value of its name."""

    def __init__(self, **values):
        self.values, self.calls = values, []

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.append(name)
            value = self.values.get(name, {} if name == "open" else None)
            if isinstance(value, Exception):
                raise value
            return value(*arguments) if callable(value) and name != "fetch" else value

        return call


@pytest.fixture(params=["host", "package.module:Class"])
def make_link(request):
    links = []

    def make(**values):
        links.append(KVLink(Scripted(**values), request.param, LAYOUT))
        return links[-1]

    yield make
    for link in links:
        link.close()


def test_bytes_are_passed_on_and_counted(make_link):
    link = make_link(
        load=bytearray(b"12345678"), holds=1, stats=KVConnectorStats(num_blocks=3, num_bytes=9, num_refused=2)
    )
    assert bytes(link.load(b"k")) == b"12345678" and link.holds(b"k") is True
    link.save(b"k", memoryview(b"12345678"))
    assert link.count_held() == link.count_held() == (3, 9)
    assert link.stats.num_refused == 2 and link.stats.num_failures == 0
    assert link.fetch([b"k"]) is None


@pytest.mark.parametrize("value", [OSError("no"), 7, "text"])
def test_errors_and_things_that_are_no_bytes_are_misses(make_link, caplog, value):
    link = make_link(load=value)
    assert link.load(b"k") is None and link.load(b"k") is None
    assert link.stats.num_failures == 2 and caplog.text.count("load() has failed") == 1


def test_a_wait_for_a_fetch_ends_by_its_error_or_its_deadline(make_link, monkeypatch):
    monkeypatch.setattr(kv_link, "FETCH_SECONDS", 0.0)
    assert make_link(fetch=lambda seconds: False).fetch([b"k"])(0.0)
    monkeypatch.setattr(kv_link, "FETCH_SECONDS", 1e6)
    waits = make_link(fetch=lambda seconds: seconds > 0).fetch([b"k"])
    assert not waits(0.0) and waits(0.5)

    def fail(seconds):
        raise OSError("no")

    assert make_link(fetch=fail).fetch([b"k"])(0.0)


def test_a_call_that_hangs_is_the_last(monkeypatch, caplog):
    monkeypatch.setattr(kv_link, "CALL_SECONDS", 0.05)
    released = threading.Event()
    link = KVLink(Scripted(load=lambda key: released.wait(60)), "package.module:Class", LAYOUT)
    assert link.load(b"k") is None
    assert link.load(b"k") is None and not link.holds(b"k") and link.count_held() == (0, 0)
    assert link._connector.calls == ["open", "load"]
    assert link.stats.num_failures == 1 and "load() has not returned within 0.05 s" in caplog.text
    released.set()
    link.close()


@pytest.mark.parametrize("value", [OSError("no door"), ["no dict"]])
def test_one_that_does_not_open_fails_the_start(value):
    with pytest.raises(ConfigError, match="kv_connector='host' does not open"):
        KVLink(Scripted(open=value), "host", LAYOUT)


def test_whatever_a_users_class_raises_is_a_miss():
    def cancel(*arguments):
        raise asyncio.CancelledError

    link = KVLink(Scripted(load=cancel, holds=cancel, save=cancel), "package.module:Class", LAYOUT)
    assert link.load(b"k") is None and not link.holds(b"k")
    link.save(b"k", memoryview(b"12345678"))
    assert link.stats.num_failures == 3
    link.close()


def test_a_bound_below_one_block_is_refused():
    with pytest.raises(ConfigError, match="kv_connector_bytes=7 is not allowed: must be at least 8, a block"):
        KVLink(Scripted(), "host", LAYOUT, 7)


def test_a_users_module_whose_name_begins_as_one_of_ours_is_guarded_too():
    for spec, is_guarded in (("host", False), ("shm", False), ("disk:a", False), ("hosted:Slow", True)):
        link = KVLink(Scripted(), spec, LAYOUT)
        assert (link._lane is not None) == is_guarded
        link.close()


def test_failures_that_a_connector_has_counted_are_counted_once():
    link = KVLink(Scripted(stats=lambda: KVConnectorStats(num_failures=2)), "host", LAYOUT)
    link.count_held()
    link.count_held()
    assert link.stats.num_failures == 2
    link.close()
