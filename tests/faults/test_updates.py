"""Good and bad weights under load: no token is attributed to other weights than made it, none is lost or repeated."""

import asyncio

import pytest

from rollout_engine import AsyncLLM
from tests.faults.clean import assert_clean
from tests.faults.updates import ATTACKS, UpdatesUnderLoad

OPTIONS = dict(num_kv_blocks=24, max_num_seqs=16, num_threads=1, skip_tokenizer_init=True)
"""A quarter of what the requests want: they are preempted."""


@pytest.fixture(scope="module")
def engine(checkpoint):
    with AsyncLLM(checkpoint, **OPTIONS) as engine:
        yield engine


@pytest.mark.slow
def test_commits_race_aborts_pauses_preemption_and_bad_weights(engine, tmp_path):
    async def run():
        load = UpdatesUnderLoad(engine, tmp_path, seed=1)
        await load.run(num_updates=40, seconds=300)
        await assert_clean(engine)
        return load, await engine.get_metrics()

    load, metrics = asyncio.run(run())
    assert load.num_updates == 40
    assert load.spelled.num_wrong == 0 and load.spelled.num_right > 0, vars(load.spelled)
    assert metrics.core.counters.num_preemptions > 0
    assert load.refused.keys() == ATTACKS.keys()
    assert load.ledger.counts.keys() >= {"length", "abort"}, load.ledger.counts
