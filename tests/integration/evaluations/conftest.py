"""A tiny model, two others like it, and a policy that runs the first."""

import pytest

from rollout_engine import RolloutPolicy
from rollout_engine.testing import tiny_checkpoint
from tests.integration.evaluations.sweeps import OPTIONS
from tests.integration.test_replay import other_weights


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def moved(checkpoint, tmp_path_factory):
    return [other_weights(checkpoint, tmp_path_factory.mktemp("moved") / str(seed), seed) for seed in (1, 2)]


@pytest.fixture
def policy(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, **OPTIONS) as policy:
        yield policy
