"""Cost of LoRA adapters: the same requests under the base, one adapter and eight, taking turns, in one engine.

Ratios are of the process's own CPU seconds, all threads together: what other processes do to the machine shows hardly
there. Prompts are computed before; the tokens that are sampled are what counts.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from prompts import FreshPrompts
from transformers import AutoConfig, AutoModelForCausalLM
from works import KV_POOL_BYTES

from rollout_engine import LLM, LoRARequest, SamplingParams
from rollout_engine.testing import random_adapter

NUM_REQUESTS, NUM_PROMPT_TOKENS, NUM_TOKENS, RANK, NUM_ADAPTERS = 16, 64, 64, 16, 8


class Engine:
    """One engine with eight adapters of all linear layers, and values for one more."""

    def __init__(self, directory: Path, dtype: str) -> None:
        options: dict[str, Any] = dict(dtype=dtype, load_format="dummy", skip_tokenizer_init=True, log_stats=False)
        self._llm = LLM(str(directory), kv_cache_bytes=KV_POOL_BYTES, max_loras=NUM_ADAPTERS + 1, **options)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        made = [random_adapter(model, f"adapter {i}", seed=i, rank=RANK, std=0.02) for i in range(NUM_ADAPTERS + 2)]
        self.names = [self._llm.add_lora(request).name for request in made[:NUM_ADAPTERS]]
        self._pushed, self._num_pushes = made[NUM_ADAPTERS:], 0

    def seconds(self, asked: list[list[int]], loras: Sequence[str | None]) -> float:
        """CPU seconds of the tokens of these prompts under these adapters."""
        self._llm.reset_prefix_cache()
        self._generate(asked, 1, loras)
        start = time.process_time()
        outputs = self._generate(asked, NUM_TOKENS, loras)
        spent = time.process_time() - start
        assert all(len(output.outputs[0].token_ids) == NUM_TOKENS for output in outputs)
        return spent

    def push(self, asked: list[int]) -> tuple[float, float, float]:
        """Seconds of a push, of its commit, and from the begin of that to the first token of a new request."""
        self._num_pushes += 1
        values = self._pushed[self._num_pushes % 2]
        request = LoRARequest("pushed", tensors=values.tensors, config=values.config, revision=self._num_pushes)
        client = self._llm.frontend.client
        start = time.perf_counter()
        arguments = {"lora_request": request.sendable(), "version": None, "kv": "keep", "timeout": None}
        report = client.call("update_lora", arguments).result()
        pushed = time.perf_counter()
        self._generate([asked], 1, ["pushed"])
        return pushed - start, report.stall_seconds, report.stall_seconds + time.perf_counter() - pushed

    def _generate(self, asked: list[list[int]], num_tokens: int, loras: Sequence[str | None]) -> list[Any]:
        params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, seed=1, detokenize=False)
        return self._llm.generate(asked, params, use_tqdm=False, lora_request=list(loras))


def measure(engine: Engine, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Throughput under one adapter and under eight over that of the base, by CPU seconds; the first round warms up."""
    kinds: dict[str, list[str | None]] = {
        "base": [None] * NUM_REQUESTS,
        "one": [engine.names[0]] * NUM_REQUESTS,
        "eight": [engine.names[i % NUM_ADAPTERS] for i in range(NUM_REQUESTS)],
    }
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds + 1):
        asked = prompts.draw(NUM_REQUESTS, NUM_PROMPT_TOKENS)
        for kind, loras in kinds.items():
            times[kind].append(engine.seconds(asked, loras))
    base = times["base"][1:]
    ratios = {kind: [b / own for b, own in zip(base, times[kind][1:], strict=True)] for kind in ("one", "eight")}
    return {
        **{f"{kind}_ratio": round(statistics.median(values), 3) for kind, values in ratios.items()},
        **{f"{kind}_ratios": [round(value, 3) for value in values] for kind, values in ratios.items()},
        **{f"{kind}_cpu_ms_per_token": _per_token(values[1:]) for kind, values in times.items()},
    }


def measure_pushes(engine: Engine, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """Milliseconds of pushes of one adapter, the first of which do not count."""
    [asked] = prompts.draw(1, 8)
    taken = [engine.push(asked) for _ in range(10 * rounds + 2)][2:]
    names = ("push_ms", "commit_ms", "commit_to_first_token_ms")
    medians = (round(1000 * statistics.median(column), 2) for column in zip(*taken, strict=True))
    return dict(zip(names, medians, strict=True))


def _per_token(seconds: list[float]) -> float:
    return round(1000 * statistics.median(seconds) / (NUM_REQUESTS * NUM_TOKENS), 3)
