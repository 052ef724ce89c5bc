"""A policy over the real front end and core; only the model is fake (`FakeExecutor`)."""

import threading

import pytest

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.rollouts.policy import RolloutPolicy
from tests.unit.fake_engine import CODEC, make_engine

PROMPTS = ["one", "three", "a much longer prompt"]
SHORT = SamplingParams(max_tokens=6)


class Rig:
    """An engine and a policy on it, with everything a test wants to look at."""

    def __init__(self, codec=CODEC, **executor_options):
        self.engine = make_engine(codec, max_model_len=64, **executor_options)
        self.core, self.executor = self.engine.core, self.engine.executor
        self.policy = RolloutPolicy(self.engine)

    def rollout(self, prompts=PROMPTS, params=SHORT, **options):
        return self.policy.rollout(prompts, params, **({"use_tqdm": False} | options))

    def assert_clean(self):
        assert not self.engine.has_unfinished_requests()
        assert not self.core.has_unfinished_requests()
        assert self.core.cache_usage() == 0
        assert len(self.engine.frontend.streams) == 0
        assert not [thread for thread in threading.enumerate() if thread.name == "rewards"]
        self.core.check_integrity()


@pytest.fixture
def make_rig():
    """The class: for tests that need several rigs, or a special one."""
    return Rig


@pytest.fixture
def rig():
    """One rig, which must be clean and usable when the test ends."""
    rig = Rig()
    yield rig
    rig.assert_clean()
    assert rig.rollout().batch_size == (3,)
