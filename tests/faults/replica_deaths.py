"""Replicas of a fleet that are killed, stopped or told to end in the middle of requests, which go on at others."""

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

from rollout_engine import AsyncLLM, SamplingParams
from rollout_engine.fleet.plan import brain
from rollout_engine.fleet.run.replica_health import ReplicaHealth

PROMPTS = [[5 + i, 6, 7] for i in range(8)]
PARAMS = [
    SamplingParams(n=2, seed=3, max_tokens=600, ignore_eos=True, logprobs=2, presence_penalty=0.5, prompt_logprobs=1),
    SamplingParams(seed=4, max_tokens=600, ignore_eos=True, top_p=0.9),
    SamplingParams(
        n=3, seed=5, max_tokens=600, min_tokens=300, stop_token_ids=list(range(90, 100)), output_kind="delta"
    ),
    SamplingParams(seed=6, max_tokens=600, temperature=0.0, logprobs=0, logprobs_mode="processed"),
] * 2
_PATIENCE = 120.0

Said = list[tuple[list[int], list[str]]]
"""Tokens, and bits of the log-probs, of each sample of a request."""


def said(samples: Any) -> Said:
    """Tokens and bits of samples."""
    return [
        (list(each.token_ids), [float(x).hex() for x in (() if each.logprobs is None else each.logprobs)])
        for each in samples
    ]


async def read(engine: AsyncLLM, i: int, at_output: Callable[[], object] = lambda: None) -> Said:
    """Read request `i` to its end."""
    params = PARAMS[i].clone(detokenize=False)
    samples: dict[int, tuple[list[int], list[str]]] = {}
    async for output in engine.generate(PROMPTS[i], params):
        at_output()
        for sample in output.outputs:
            tokens, logprobs = said([sample])[0]
            before = samples.get(sample.index, ([], [])) if params.output_kind == "delta" else ([], [])
            samples[sample.index] = before[0] + tokens, before[1] + logprobs
    assert output.finished
    assert output.prompt_logprobs is None or len(output.prompt_logprobs) == len(PROMPTS[i])
    return [samples[index] for index in sorted(samples)]


async def all_serve(engine: AsyncLLM) -> list[ReplicaHealth]:
    """Wait until every replica serves."""
    deadline = time.monotonic() + _PATIENCE
    while True:
        found = await engine.replicas()
        if all(replica.state == "SYNCED" for replica in found):
            return found
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.02)


class ReplicaDeaths:
    """Strikes at random replicas of a fleet at random outputs. After each, every request has the undisturbed tokens."""

    def __init__(self, engine: AsyncLLM, seed: int) -> None:
        self._engine, self._random = engine, random.Random(seed)
        self._client: Any = engine.frontend.client
        self._events: dict[str, float] = {}
        self.noticed_seconds: dict[str, list[float]] = dict(SIGKILL=[], SIGSTOP=[], SIGTERM=[])
        """From each signal until the fleet knew."""
        self.caught_up_seconds: list[float] = []
        """From the start of each new core until it had the newest weights, and served."""
        self.num_requests = self.num_tokens = self.num_continued = 0

    async def run(self, strikes: Iterable[signal.Signals], expected: list[Said]) -> None:
        """Strike with each signal in turn. A replica is never given up, however often it dies.

        `expected`: what the requests say undisturbed.
        """
        with (
            mock.patch.object(brain, "_PROVEN_SECONDS", 0.0),
            mock.patch.object(self._client, "handle_loss", self._noted("handle_loss")),
            mock.patch.object(self._client, "add_replica", self._noted("add_replica")),
        ):
            for number in strikes:
                await self._strike(number, expected)

    async def _strike(self, number: signal.Signals, expected: list[Said]) -> None:
        engine = self._engine
        replicas = await all_serve(engine)
        victim, at_output, outputs = self._random.choice(replicas), self._random.randint(1, 600), 0
        self._events.clear()

        def strike() -> None:
            nonlocal outputs
            outputs += 1
            if outputs == at_output:
                self._events["struck"] = time.monotonic()
                entries = self._client._brain.ledger.of_replica(victim.index)
                self.num_continued += sum(len(entry.live) for entry in entries)
                os.kill(victim.pid, number)

        found = await asyncio.gather(*(read(engine, i, strike) for i in range(len(PROMPTS))))
        assert found == expected, "a request has other tokens than without the strike"
        self.num_requests += len(found)
        self.num_tokens += sum(len(tokens) for request in found for tokens, _ in request)
        if "struck" not in self._events:  # all had ended before
            self._events["struck"] = time.monotonic()
            os.kill(victim.pid, number)
        while "handle_loss" not in self._events:
            await asyncio.sleep(0.005)
        again = (await all_serve(engine))[victim.index]
        assert again.pid != victim.pid and again.policy_version == engine.policy_version, (victim, again)
        self.noticed_seconds[number.name].append(self._events["handle_loss"] - self._events["struck"])
        self.caught_up_seconds.append(time.monotonic() - self._events["add_replica"])
        self._client.check_integrity()
        assert not self._client._brain.ledger.entries(), "a request is left"

    def _noted(self, name: str) -> Callable[..., Any]:
        """The client's method, with a note of when it was called."""
        method = getattr(self._client, name)

        def noted(*args: Any) -> Any:
            self._events[name] = time.monotonic()
            return method(*args)

        return noted
