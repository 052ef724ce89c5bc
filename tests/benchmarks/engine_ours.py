"""This engine, as a worker serves it."""

import random
import threading
import time
from typing import Any

import torch
from streaming import SETTLED_STEPS, step_at
from transformers import AutoConfig, AutoModelForCausalLM
from works import KV_POOL_BYTES

from rollout_engine import LLM, SamplingParams
from rollout_engine.cli import ceilings

_TICK_SECONDS = 0.001


class Engine:
    def __init__(self, directory: str, dtype: str) -> None:
        self._directory, self._dtype = directory, getattr(torch, dtype)
        self._llm = LLM(
            directory,
            dtype=dtype,
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_bytes=KV_POOL_BYTES,
            log_stats=False,
        )
        self._trainer: torch.nn.Module | None = None

    def run(self, prompts: list[list[int]], **settings: Any) -> int:
        """Tokens sampled; known prefixes are forgotten before, as after a weight update."""
        self._llm.reset_prefix_cache()
        results = self._llm.generate(prompts, sampling_params(**settings), use_tqdm=False)
        return sum(len(sample.token_ids) for result in results for sample in result.outputs)

    def run_with_updates(self, prompts: list[list[int]], steps_between: int, **settings: Any) -> dict[str, Any]:
        """As `run`, with new weights after every `steps_between` steps; seconds of each update, and of all steps."""
        engine = self._llm.llm_engine
        engine.add_requests(prompts, sampling_params(**settings))
        reports, num_steps, start = [], 0, time.perf_counter()
        while engine.has_unfinished_requests():
            engine.step()
            num_steps += 1
            if num_steps % steps_between == 0:
                reports.append(engine.update_weights(self._trainer))
        updates = [report.seconds for report in reports]
        return {
            "updates": updates,
            "stalls": [report.stall_seconds for report in reports],
            "step": (time.perf_counter() - start - sum(updates)) / num_steps,
        }

    def pauses(self, prompts: list[list[int]], num_pauses: int) -> list[tuple[float, float]]:
        """(milliseconds of a pause with "keep", milliseconds of the step it came in), while another thread steps."""
        params = SamplingParams(max_tokens=800, ignore_eos=True, detokenize=False, logprobs=0)
        engine, stopped = self._llm.llm_engine, threading.Event()
        names = engine.add_requests(prompts, params)
        ends: list[float] = []
        """Of steps that computed something."""

        def run() -> None:
            num_steps = self._num_steps()
            while not stopped.is_set():
                if engine.is_paused():
                    time.sleep(_TICK_SECONDS)
                engine.step()
                end = time.perf_counter()
                if (now := self._num_steps()) > num_steps:
                    ends.append(end)
                    num_steps = now

        stepping = threading.Thread(target=run)
        stepping.start()
        try:
            while len(ends) < SETTLED_STEPS:
                time.sleep(_TICK_SECONDS)
            return [self._pause(ends) for _ in range(num_pauses)]
        finally:
            stopped.set()
            stepping.join()
            engine.abort_request(names, discard=True)

    def _pause(self, ends: list[float]) -> tuple[float, float]:
        time.sleep(random.uniform(0.2, 0.3))  # to come at any point of a step
        start = time.perf_counter()
        self._llm.pause_generation(mode="keep")
        seconds = time.perf_counter() - start
        self._llm.resume_generation()
        while ends[-1] < start:  # it came between two steps
            time.sleep(_TICK_SECONDS)
        return 1000 * seconds, 1000 * step_at(start, ends)

    def _num_steps(self) -> int:
        return self._llm.get_metrics().core.counters.num_steps

    def make_trainer(self) -> None:
        """The module whose weights `run_with_updates` sends."""
        config = AutoConfig.from_pretrained(self._directory)
        self._trainer = AutoModelForCausalLM.from_config(config, dtype=self._dtype)

    def ceilings(self, work: list[int]) -> dict[str, float]:
        """What memory and arithmetic allow for this work, measured now."""
        return ceilings.measure(self._directory, self._dtype, ceilings.Work(*work))._asdict()


def sampling_params(num_samples: int, num_sampled: int, logprobs: bool = True, top_p: float = 1.0) -> SamplingParams:
    return SamplingParams(
        n=num_samples,
        max_tokens=num_sampled,
        top_p=top_p,
        logprobs=0 if logprobs else None,
        ignore_eos=True,
        detokenize=False,
        output_kind="final_only",
    )
