"""This engine with its core in a process of its own, as a worker serves it."""

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

from engine_ours import sampling_params
from streaming import SETTLED_STEPS, replay, step_at
from works import KV_POOL_BYTES

from rollout_engine import AsyncLLM, EngineDeadError, RequestOutput, SamplingParams

_TICK_SECONDS = 0.001


class Engine:
    def __init__(self, directory: str, dtype: str) -> None:
        self._directory, self._dtype = directory, dtype
        self._engine = self._make()

    def _make(self) -> AsyncLLM:
        return AsyncLLM(
            self._directory,
            dtype=self._dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_bytes=KV_POOL_BYTES,
            log_stats=False,
        )

    def run(self, prompts: list[list[int]], **settings: int) -> int:
        """Tokens sampled, one request a prompt, all at once."""
        params = sampling_params(**settings)

        async def run() -> list[RequestOutput]:
            return await asyncio.gather(*(self._last(prompt, params) for prompt in prompts))

        return sum(len(sample.token_ids) for result in asyncio.run(run()) for sample in result.outputs)

    def stream(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """See `streaming.replay`."""
        return asyncio.run(replay(requests, self._generate))

    def gaps(self, prompts: list[list[int]], num_sampled: int) -> list[float]:
        """Milliseconds by which a timer of 1 ms comes late, sorted, while every prompt streams token by token."""

        async def tick(late: list[float]) -> None:
            while True:
                start = time.perf_counter()
                await asyncio.sleep(_TICK_SECONDS)
                late.append(1000 * (time.perf_counter() - start - _TICK_SECONDS))

        async def run() -> list[float]:
            params = SamplingParams(max_tokens=num_sampled, ignore_eos=True, detokenize=False, logprobs=0)
            late: list[float] = []
            ticker = asyncio.create_task(tick(late))
            await asyncio.gather(*(self._last(prompt, params) for prompt in prompts))
            ticker.cancel()
            return sorted(late)

        return asyncio.run(run())

    def pauses(self, prompts: list[list[int]], num_pauses: int) -> list[tuple[float, float]]:
        """(milliseconds of a pause with "keep", milliseconds of the step it came in), while every prompt streams."""
        params = SamplingParams(max_tokens=800, ignore_eos=True, detokenize=False, logprobs=0, output_kind="delta")
        ends: list[float] = []
        """Of steps: when the first prompt's tokens came."""

        async def watch() -> None:
            async for _ in self._engine.generate(prompts[0], params):
                ends.append(time.perf_counter())

        async def run() -> list[tuple[float, float]]:
            tasks = [asyncio.create_task(self._last(prompt, params)) for prompt in prompts[1:]]
            tasks.append(asyncio.create_task(watch()))
            while len(ends) < SETTLED_STEPS:
                await asyncio.sleep(_TICK_SECONDS)
            measured = [await self._pause(ends) for _ in range(num_pauses)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            return measured

        return asyncio.run(run())

    async def _pause(self, ends: list[float]) -> tuple[float, float]:
        await asyncio.sleep(random.uniform(0.2, 0.3))  # to come at any point of a step
        start = time.perf_counter()
        await self._engine.pause_generation(mode="keep")
        seconds = time.perf_counter() - start
        await self._engine.resume_generation()
        while ends[-1] < start:  # it came between two steps
            await asyncio.sleep(_TICK_SECONDS)
        return 1000 * seconds, 1000 * step_at(start, ends)

    def kill(self, prompts: list[list[int]]) -> float:
        """Milliseconds from SIGKILL of the core until the last open request has raised; a new core is started."""

        async def run() -> float:
            params = SamplingParams(max_tokens=500, ignore_eos=True, detokenize=False)
            tasks = [asyncio.create_task(self._last(prompt, params)) for prompt in prompts]
            pid = (await self._engine.check_health()).pid
            await asyncio.sleep(0.2)
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            seconds = time.perf_counter() - start
            assert all(isinstance(result, EngineDeadError) for result in results)
            return 1000 * seconds

        milliseconds = asyncio.run(run())
        self._engine.shutdown()
        self._engine = self._make()
        return milliseconds

    async def _generate(self, prompt: list[int], num_sampled: int) -> AsyncIterator[int]:
        params = SamplingParams(
            max_tokens=num_sampled, logprobs=0, ignore_eos=True, detokenize=False, output_kind="delta"
        )
        async for output in self._engine.generate(prompt, params):
            yield len(output.outputs[0].token_ids)

    async def _last(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        return [output async for output in self._engine.generate(prompt, params)][-1]
