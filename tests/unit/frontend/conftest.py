"""An engine over the fake model and the byte tokenizer, checked for leftovers after every test."""

import pytest

from rollout_engine.core.door import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.core.fake_executor import FakeExecutor
from rollout_engine.frontend.input_processor import InputProcessor
from rollout_engine.frontend.llm import LLM
from rollout_engine.frontend.llm_engine import LLMEngine
from rollout_engine.frontend.output_processor import OutputProcessor
from rollout_engine.frontend.spans import Spans
from rollout_engine.frontend.tokenizer import TextCodec
from rollout_engine.testing import byte_tokenizer

VOCAB_SIZE = 259
MAX_MODEL_LEN = 128
EOS = 2
BLOCK_SIZE = 4


class FakeModel(FakeExecutor):
    """The fake executor with what else the front end asks of one; `interrupt_at_step` is the user's Ctrl-C."""

    interrupt_at_step = -1
    is_shut_down = False

    def execute(self, work):
        if work.step == self.interrupt_at_step:
            self.interrupt_at_step = -1
            raise KeyboardInterrupt
        return super().execute(work)

    def score(self, sequences, num_prompt, temperature):
        self.scored_at = temperature
        return [[-1.0 - t for t in tokens[start:]] for tokens, start in zip(sequences, num_prompt, strict=True)]

    def metadata(self):
        return {"embed.weight": ("float32", (VOCAB_SIZE, 8))}

    def shutdown(self):
        self.is_shut_down = True


@pytest.fixture(scope="session")
def codec():
    return TextCodec(byte_tokenizer())


@pytest.fixture
def encode(codec):
    return lambda text: codec.encode(text)


@pytest.fixture
def make_engine(codec):
    """Build engines; each must be empty, inside and out, when the test ends."""
    made = []

    def make(*, with_tokenizer=True, seed=0, stat_loggers=(), log_interval=10.0, spans=None, max_num_seqs=16, **fake):
        executor = FakeModel(block_size=BLOCK_SIZE, vocab_size=VOCAB_SIZE, **fake)
        config = CoreConfig(
            num_blocks=256,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=64,
            vocab_size=VOCAB_SIZE,
        )
        core = EngineCore(executor, config)
        used = codec if with_tokenizer else None
        inputs = InputProcessor(
            used, max_model_len=MAX_MODEL_LEN, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS], seed=seed
        )
        spans = spans or Spans()
        outputs = OutputProcessor(used, on_closed=spans.request)
        watch = {"stat_loggers": stat_loggers, "log_interval": log_interval, "spans": spans}
        engine = LLMEngine(core, executor, inputs, outputs, **watch)
        engine.core, engine.executor = core, executor
        made.append(engine)
        return engine

    yield make
    for engine in made:
        assert not engine.has_unfinished_requests()
        assert engine.get_num_unfinished_requests() == 0
        assert engine.core.num_unfinished_requests == 0
        assert engine.get_cache_usage() == 0.0
        engine.core.check_integrity()
        engine.shutdown()


@pytest.fixture
def engine(make_engine):
    return make_engine()


@pytest.fixture
def make_llm(make_engine):
    return lambda **kwargs: LLM.from_engine(make_engine(**kwargs))


@pytest.fixture
def drain():
    """Step an engine to its end; every output, in order, checked after every step."""

    def run(engine):
        outputs = []
        while engine.has_unfinished_requests():
            outputs += engine.step()
            engine.core.check_integrity()
        return outputs

    return run
