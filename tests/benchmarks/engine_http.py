"""This engine with its core in a process of its own, behind the HTTP server of this one, as a worker serves it."""

import asyncio
import time
from typing import Any

import uvloop
from works import KV_POOL_BYTES

from rollout_engine import AsyncLLM, SamplingParams
from rollout_engine.serve.options import ServeOptions
from rollout_engine.serve.server import HttpServer


class Engine:
    def __init__(self, directory: str, dtype: str) -> None:
        self._engine = AsyncLLM(
            directory,
            dtype=dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_bytes=KV_POOL_BYTES,
            log_stats=False,
        )
        self._server = HttpServer(self._engine, ServeOptions(port=0)).__enter__()

    def address(self) -> list[Any]:
        """Host and port of the server."""
        host, port = self._server.url.removeprefix("http://").split(":")
        return [host, int(port)]

    def direct(self, prompts: list[list[int]], num_sampled: int, num_clients: int) -> dict[str, Any]:
        """What the server is compared with: as many coroutines, each sending its next request when the last has ended.

        Seconds in all, and for each request the seconds to its first tokens.
        """
        return uvloop.run(self._direct(prompts, num_sampled, num_clients))

    async def _direct(self, prompts: list[list[int]], num_sampled: int, num_clients: int) -> dict[str, Any]:
        params = SamplingParams(
            max_tokens=num_sampled, logprobs=0, ignore_eos=True, detokenize=False,
            output_kind="final_only" if num_clients > 1 else "delta",
        )  # fmt: skip
        waiting, first = prompts[::-1], list[float]()

        async def client() -> int:
            num_tokens = 0
            while waiting:
                start, is_first = time.perf_counter(), True
                async for output in self._engine.generate(waiting.pop(), params):
                    if is_first:
                        first.append(time.perf_counter() - start)
                    is_first = False
                    num_tokens += len(output.outputs[0].token_ids)
            return num_tokens

        start = time.perf_counter()
        num_tokens = sum(await asyncio.gather(*(client() for _ in range(num_clients))))
        seconds = time.perf_counter() - start
        assert num_tokens == num_sampled * len(prompts), f"{num_tokens} tokens"
        return {"seconds": seconds, "first_outputs": first}
