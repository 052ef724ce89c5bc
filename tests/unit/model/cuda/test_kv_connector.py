"""KV that leaves a device and comes back: the bytes of blocks, and whole engines."""

import numpy as np
import pytest
import torch

from rollout_engine import SamplingParams
from rollout_engine.base.messages import KVLoad, KVSave, SchedulerOutput
from rollout_engine.model.sequences.kv_transfer import KVTransfer
from tests.unit.model.cuda.test_engine import BOUND
from tests.unit.model.cuda.test_kv_pool import held, pool, refill  # noqa: F401

# Of the interpreter: arithmetic on NaN and infinities, which the kernels mean.
pytestmark = pytest.mark.filterwarnings(
    "ignore:overflow encountered:RuntimeWarning",
    "ignore:invalid value encountered:RuntimeWarning",
    "ignore:divide by zero encountered in log:RuntimeWarning",
)
PROMPT = [3 + 7 * i % 50 for i in range(50)]
DRAWN = SamplingParams(temperature=0.8, max_tokens=3, logprobs=0, n=2, seed=3, ignore_eos=True)


def test_blocks_are_read_before_they_are_written_and_come_back(pool):  # noqa: F811
    saved = {}
    transfer = KVTransfer(pool, lambda key, data: saved.update({key: bytes(data)}))
    finish = transfer.begin_saves([KVSave(5, b"five"), KVSave(2, b"two")])
    for tensor in pool.tensors():
        tensor[5] = tensor[2] = 99
    finish()
    transfer.load([KVLoad(0, memoryview(saved[b"five"])), KVLoad(7, memoryview(saved[b"two"]))])
    assert held(pool) == [5, 1, 99, 3, 4, 99, 6, 2]
    assert {len(data) for data in saved.values()} == {transfer.block_bytes}


@pytest.mark.parametrize(
    ("architecture", "deterministic"),
    [
        pytest.param("qwen3", False, marks=pytest.mark.slow),
        *(pytest.param(name, True, marks=pytest.mark.slow) for name in ("qwen3", "qwen3_5_text", "deepseek_v3")),
    ],
)
def test_an_engine_on_a_device_finds_the_kv_that_it_saved(engine_on, architecture, deterministic):
    llm = engine_on("device", architecture, kv_connector="host", deterministic=deterministic)
    found = []
    for _ in range(2):
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], DRAWN, use_tqdm=False)
        assert llm.reset_prefix_cache()
        found.append(output)
    before, after = found
    assert llm.get_metrics().core.counters.kv_tier.num_loaded >= 3 and after.num_cached_tokens == 48
    for one, other in zip(before.outputs, after.outputs, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=0 if deterministic else BOUND, rtol=0)


@pytest.mark.slow
def test_a_step_saves_before_it_loads_and_hands_over_with_its_result(engine_on):
    executor = engine_on("device", kv_connector="host").llm_engine.frontend.client.driver.executor
    pool, link = executor.worker.runner.model.kv, executor.kv_link  # noqa: F811
    for tensor in pool.tensors():
        tensor[1], tensor[2] = 1, 2
    work = SchedulerOutput(0, 0, [], [], [], [], [])
    work.kv_saves = [KVSave(1, b"one"), KVSave(2, b"two")]
    work.kv_loads = [KVLoad(2, memoryview(bytes(link.layout.block_bytes)))]
    result = executor.submit(work)
    assert result().token_ids == []
    one, two = link.load(b"one"), link.load(b"two")
    assert one.nbytes == link.layout.block_bytes and bytes(one) != bytes(two) != bytes(one.nbytes)
    assert all(not tensor[2].any() for tensor in pool.tensors())
    executor.save_kv([KVSave(2, b"now")])
    assert bytes(link.load(b"now")) == bytes(one.nbytes)


def test_states_and_blocks_move_apart(pool):  # noqa: F811
    states = torch.arange(12, dtype=torch.bfloat16).view(4, 3)

    class Pools:
        def tensors(self):
            return pool.tensors()

    Pools.states = type("States", (), {"tensors": lambda self: iter([states])})()
    saved = {}
    transfer = KVTransfer(Pools(), lambda key, data: saved.update({key: bytes(data)}))
    transfer.save([KVSave(1, b"block"), KVSave(2, b"state", is_state=True)])
    transfer.load([KVLoad(0, memoryview(saved[b"state"]), is_state=True), KVLoad(3, memoryview(saved[b"block"]))])
    assert states[0].tolist() == [6, 7, 8] and held(pool)[3] == 1
    assert transfer.state_bytes == 6


def test_a_device_without_memory_for_a_copy_saves_nothing_and_goes_on(pool, monkeypatch, caplog):  # noqa: F811
    saved = []
    transfer = KVTransfer(pool, lambda key, data: saved.append(key))

    def read(part):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(transfer, "_read", read)
    transfer.begin_saves([KVSave(5, b"five")])()
    assert saved == [] and "not at all: the device has no memory" in caplog.text
