"""What a step costs besides the model: scheduling, preparation, sampling from a tiny vocabulary, outputs.

The engine is whole, but its model does nothing: a step prepares attention over the paged KV and returns fixed logits.

    PYTHONPATH=$PWD python tests/benchmarks/host.py --requests 64   this thread's processor time, on a busy machine too
    ... --busy 1 --switch-intervals 5 0.5   beside a thread that runs Python all the time, as a weight update or
                                            messages may, and gives way after so many milliseconds, in turns
"""

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from prompts import FreshPrompts

from rollout_engine import EngineConfig, SamplingParams
from rollout_engine.base.messages import ModelRunnerOutput, SchedulerOutput
from rollout_engine.core.config import CoreConfig
from rollout_engine.core.engine_core import EngineCore
from rollout_engine.engine.client import EngineInfo
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.faces.frontend import Frontend
from rollout_engine.faces.llm_engine import LLMEngine
from rollout_engine.model.cpu.attention import CpuKVPool
from rollout_engine.model.cpu.flat_batch import FlatBatch
from rollout_engine.model.cpu.runner import CpuRunner
from rollout_engine.model.modules.geometry import LayerGeometry
from rollout_engine.model.sampling.logit_rows import LogitRows

_VOCAB_SIZE, _NUM_BLOCKS, _BLOCK_SIZE, _MAX_MODEL_LEN = 64, 8192, 16, 1024
_NUM_PROMPT_TOKENS, _NUM_SAMPLED_TOKENS = 64, 128
_PARAMS = SamplingParams(
    max_tokens=_NUM_SAMPLED_TOKENS, logprobs=0, ignore_eos=True, detokenize=False, output_kind="final_only"
)


@contextmanager
def busy_threads(count: int, switch_interval: float) -> Iterator[None]:
    """So many threads that run Python meanwhile; they give way after `switch_interval` seconds."""
    stop, before = threading.Event(), sys.getswitchinterval()

    def work() -> None:
        while not stop.is_set():
            sum(range(1000))

    threads = [threading.Thread(target=work) for _ in range(count)]
    sys.setswitchinterval(switch_interval)
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(before)


def compare_intervals(num_requests: int, rounds: int, count: int, intervals: Sequence[float]) -> dict[str, Any]:
    """`measure` beside `count` busy threads, by their switch interval in milliseconds; the median of the rounds."""
    found: dict[str, list[dict[str, Any]]] = {}
    for _ in range(rounds):
        for interval in intervals:
            with busy_threads(count, interval / 1e3):
                found.setdefault(f"{interval:g} ms", []).append(measure(num_requests, 1))
    return {
        name: {key: round(statistics.median(each[key] for each in figures), 4) for key in figures[0]}
        for name, figures in found.items()
    }


def measure(num_requests: int, rounds: int) -> dict[str, Any]:
    """Milliseconds per step: by the clock, mean and median of the best round, prefill included; and the median of this
    thread's processor time over the decode steps of all rounds, which other processes change little."""
    engine = make_engine()
    prompts = FreshPrompts(_VOCAB_SIZE)
    best: list[float] = []
    of_processor: list[int] = []
    for _ in range(rounds + 1):
        engine.add_requests(prompts.draw(num_requests, _NUM_PROMPT_TOKENS), _PARAMS)
        seconds, nanoseconds = [], []
        while engine.has_unfinished_requests():
            start, start_ns = time.perf_counter(), time.thread_time_ns()
            engine.step()
            nanoseconds.append(time.thread_time_ns() - start_ns)
            seconds.append(time.perf_counter() - start)
        best = min(best or seconds, seconds, key=sum)
        of_processor += nanoseconds[1:-1]
    return {
        "milliseconds_per_step": round(1e3 * statistics.mean(best), 4),
        "median_milliseconds": round(1e3 * statistics.median(best), 4),
        "median_processor_milliseconds": round(1e-6 * statistics.median(of_processor), 4),
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
        self.module, self.adapters, self.routers = torch.nn.Identity(), None, ()
        self._logits = torch.zeros(1024, _VOCAB_SIZE)

    def forward_states(
        self, chunks: FlatBatch, logit_rows: np.ndarray | Sequence[int], *_: object
    ) -> tuple[LogitRows, torch.Tensor]:
        self.kv.plan(chunks)
        return LogitRows.of(self._logits[: len(logit_rows)]), self._logits[:0]


class _Executor:
    threads = ()
    dirty = False
    num_weight_bytes = 0

    def __init__(self) -> None:
        self._runner = CpuRunner(_NoModel(), vocab_size=_VOCAB_SIZE)

    def submit(self, work: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        return partial(self._runner.execute, work)

    def attach_core(self, core: EngineCore, boundary: object) -> None: ...

    def shutdown(self) -> None: ...


def make_engine() -> LLMEngine:
    """An engine whose steps do everything but run layers."""
    sizes = dict(num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, max_model_len=_MAX_MODEL_LEN, vocab_size=_VOCAB_SIZE)
    core_config = CoreConfig(max_num_seqs=256, max_num_batched_tokens=8192, **sizes)
    config = EngineConfig(model="none", skip_tokenizer_init=True)
    info = EngineInfo(
        config=config, max_prefill_beside_decode=0, eos_token_ids=[], dtype="float32", choices="no model",
        num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, max_model_len=_MAX_MODEL_LEN, vocab_size=_VOCAB_SIZE,
    )  # fmt: skip
    executor = _Executor()
    return LLMEngine(Frontend(LocalClient(EngineCore(executor, core_config), executor, info), None))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--busy", type=int, default=0, help="threads that run Python meanwhile")
    parser.add_argument("--switch-intervals", type=float, nargs="+", default=[5.0], help="milliseconds")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.busy:
        print(compare_intervals(args.requests, args.rounds, args.busy, args.switch_intervals))
    else:
        print(measure(args.requests, args.rounds))
