"""An engine over the fake model and the byte tokenizer, checked for leftovers after every test."""

import pytest

from rollout_engine.faces.llm import LLM
from tests.unit import fake_engine
from tests.unit.fake_engine import BLOCK_SIZE, EOS, VOCAB_SIZE  # noqa: F401

MAX_MODEL_LEN = 128


@pytest.fixture(scope="session")
def codec():
    return fake_engine.CODEC


@pytest.fixture
def encode(codec):
    return lambda text: codec.encode(text)


@pytest.fixture
def make_engine(codec):
    """Build engines; each must be empty, inside and out, when the test ends."""
    made = []

    def make(*, with_tokenizer=True, **options):
        engine = fake_engine.make_engine(codec if with_tokenizer else None, **options)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        assert not engine.has_unfinished_requests()
        assert len(engine.frontend.streams) == 0
        assert engine.core.num_unfinished_requests == 0
        assert engine.core.cache_usage() == 0.0
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
