"""Kills a process of an engine of several, and checks that every request ends once and nothing is left."""

import asyncio
import time
from collections import Counter

import psutil
import pytest

from rollout_engine import AsyncLLM, SamplingParams
from rollout_engine.base.errors import EngineDeadError


async def kill_one(path, chance, **sizes):
    """Start an engine, kill a process of it while requests run; returns seconds until the last request had ended."""
    options = dict(skip_tokenizer_init=True, num_kv_blocks=512, log_stats=False) | sizes
    before = psutil.Process().children()
    engine = await asyncio.to_thread(AsyncLLM, str(path), **options)
    (core,) = [child for child in psutil.Process().children() if child not in before and child.name() != "sh"]
    processes = [core, *(child for child in core.children() if child.name() != "sh")]
    assert len(processes) == sizes.get("pipeline_parallel_size", 1) * sizes.get("tensor_parallel_size", 1)
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
        async for _ in engine.generate({"prompt_token_ids": [5]}, SamplingParams(max_tokens=2, seed=1)):
            pass
    await asyncio.to_thread(engine.shutdown)
    _, alive = psutil.wait_procs(processes, timeout=3)
    assert not alive and set(ends) == set(range(3, 9)) and set(ends.values()) == {1}
    return seconds
