"""One tiny checkpoint for all fault runs."""

import pytest

from rollout_engine.testing import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Requests of it may be so long that none ends before a test ends it, however slow the test is."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)
