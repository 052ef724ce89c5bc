"""The heaviest honest load: nothing in it is stuck, and no watchdog may say so.

Waves of 512 prompts of 4,096 tokens, updates of 1 GiB one after the other, and collections of ten million objects in
the core's process and in its owner's, all at once.
"""

import asyncio
import gc
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from rollout_engine import AsyncLLM, SamplingParams
from rollout_engine.testing import tiny_checkpoint
from tests.faults.progress import report
from worker_ext.base import WorkerExtension, rpc

NUM_PROMPTS = 512
PROMPT_TOKENS = 4096
NUM_OBJECTS = 10_000_000
STEP_DEADLINE = 60.0
"""Thirty times less than by default."""
_VOCAB, _HIDDEN = 1 << 17, 1 << 10
_CHECK_SECONDS = 1.0
_PARAMS = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False, output_kind="final_only")


def collect_objects() -> float:
    """Make ten million objects and collect them; returns the seconds that the collection took."""
    objects: list[list[object]] = [[] for _ in range(NUM_OBJECTS)]
    for one, other in zip(objects, objects[1:], strict=False):
        one.append(other)
    start = time.perf_counter()
    gc.collect()
    seconds = time.perf_counter() - start
    while objects:  # from the end: a long chain is not taken apart by recursion
        objects.pop()
    return seconds


class GarbageExtension(WorkerExtension):
    """Makes garbage in the core's process."""

    @rpc
    def collect_objects(self) -> float:
        return collect_objects()


def honest_checkpoint(directory: Path) -> Path:
    """Weights of 1 GiB, nearly all of them in the embedding and the head."""
    return tiny_checkpoint(
        directory,
        vocab_size=_VOCAB,
        hidden_size=_HIDDEN,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        max_position_embeddings=PROMPT_TOKENS + 64,
        std=0.02,
    )


class HonestLoad:
    """Runs it over an engine, and counts."""

    def __init__(self, engine: AsyncLLM, weights: dict[str, torch.Tensor]) -> None:
        self._engine, self._weights = engine, weights
        self._is_over = False
        self.num_requests = self.num_prompt_tokens = 0
        self.update_seconds: list[float] = []
        self.collection_seconds: dict[str, list[float]] = {"core": [], "owner": []}
        self.health_seconds: list[float] = []
        """How long each answer of `check_health` took, which is asked for every second."""
        self.longest_busy = 0.0
        """Seconds of the longest step or verb that `check_health` saw."""

    async def run(self, seconds: float) -> None:
        """Load the engine for so long, and until the last wave of requests has ended."""
        deadline = time.monotonic() + seconds
        async with asyncio.TaskGroup() as tasks:
            for beside in (self._update, self._collect_in_core, self._collect_here, self._check_health):
                tasks.create_task(self._repeat(beside))
            wave = 0
            while time.monotonic() < deadline:
                await asyncio.gather(*(self._generate(wave, i) for i in range(NUM_PROMPTS)))
                wave += 1
            self._is_over = True

    async def _repeat(self, what) -> None:  # type: ignore[no-untyped-def]
        while not self._is_over:
            await what()

    async def _generate(self, wave: int, i: int) -> None:
        choose = torch.Generator().manual_seed(wave * NUM_PROMPTS + i)
        prompt = torch.randint(3, _VOCAB, (PROMPT_TOKENS,), generator=choose).tolist()
        (output,) = [output async for output in self._engine.generate(prompt, _PARAMS)]
        (sample,) = output.outputs
        assert (sample.finish_reason, len(sample.token_ids)) == ("length", _PARAMS.max_tokens), sample
        self.num_requests += 1
        report(self.num_requests)
        self.num_prompt_tokens += len(prompt)

    async def _update(self) -> None:
        start = time.perf_counter()
        await self._engine.update_weights(self._weights)
        self.update_seconds.append(time.perf_counter() - start)

    async def _collect_in_core(self) -> None:
        (seconds,) = await self._engine.collective_rpc("collect_objects")
        self.collection_seconds["core"].append(seconds)
        await asyncio.sleep(5)

    async def _collect_here(self) -> None:
        self.collection_seconds["owner"].append(await asyncio.to_thread(collect_objects))
        await asyncio.sleep(5)

    async def _check_health(self) -> None:
        start = time.perf_counter()
        health = await self._engine.check_health()
        self.health_seconds.append(time.perf_counter() - start)
        assert not health.stuck, health
        self.longest_busy = max(self.longest_busy, health.busy_seconds)
        await asyncio.sleep(_CHECK_SECONDS)


@contextmanager
def alarms() -> Iterator[list[str]]:
    """Messages that this process logs meanwhile, at ERROR or above."""
    found: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Handler(logging.ERROR)
    logging.getLogger("rollout_engine").addHandler(handler)
    try:
        yield found
    finally:
        logging.getLogger("rollout_engine").removeHandler(handler)


def honest_load(directory: Path, seconds: float) -> dict[str, Any]:
    """Figures of so many seconds. AssertionError for an error, a failed request, or a word of a watchdog."""
    checkpoint = honest_checkpoint(directory)
    weights = load_file(checkpoint / "model.safetensors")
    options: dict[str, Any] = dict(
        num_kv_blocks=17_000,
        block_size=16,
        max_num_seqs=64,
        num_threads=1,
        skip_tokenizer_init=True,
        step_deadline=STEP_DEADLINE,
        worker_extensions=[f"{GarbageExtension.__module__}:GarbageExtension"],
    )
    with alarms() as found, AsyncLLM(checkpoint, **options) as engine:
        load = HonestLoad(engine, weights)
        asyncio.run(load.run(seconds))
    assert not found, found
    return dict(
        requests=load.num_requests,
        prompt_tokens=load.num_prompt_tokens,
        updates=len(load.update_seconds),
        update_gib=round(sum(each.nbytes for each in weights.values()) / 2**30, 3),
        collections={where: len(each) for where, each in load.collection_seconds.items()},
        longest_collection_s={where: round(max(each), 2) for where, each in load.collection_seconds.items()},
        longest_answer_of_check_health_s=round(float(np.max(load.health_seconds)), 2),
        longest_step_or_verb_seen_s=round(load.longest_busy, 2),
        step_deadline=STEP_DEADLINE,
        false_alarms=0,
    )
