"""Any process of a pipe of stages is killed at any moment: every request ends once, and nothing is left."""

import asyncio
import random

import pytest

from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import tiny_checkpoint
from tests.faults.killing import kill_one

pytestmark = pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
SIZES = [dict(pipeline_parallel_size=2), dict(pipeline_parallel_size=3)]
SIZES += [dict(pipeline_parallel_size=2, tensor_parallel_size=2)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=4)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_every_request_ends_once_within_a_second_whichever_stage_dies(checkpoint, seed):
    chance = random.Random(seed)
    waits = [asyncio.run(kill_one(checkpoint, chance, **chance.choice(SIZES))) for _ in range(4)]
    print(f"the slowest end after {max(waits):.3f} s")
    assert max(waits) < 1.0
