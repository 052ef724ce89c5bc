"""Any process of a pipe of stages is killed at any moment: every request ends once, and nothing is left."""

import asyncio
import random
import time
from collections import Counter

import psutil
import pytest

from rollout_engine import AsyncLLM, SamplingParams
from rollout_engine.base.errors import EngineDeadError
from rollout_engine.kernels.cpu import turns
from rollout_engine.testing import tiny_checkpoint

pytestmark = pytest.mark.skipif(not turns.is_available(), reason="no C++ compiler here")
SIZES = [dict(pipeline_parallel_size=2), dict(pipeline_parallel_size=3)]
SIZES += [dict(pipeline_parallel_size=2, tensor_parallel_size=2)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=4)


async def _one_death(path, chance, sizes):
    """Start an engine, kill a process of it while requests run; returns seconds until the last request had ended."""
    options = dict(skip_tokenizer_init=True, num_kv_blocks=512, log_stats=False) | sizes
    before = psutil.Process().children()
    engine = await asyncio.to_thread(AsyncLLM, str(path), **options)
    (core,) = [child for child in psutil.Process().children() if child not in before and child.name() != "sh"]
    processes = [core, *(child for child in core.children() if child.name() != "sh")]
    assert len(processes) == sizes["pipeline_parallel_size"] * sizes.get("tensor_parallel_size", 1)
    ends = Counter()

    async def request(number):
        params = SamplingParams(max_tokens=1500, seed=number, ignore_eos=True)
        try:
            async for output in engine.generate({"prompt_token_ids": [5, 9, number]}, params):
                ends[number] += output.finished
        except EngineDeadError:
            ends[number] += 1

    tasks = [asyncio.create_task(request(number)) for number in range(3, 9)]
    await asyncio.sleep(chance.uniform(0.0, 0.4))
    chance.choice(processes).kill()
    start = time.monotonic()
    await asyncio.wait_for(asyncio.gather(*tasks), 10)
    seconds = time.monotonic() - start
    with pytest.raises(EngineDeadError):
        async for _ in engine.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=2)):
            pass
    await asyncio.to_thread(engine.shutdown)
    _, alive = psutil.wait_procs(processes, timeout=3)
    assert not alive and set(ends) == set(range(3, 9)) and set(ends.values()) == {1}
    return seconds


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(25))
def test_every_request_ends_once_within_a_second_whichever_stage_dies(checkpoint, seed):
    chance = random.Random(seed)
    waits = [asyncio.run(_one_death(checkpoint, chance, chance.choice(SIZES))) for _ in range(4)]
    print(f"the slowest end after {max(waits):.3f} s")
    assert max(waits) < 1.0
