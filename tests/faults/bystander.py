"""A client whose requests must not notice what others do to their engine."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil

from rollout_engine import AsyncLLM, SamplingParams
from tests.faults.clean import assert_clean
from tests.faults.progress import report

_ROOT = Path(__file__).parents[2]
_PARAMS = SamplingParams(max_tokens=256, seed=9, ignore_eos=True, detokenize=False, output_kind="delta")
_PROMPTS = [[5 + i, 6, 7] for i in range(8)]
_PROCESSORS = sorted(os.sched_getaffinity(0))
_THEIRS, _OURS = _PROCESSORS[-1:], _PROCESSORS[:-1] or _PROCESSORS


class Held(NamedTuple):
    """What a core's process holds."""

    bytes: int
    threads: int
    descriptors: int


class Bystander:
    """Streams requests one after the other, each with the tokens it has had before; notes the time between outputs."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.engine = engine
        self.num_requests = 0
        self._gaps: list[float] = []
        self._expected: dict[int, list[int]] = {}

    async def prepare(self) -> None:
        """Learn what the tokens are while nobody disturbs."""
        for i, _ in enumerate(_PROMPTS):
            self._expected[i] = await self._read(i)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave the last processor to attackers, as if they were on another machine.

        What is measured then is what they make the engine do, and not how processes share a processor.
        """
        own = os.getpid()
        _use(own, _OURS)
        _use(self.engine.frontend.client.pid, _OURS)  # type: ignore[attr-defined]
        try:
            yield
        finally:
            _use(own, _PROCESSORS)

    async def stream(self, until: "asyncio.Future[Any]") -> list[float]:
        """Stream until `until` is done; returns the seconds between outputs. AssertionError for another token."""
        self._gaps = []
        while not until.done():
            which = self.num_requests % len(_PROMPTS)
            assert await self._read(which) == self._expected[which], f"request {self.num_requests}: other tokens"
        until.result()
        return self._gaps

    async def attacked(self, name: str, count: int) -> dict[str, Any]:
        """Figures of an attack: gaps without and with it, and what the core holds. AssertionError if that has grown."""
        report(self.num_requests)  # of each attack once: while the attackers hang, this one goes on
        calm = await self.stream(asyncio.ensure_future(asyncio.sleep(5)))
        before, start = self.held(), time.perf_counter()
        disturbed = await self.stream(asyncio.ensure_future(attack(self.engine.address, {name: count})))
        seconds = time.perf_counter() - start
        await assert_clean(self.engine)
        after = self.held()
        assert after.threads <= before.threads and after.descriptors <= before.descriptors, f"{before} -> {after}"
        assert after.bytes <= 1.05 * before.bytes, f"{name}: {before} -> {after}"
        return dict(
            count=count,
            seconds=round(seconds, 1),
            gap_ms_calm=_quantiles(calm),
            gap_ms_disturbed=_quantiles(disturbed),
            p99_ratio=round(float(np.quantile(disturbed, 0.99) / np.quantile(calm, 0.99)), 2),
            memory_ratio=round(after.bytes / before.bytes, 3),
            threads=[before.threads, after.threads],
            descriptors=[before.descriptors, after.descriptors],
        )

    def held(self) -> Held:
        """What the core's process holds now."""
        process = psutil.Process(self.engine.frontend.client.pid)  # type: ignore[attr-defined]
        return Held(process.memory_info().rss, process.num_threads(), process.num_fds())

    async def _read(self, which: int) -> list[int]:
        self.num_requests += 1
        tokens: list[int] = []
        last = time.perf_counter()
        async for output in self.engine.generate(_PROMPTS[which], _PARAMS):
            now = time.perf_counter()
            self._gaps.append(now - last)
            last = now
            tokens += output.outputs[0].token_ids
        return tokens


def _use(pid: int, processors: list[int]) -> None:
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), processors)


async def attack(address: str, counts: dict[str, int]) -> None:
    """Carry attacks out, one after the other, in another process."""
    command = ["-m", "tests.faults.attacks", address, *(f"{name}={count}" for name, count in counts.items())]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, cwd=_ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    os.sched_setaffinity(process.pid, _THEIRS)
    try:
        _, said = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, f"{counts}: {said.decode()[-2000:]}"


def _quantiles(seconds: list[float]) -> dict[str, float]:
    return {f"p{q}": round(1e3 * float(np.quantile(seconds, q / 100)), 2) for q in (50, 99, 100)}
