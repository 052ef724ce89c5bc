"""What a step costs besides the model: scheduling, preparation, sampling from a tiny vocabulary, outputs.

The engine is whole, but its model does nothing: a step prepares attention over the paged KV and returns fixed logits.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from prompts import FreshPrompts

from rollout_engine import SamplingParams
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.faces.llm_engine import LLMEngine
from rollout_engine.messages import ModelRunnerOutput, SchedulerOutput
from rollout_engine.model.cpu.attention import CpuKVPool
from rollout_engine.model.cpu.flat_batch import FlatBatch
from rollout_engine.model.cpu.runner import CpuRunner
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.results.output_processor import OutputProcessor
from rollout_engine.text.input_processor import InputProcessor

_VOCAB_SIZE, _NUM_BLOCKS, _BLOCK_SIZE, _MAX_MODEL_LEN = 64, 8192, 16, 1024
_NUM_PROMPT_TOKENS, _NUM_SAMPLED_TOKENS = 64, 128


def measure(num_requests: int, rounds: int) -> dict[str, Any]:
    """Median and mean milliseconds per step, prefill included, of the best round."""
    engine = LLMEngine(*_parts())
    prompts = FreshPrompts(_VOCAB_SIZE)
    params = SamplingParams(
        max_tokens=_NUM_SAMPLED_TOKENS, logprobs=0, ignore_eos=True, detokenize=False, output_kind="final_only"
    )
    best: list[float] = []
    for _ in range(rounds + 1):
        engine.add_requests(prompts.draw(num_requests, _NUM_PROMPT_TOKENS), params)
        seconds = []
        while engine.has_unfinished_requests():
            start = time.perf_counter()
            engine.step()
            seconds.append(time.perf_counter() - start)
        best = min(best or seconds, seconds, key=sum)
    return {
        "milliseconds_per_step": round(1e3 * statistics.mean(best), 4),
        "median_milliseconds": round(1e3 * statistics.median(best), 4),
    }


class _NoModel:
    """`CpuModel` without its layers."""

    def __init__(self) -> None:
        layer = LayerGeometry(
            num_heads=4,
            num_kv_heads=2,
            head_dim_k=32,
            head_dim_v=32,
            scale=1.0,
            sliding_window=None,
            softcap=None,
            has_sinks=False,
        )
        self.kv = CpuKVPool([layer], num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, dtype=torch.float32)
        self._logits = torch.zeros(1024, _VOCAB_SIZE)

    def forward(self, chunks: FlatBatch, logit_rows: np.ndarray | Sequence[int]) -> torch.Tensor:
        with self.kv.step(chunks):
            return self._logits[: len(logit_rows)]


class _Executor:
    def __init__(self) -> None:
        self._runner = CpuRunner(_NoModel(), vocab_size=_VOCAB_SIZE)

    def submit(self, work: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        return partial(self._runner.execute, work)

    def shutdown(self) -> None:
        pass


def _parts() -> tuple[Any, ...]:
    sizes = dict(num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, max_model_len=_MAX_MODEL_LEN, vocab_size=_VOCAB_SIZE)
    executor = _Executor()
    core = EngineCore(executor, CoreConfig(max_num_seqs=256, max_num_batched_tokens=8192, **sizes))
    inputs = InputProcessor(None, max_model_len=_MAX_MODEL_LEN, vocab_size=_VOCAB_SIZE, eos_token_ids=[])
    return core, executor, inputs, OutputProcessor(None)
