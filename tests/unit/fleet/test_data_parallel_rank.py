"""`data_parallel_rank` of `AsyncLLM` is the index of a fleet's replica."""

import asyncio

import pytest

from rollout_engine import AsyncLLM, RequestError
from rollout_engine.base.sampling_params import SamplingParams
from tests.unit.fleet.fake_fleet import make_service

SHORT = SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
PROMPT = [5, 6, 7, 8]


@pytest.fixture
def made():
    service, provider = make_service()
    with service:
        yield service, provider


@pytest.mark.parametrize("rank", [0, 1])
def test_data_parallel_rank_chooses_the_replica(made, rank):
    service, provider = made

    async def last(**options):
        async with AsyncLLM.from_client(service.frontend.client) as engine:
            return [output async for output in engine.generate(PROMPT, SHORT, **options)][-1]

    asyncio.run(last(data_parallel_rank=rank))
    stats = [provider.replicas[i].client.driver.core.stats for i in range(2)]
    assert [each.num_tokens_sampled for each in stats] == [4 * (index == rank) for index in range(2)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(data_parallel_rank=2), "^data_parallel_rank=2 .* one of 0, 1"),
        (dict(data_parallel_rank=True), "data_parallel_rank=True"),
        (dict(data_parallel_rank=0, session_id="s"), "both choose the replica"),
    ],
)
def test_ranks_that_are_not_there_are_refused(made, options, said):
    engine = AsyncLLM.from_client(made[0].frontend.client)

    async def first(method):
        await anext(getattr(engine, method)(PROMPT, **options))

    for method in ("generate", "encode"):
        with pytest.raises(RequestError, match=said):
            asyncio.run(first(method))
