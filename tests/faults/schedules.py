"""Random orders of every verb on a live core, several at once, with a truth for every token.

A few requests are run undisturbed first. Later ones are the same under other names: whatever is paused, put to sleep,
aborted or forgotten around them, what they give is a beginning of what they gave then.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable
from typing import Any, NamedTuple

import msgspec

from rollout_engine import AsyncLLM, LifecycleError, SamplingParams
from tests.faults.ledger import Ledger

_MAX_OPEN = 24
_VERB_SECONDS = 300.0


class Menu(NamedTuple):
    """A request, and all the tokens of its samples."""

    prompt: list[int]
    params: SamplingParams
    tokens: list[list[int]]

    def check(self, index: int, tokens: list[int], _: object) -> None:
        """AssertionError unless `tokens` begin what sample `index` is to give."""
        assert tokens == self.tokens[index][: len(tokens)], f"sample {index} gave other tokens than undisturbed"


async def make_menu(engine: AsyncLLM) -> list[Menu]:
    """Run the requests undisturbed. Prompts share beginnings, so that prefixes are found."""
    menu = []
    for seed, (length, n, max_tokens) in enumerate([(3, 1, 150), (40, 1, 60), (40, 3, 40), (90, 2, 30), (17, 1, 5)]):
        prompt = [3 + (7 * i * i) % 250 for i in range(length)]
        params = SamplingParams(max_tokens=max_tokens, n=n, seed=seed, ignore_eos=True, detokenize=False)
        *_, last = [output async for output in engine.generate(prompt, params)]
        menu.append(Menu(prompt, params, [sample.token_ids for sample in last.outputs]))
    return menu


class Schedule:
    """Chooses and runs the operations. Verbs are not awaited before the next: they overlap as they like."""

    def __init__(self, engine: AsyncLLM, menu: list[Menu], seed: int) -> None:
        self.engine, self.menu, self.random = engine, menu, random.Random(seed)
        self.ledger = Ledger()
        self.verbs: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failed: list[BaseException] = []
        self._num_added = 0

    async def run(self, seconds: float, max_operations: int) -> None:
        """Operate until either is used up; then everything is allowed to end. Raises the first failure."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.num_operations < max_operations and not self._failed:
            self.operate()
            await asyncio.sleep(self.random.choice([0, 0, 0.001, 0.01]))
        while self._tasks and not self._failed:
            await self._run_again()
            if self._tasks:  # the last may have ended meanwhile
                await asyncio.wait(self._tasks, timeout=0.5)
        if self._failed:
            for task in self._tasks:
                task.cancel()
            raise self._failed[0]
        await self._run_again()  # the last may have been a pause
        self.ledger.assert_clean()

    async def _run_again(self) -> None:
        await self._verb("wake_up", self.engine.wake_up())
        await self._verb("resume_generation", self.engine.resume_generation())

    @property
    def num_operations(self) -> int:
        """Of all kinds, so far."""
        return sum(self.verbs.values()) + self._num_added

    def operate(self) -> None:
        """One operation."""
        choose, engine = self.random, self.engine
        weights = dict(add=40, abort=12, pause=4, resume=9, sleep=2, wake=7, reset=4, drain=1, stranger=1, look=3)
        match choose.choices(list(weights), list(weights.values()))[0]:
            case "add":
                self._add(choose.choice(self.menu))
            case "abort":
                self._start("abort", engine.abort(self._some_names()))
            case "pause":
                mode = choose.choice(["abort", "wait", "keep", "keep"])
                clear = choose.random() < 0.3
                self._start(f"pause {mode}", engine.pause_generation(mode=mode, clear_cache=clear))
            case "resume":
                self._start("resume", engine.resume_generation())
            case "sleep":
                self._start("sleep", engine.sleep(1, mode=choose.choice(["abort", "wait", "keep"])))
            case "wake":
                self._start("wake", engine.wake_up(choose.choice([None, None, "weights", "kv_cache"])))
            case "reset":
                self._start("reset", engine.reset_prefix_cache(choose.random() < 0.5))
            case "drain":
                self._start("drain", engine.wait_for_requests_to_drain(0.2))
            case "stranger":
                self._start("stranger", self._stranger())
            case "look":
                self._start("look", engine.get_metrics())

    def _add(self, menu: Menu) -> None:
        if len(self.ledger.open) >= _MAX_OPEN:
            return
        choose = self.random
        self._num_added += 1
        kind = choose.choice(["cumulative", "delta", "final_only"])
        params = msgspec.structs.replace(menu.params, output_kind=kind)
        leave_after = choose.choice([None, None, None, 1, 5])
        name = f"r{self._num_added}"
        self._spawn(self.ledger.run(self.engine, menu.prompt, params, name, menu.check, leave_after=leave_after))

    def _some_names(self) -> list[str]:
        names = self.ledger.open
        chosen = self.random.sample(names, min(len(names), self.random.choice([1, 1, 3])))
        return [self.random.choice([name, f"1_{name}", "nobody"]) for name in chosen]

    async def _stranger(self) -> None:
        """Another client, that leaves in the middle of its requests."""
        menu = self.menu[0]
        with await asyncio.to_thread(AsyncLLM.connect, self.engine.address) as other:
            outputs = other.generate(menu.prompt, menu.params)
            first = asyncio.create_task(anext(outputs))
            await asyncio.wait([first], timeout=0.05)
            if first.done():
                sample = first.result().outputs[0]
                menu.check(sample.index, sample.token_ids, None)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            await outputs.aclose()

    def _start(self, name: str, verb: Awaitable[Any]) -> None:
        self._spawn(self._verb(name, verb))

    async def _verb(self, name: str, verb: Awaitable[Any]) -> None:
        self.verbs[name] += 1
        try:
            await asyncio.wait_for(verb, _VERB_SECONDS)
        except LifecycleError:
            self.refused[name] += 1

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._failed.append(task.exception())
