"""Connectors and directories of blocks that are closed at the end of a test."""

import pytest

from rollout_engine.kv.tiers import make_connector
from tests.unit.kv.blocks import LAYOUT, open_blocks


@pytest.fixture
def opened(request):
    """A function that closes what it is given at the end of the test, and returns it."""

    def close_later(thing):
        request.addfinalizer(thing.close)
        return thing

    return close_later


@pytest.fixture
def blocks(tmp_path, opened):
    return opened(open_blocks(tmp_path / "kv"))


@pytest.fixture
def connect(opened):
    """Make a connector and open it."""

    def connect(spec, max_bytes=1 << 24, layout=LAYOUT):
        made = opened(make_connector(spec, max_bytes))
        made.open(layout)
        return made

    return connect


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """A directory in place of shared memory, in which "shm" makes its own."""
    monkeypatch.setattr("rollout_engine.kv.directory.SHARED_MEMORY", tmp_path)
    return tmp_path


@pytest.fixture(params=["host", "shm", "disk"])
def connector(request, connect, memory):
    return connect(f"disk:{memory / 'disk'}" if request.param == "disk" else request.param)
