"""Requests that come to an asynchronous engine at given times, and when their tokens come.

The engine may live in another environment, so this file imports nothing but the standard library.
"""

import asyncio
import bisect
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

Generate = Callable[[list[int], int], AsyncIterator[int]]
"""(prompt, tokens to sample) -> how many tokens each output brings."""


async def replay(requests: list[dict[str, Any]], generate: Generate) -> dict[str, Any]:
    """Send each request at its time, all read by this event loop; milliseconds, and how much came in how long.

    `first`: from the time at which a request was due to its first token, so a late loop counts. `gaps`: between outputs
    of a request that bring tokens.
    """
    start = time.perf_counter()
    times = await asyncio.gather(*(_times(request, start, generate) for request in requests))
    due = [start + request["at"] for request in requests]
    return {
        "first": [1000 * (own[0] - at) for own, at in zip(times, due, strict=True)],
        "gaps": [1000 * (after - before) for own in times for before, after in zip(own, own[1:], strict=False)],
        "tokens": sum(request["num_sampled"] for request in requests),
        "seconds": max(own[-1] for own in times) - start,
    }


SETTLED_STEPS = 5
"""After so many every prompt of a small batch is computed, and steps are alike."""


def step_at(moment: float, ends: list[float]) -> float:
    """Seconds of the step that was in progress at `moment`, from when steps ended."""
    last = bisect.bisect_right(ends, moment)
    return ends[last] - ends[last - 1]


async def _times(request: dict[str, Any], start: float, generate: Generate) -> list[float]:
    """When each output that brought tokens came. Raises `AssertionError` for another number than was asked for."""
    await asyncio.sleep(max(start + request["at"] - time.perf_counter(), 0.0))
    times, num_sampled = [], 0
    async for num_new in generate(request["prompt"], request["num_sampled"]):
        if num_new:
            times.append(time.perf_counter())
            num_sampled += num_new
    assert num_sampled == request["num_sampled"], f"{num_sampled} tokens instead of {request['num_sampled']}"
    return times
