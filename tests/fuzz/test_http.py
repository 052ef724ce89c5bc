"""Random requests of every kind: each gets its answer or a typed error, and none leaves anything behind."""

import asyncio

import pytest

from rollout_engine import RolloutPolicy
from rollout_engine.serve.server import HttpServer
from rollout_engine.testing import tiny_checkpoint
from tests.fuzz.http_fuzz import OPTIONS, HttpFuzz, soak


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


def test_random_requests_harm_nothing(checkpoint):
    with RolloutPolicy.from_pretrained(checkpoint, max_model_len=64) as policy, HttpServer(policy, OPTIONS) as server:
        fuzz = HttpFuzz(server, policy, seed=1)
        asyncio.run(fuzz.run(300))
    assert fuzz.num_sent == 300 and set(fuzz.statuses) >= {200, 400, 401, 404}


@pytest.mark.slow
def test_more_of_them_leave_nothing_behind(checkpoint):
    assert soak(checkpoint, float("inf"), 15_000)["requests"] == 15_000
