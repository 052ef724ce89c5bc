"""Requests that are aborted, or whose readers go away, at random instants: no block is left."""

import asyncio
import random
import time
from typing import Any

from rollout_engine import AsyncLLM, SamplingParams
from tests.faults.clean import assert_clean
from tests.faults.ledger import Ledger
from tests.faults.progress import report


class RandomAborts:
    """Callers that each add a request, wait for anything from nothing to its end, and abort it."""

    def __init__(self, engine: AsyncLLM, seed: int) -> None:
        self.engine, self.random = engine, random.Random(seed)
        self.ledger = Ledger()
        self.num_aborts = 0
        self._deadline = 0.0

    async def run(self, num_aborts: int, seconds: float, num_callers: int = 48) -> None:
        """So many aborts, or as many as `seconds` allow; the core is recounted now and then, and must be empty at the
        end."""
        self._deadline = time.monotonic() + seconds
        callers = [asyncio.create_task(self._call(i, num_aborts)) for i in range(num_callers)]
        while any(not caller.done() for caller in callers):
            await asyncio.wait(callers, timeout=1.0, return_when=asyncio.FIRST_EXCEPTION)
            await self.engine.check_integrity()
            report(self.num_aborts)
            for caller in callers:
                if caller.done():
                    caller.result()
        self.ledger.assert_clean()
        await assert_clean(self.engine)

    async def _call(self, caller: int, num_aborts: int) -> None:
        choose, count = self.random, 0
        while self.num_aborts < num_aborts and time.monotonic() < self._deadline:
            count += 1
            self.num_aborts += 1
            n = choose.choice([1, 1, 1, 2, 4])
            kind: Any = choose.choice(["cumulative", "delta", "final_only"])
            params = SamplingParams(max_tokens=300, n=n, ignore_eos=True, detokenize=False, output_kind=kind)
            prompt = [3 + (i * 7) % 250 for i in range(choose.randint(1, 60))]
            name = f"c{caller}-{count}"
            leave_after = choose.choice([None, None, 1, 3]) if kind != "final_only" else None
            running = asyncio.create_task(
                self.ledger.run(self.engine, prompt, params, name, lambda *_: None, leave_after=leave_after)
            )
            await asyncio.sleep(choose.choice([0, 0, 0.001, 0.01, 0.03]))
            targets = choose.choice([[name], [name, name], [f"{i}_{name}" for i in range(n)] + [name]])
            await self.engine.abort(targets)
            await running
