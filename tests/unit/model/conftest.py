from collections.abc import Iterator

import pytest

from sync.own_files import CACHE_VARIABLE
from tests.caches import cache_without


@pytest.fixture(autouse=True, scope="session")
def gate_cache_directory(tmp_path_factory) -> Iterator[None]:
    """Verdicts of these tests stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(cache_without("gate", tmp_path_factory.mktemp("model") / "cache")))
        yield
