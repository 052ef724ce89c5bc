from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def gate_cache_directory(tmp_path_factory) -> Iterator[None]:
    """Verdicts of these tests stay out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ROLLOUT_ENGINE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
