"""One engine in its own process and one in this, over the same tiny model; and ways to run requests on them."""

import asyncio
import os
import time

import numpy as np
import pytest

from rollout_engine import LLM, AsyncLLM
from rollout_engine.testing import tiny_checkpoint

OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1)


@pytest.fixture(scope="session")
def options():
    return OPTIONS


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """Requests of it may be so long that none ends before a test ends it, however slow the test is."""
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=32_768)


@pytest.fixture(scope="module")
def shared(checkpoint):
    """One for each file: some push weights, others count on those they know."""
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    """The shared engine, found running and empty, and left so."""
    yield shared
    asyncio.run(_assert_empty(shared))


@pytest.fixture(scope="module")
def llm(checkpoint):
    """One for each file, too: seeds that nobody gave are drawn by the number of a request."""
    with LLM(checkpoint, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="session")
def collect():
    """Every output of a request."""
    return _collect


@pytest.fixture(scope="session")
def last_of():
    """The last output of a request."""

    async def run(engine, prompt, params, request_id=None):
        return (await _collect(engine, prompt, params, request_id))[-1]

    return run


@pytest.fixture(scope="session")
def until_computing():
    """Wait until the request of a task that was just made has tokens: asked first, the core counts from before it."""

    async def wait(engine, num_steps=3):
        start = (await engine.check_health()).num_steps
        while (await engine.check_health()).num_steps < start + num_steps:
            await asyncio.sleep(0.005)

    return wait


@pytest.fixture(scope="session")
def assert_gone():
    """Neither the process nor its directory is there, nor a zombie."""

    def check(address, pid):
        assert not os.path.exists(address)
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)

    return check


@pytest.fixture(scope="session")
def assert_same():
    """Two results agree in every token, bit and reason."""
    return _assert_same


async def _collect(engine, prompt, params, request_id=None):
    return [output async for output in engine.generate(prompt, params, request_id)]


async def _assert_empty(engine):
    await engine.check_integrity()
    deadline = time.monotonic() + 60
    while (await engine.check_health()).num_unfinished_requests and time.monotonic() < deadline:
        await asyncio.sleep(0.01)
    assert len(engine.frontend.streams) == 0
    assert await engine.get_num_unfinished_requests() == 0
    assert await engine.get_cache_usage() == 0.0
    assert not await engine.is_paused()


def _assert_same(ours, theirs):
    assert len(ours.outputs) == len(theirs.outputs)
    if theirs.prompt_logprobs is not None:
        assert np.array_equal(ours.prompt_logprobs, theirs.prompt_logprobs, equal_nan=True)
        assert np.array_equal(ours.prompt_ranks, theirs.prompt_ranks)
        for column, other in zip(ours.prompt_top_logprobs, theirs.prompt_top_logprobs, strict=True):
            assert np.array_equal(column, other, equal_nan=True)
    for a, b in zip(ours.outputs, theirs.outputs, strict=True):
        assert (a.index, a.token_ids, a.text, a.seed) == (b.index, b.token_ids, b.text, b.seed)
        assert (a.finish_reason, a.stop_reason, a.version_spans) == (b.finish_reason, b.stop_reason, b.version_spans)
        for ours_column, theirs_column in ((a.logprobs, b.logprobs), (a.kept_logprob_mass, b.kept_logprob_mass)):
            assert (ours_column is None) == (theirs_column is None)
            assert ours_column is None or np.array_equal(ours_column, theirs_column)
        for ours_column, theirs_column in (
            (a.sampled_ranks, b.sampled_ranks),
            (a.token_id_logprobs, b.token_id_logprobs),
        ):
            assert (ours_column is None) == (theirs_column is None)
            assert ours_column is None or np.array_equal(ours_column, theirs_column)
        assert a.top_logprobs is None or all(map(np.array_equal, a.top_logprobs, b.top_logprobs))
