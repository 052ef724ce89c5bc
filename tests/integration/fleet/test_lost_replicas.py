"""A fleet of two processes, its metrics and updates, while one of them is stopped or lost."""

import asyncio
import os
import signal

import pytest

from rollout_engine import AsyncLLM
from rollout_engine.fleet.run import metrics as fleet_metrics
from rollout_engine.testing import tiny_checkpoint, tiny_model
from tests.faults.clean import Leftovers
from tests.faults.replica_deaths import PROMPTS, all_serve, read

OPTIONS = dict(num_kv_blocks=2048, max_num_seqs=64, num_threads=1, skip_tokenizer_init=True, log_stats=False)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    checkpoint = tiny_checkpoint(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    leftovers = Leftovers()
    with AsyncLLM(checkpoint, num_replicas=2, **OPTIONS) as engine:
        yield engine
    leftovers.assert_none()


@pytest.mark.slow
def test_metrics_come_while_a_replica_is_stopped(fleet, monkeypatch):
    async def run():
        found = await all_serve(fleet)
        await asyncio.gather(*(read(fleet, i) for i in range(len(PROMPTS))))
        before = await fleet.get_metrics()
        monkeypatch.setattr(fleet_metrics, "ANSWER_SECONDS", 0.5)
        os.kill(found[1].pid, signal.SIGSTOP)
        try:
            return before, await fleet.get_metrics()
        finally:
            os.kill(found[1].pid, signal.SIGCONT)

    before, during = asyncio.run(run())
    assert all(each.has_answered for each in before.replicas.values())
    assert min(each.core.counters.num_tokens_sampled for each in before.replicas.values()) > 0
    assert not during.replicas[1].has_answered
    assert during.core.counters.num_tokens_sampled == before.core.counters.num_tokens_sampled


@pytest.mark.slow
def test_changes_alone_complete_what_each_replica_has_even_after_it_missed_some(fleet):
    new = {name: tensor.clone() for name, tensor in tiny_model(seed=5).state_dict().items()}

    async def update(name):
        new[name] = new[name] * 1.5
        return await fleet.update_weights(dict(new))

    async def run():
        found = await all_serve(fleet)
        await fleet.update_weights(dict(new))
        few = await update("model.norm.weight")
        assert {report.num_bytes_sent for report in few.replicas.values()} == {new["model.norm.weight"].nbytes}
        os.kill(found[1].pid, signal.SIGKILL)
        await update("lm_head.weight")
        await all_serve(fleet)
        last = await update("model.norm.weight")
        assert last.replicas.keys() == {0, 1}
        whole = await fleet.update_weights(dict(new), delta=False)
        return last.digest, whole.digest, await fleet.collective_rpc("get_weight_digest")

    last, whole, live = asyncio.run(run())
    assert {last, whole} == set(live) and len(live) == 2
