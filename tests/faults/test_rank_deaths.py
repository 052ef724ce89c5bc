"""Any rank is killed at any moment: every request ends once, within a second, and nothing is left."""

import asyncio
import random

import pytest

from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import tiny_checkpoint
from tests.faults.killing import kill_one

pytestmark = pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_attention_heads=6, num_key_value_heads=3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_every_request_ends_once_within_a_second_whichever_rank_dies(checkpoint, seed):
    chance = random.Random(seed)
    waits = [asyncio.run(kill_one(checkpoint, chance, tensor_parallel_size=3)) for _ in range(4)]
    print(f"the slowest end after {max(waits):.3f} s")
    assert max(waits) < 1.0
