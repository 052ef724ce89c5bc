"""One tiny checkpoint for all fault runs."""

import pytest

from rollout_engine.process import core_launcher
from rollout_engine.testing import tiny_checkpoint
from sync.own_files import CACHE_VARIABLE
from tests.caches import cache_without

_start = core_launcher._start


@pytest.fixture(autouse=True, scope="module")
def cold_cores():
    """Cores' processes are new interpreters, as users have them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core_launcher, "_start", _start)
        yield


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Requests of it may be so long that none ends before a test ends it, however slow the test is."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)


@pytest.fixture(autouse=True)
def post_mortems(tmp_path, monkeypatch):
    """The folder where cores that die leave their files; everything else in the cache is as always."""
    cache = cache_without("post-mortems", tmp_path / "cache")
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    return cache / "post-mortems"
