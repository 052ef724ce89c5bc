"""A policy over the real front end and core; only the model is fake (`FakeExecutor`)."""

import threading

import numpy as np
import pytest

from rollout_engine.core.door import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.fake_executor import FakeExecutor
from rollout_engine.frontend.input_processor import InputProcessor
from rollout_engine.frontend.llm_engine import LLMEngine
from rollout_engine.frontend.output_processor import OutputProcessor
from rollout_engine.frontend.tokenizer import TextCodec
from rollout_engine.policy import RolloutPolicy
from rollout_engine.sampling_params import SamplingParams
from rollout_engine.testing import byte_tokenizer

VOCAB_SIZE = 259
CODEC = TextCodec(byte_tokenizer())
PROMPTS = ["one", "three", "a much longer prompt"]
SHORT = SamplingParams(max_tokens=6)


class Executor(FakeExecutor):
    """`FakeExecutor` with what an engine asks of its executor besides steps."""

    before_step = staticmethod(lambda: None)

    def execute(self, work):
        self.before_step()
        return super().execute(work)

    def score(self, sequences, num_prompt, temperature):
        """Minus position over temperature."""
        pairs = zip(sequences, num_prompt, strict=True)
        return [-np.arange(first, len(ids), dtype=np.float32) / np.float32(temperature) for ids, first in pairs]

    def metadata(self):
        return {"weight": ("float32", (1,))}

    def shutdown(self):
        pass


class Rig:
    """An engine and a policy on it, with everything a test wants to look at."""

    def __init__(self, codec=CODEC, **executor_options):
        self.executor = Executor(block_size=4, vocab_size=VOCAB_SIZE, **executor_options)
        sizes = dict(num_blocks=256, block_size=4, max_model_len=64, max_num_seqs=16, max_num_batched_tokens=64)
        self.core = EngineCore(self.executor, CoreConfig(vocab_size=VOCAB_SIZE, **sizes))
        inputs = InputProcessor(codec, max_model_len=64, vocab_size=VOCAB_SIZE, eos_token_ids=[2])
        self.engine = LLMEngine(self.core, self.executor, inputs, OutputProcessor(codec))
        self.policy = RolloutPolicy(self.engine)

    def rollout(self, prompts=PROMPTS, params=SHORT, **options):
        return self.policy.rollout(prompts, params, **({"use_tqdm": False} | options))

    def assert_clean(self):
        assert not self.engine.has_unfinished_requests()
        assert not self.core.has_unfinished_requests()
        assert self.core.cache_usage() == 0
        assert not self.policy._shared._owners
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
