"""One tiny checkpoint for all fault runs."""

import pytest

from rollout_engine.testing import tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))
