"""What a fleet costs beside the same engine alone: throughput, prefix hits, and a push of weights to all."""

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from engine_ours import sampling_params
from prompts import FreshPrompts
from transformers import AutoConfig, AutoModelForCausalLM
from works import KV_POOL_BYTES

from rollout_engine import AsyncLLM, RequestOutput, SamplingParams
from rollout_engine.base.config import EngineConfig
from rollout_engine.cli.ceilings import Work
from rollout_engine.fleet.run.client import FleetClient
from rollout_engine.fleet.run.processes import ProcessProvider
from rollout_engine.process.process_client import ProcessClient

_NUM_GROUPS, _GROUP_SIZE, _NUM_PREFIX_TOKENS = 64, 8, 64


class _AnyNumber(ProcessProvider):
    """Processes of this machine, also more than it has processors."""

    def check(self, num_more: int, config: EngineConfig, num_present: int = 0) -> None:
        """Let it pass."""


@contextmanager
def engine(directory: Path, dtype: str, num_replicas: int, num_threads: int | None = None) -> Iterator[AsyncLLM]:
    """A fleet; `num_replicas=0`: one engine in a process of its own, without one."""
    config = EngineConfig(
        model=str(directory),
        dtype=dtype,  # type: ignore[arg-type]
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_bytes=KV_POOL_BYTES // max(num_replicas, 1),
        log_stats=False,
        num_threads=num_threads,
    )
    if num_replicas:
        client: Any = FleetClient.start(config, num_replicas=num_replicas, provider=_AnyNumber())
    else:
        client = ProcessClient.start(config)
    with AsyncLLM.from_client(client) as made:
        yield made


def throughput(first: AsyncLLM, second: AsyncLLM, work: Work, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """`ratio`: tokens per second of the second / of the first, the median over rounds that take turns."""
    rates: list[list[float]] = [[], []]
    params = sampling_params(num_samples=work.num_samples, num_sampled=work.num_sampled_tokens)
    for i in range(rounds + 1):  # the first warms up
        for which, each in list(enumerate((first, second)))[:: 1 if i % 2 else -1]:
            drawn = prompts.draw(work.num_prompts, work.num_prompt_tokens)
            start = time.perf_counter()
            outputs = asyncio.run(_all(each, drawn, params))
            seconds = time.perf_counter() - start
            num_tokens = sum(len(sample.token_ids) for output in outputs for sample in output.outputs)
            rates[which].append(num_tokens / seconds)
    ratios = [b / a for a, b in zip(rates[0][1:], rates[1][1:], strict=True)]
    return {
        "ratio": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
        "tokens_per_second": [round(statistics.median(each[1:]), 1) for each in rates],
    }


def prefix_hits(alone: AsyncLLM, fleet: AsyncLLM, prompts: FreshPrompts) -> dict[str, Any]:
    """Cached prompt tokens of 64 groups of 8 requests that come one after the other: of the fleet / of one engine."""
    params, hits = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False), []
    groups = prompts.draw(_NUM_GROUPS, _NUM_PREFIX_TOKENS)
    for each in (alone, fleet):
        found = 0
        for _ in range(_GROUP_SIZE):
            outputs = asyncio.run(_all(each, groups, params))
            found += sum(output.num_cached_tokens for output in outputs)
        hits.append(found)
    return {"hits_ratio": round(hits[1] / hits[0], 4), "cached_tokens": hits}


def push(directory: Path, dtype: str, rounds: int) -> dict[str, Any]:
    """Milliseconds of a push to one replica and to four, packing aside; and of publishing alone, which both share."""
    trainer = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory), dtype=getattr(torch, dtype))
    times: dict[str, list[float]] = {}
    with engine(directory, dtype, 1, 1) as one, engine(directory, dtype, 4, 1) as four:
        for i in range(rounds + 1):
            for name, each in (("to_one", one), ("to_four", four)):
                client: Any = each.frontend.client
                updates = client._updates
                publish, published_at = updates._published, []
                updates._published = _then(publish, lambda at=published_at: at.append(time.perf_counter()))
                start = time.perf_counter()
                report = asyncio.run(each.update_weights(trainer))
                seconds = time.perf_counter() - start
                updates._published = publish
                if i:
                    times.setdefault(f"{name}_ms", []).append(1e3 * (seconds - report.pack_seconds))
                    times.setdefault(f"{name}_published_ms", []).append(1e3 * (published_at[0] - start))
                    times.setdefault(f"{name}_stall_ms", []).append(1e3 * report.stall_seconds)
    median = {name: round(statistics.median(values), 1) for name, values in times.items()}
    return {
        "ratio": round(median["to_four_ms"] / median["to_one_ms"], 2),
        "ratio_until_readable": round(median["to_four_published_ms"] / median["to_one_published_ms"], 2),
        "megabytes": round(report.num_bytes / 1e6, 1),
    } | median


def _then(function: Callable[..., Any], after: Callable[[], object]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        result = function(*args)
        after()
        return result

    return call


async def _all(each: AsyncLLM, prompts: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
    async def last(prompt: list[int]) -> RequestOutput:
        return [output async for output in each.generate(prompt, params)][-1]

    return await asyncio.gather(*(last(prompt) for prompt in prompts))
