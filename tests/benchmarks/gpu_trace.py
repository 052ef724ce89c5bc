"""Where the time of steps goes: decode steps and mixed ones of the field's small model under torch.profiler."""

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rollout_engine import LLM, SamplingParams
from rollout_engine.engine.local_client import LocalClient
from rollout_engine.faces.llm_engine import LLMEngine
from tests.benchmarks.gpu_engine import ENGINE
from tests.benchmarks.gpu_shapes import Requests, write_config
from tests.benchmarks.traces import STEP, Event, figures, last_steps, read

_DECODE_STEPS, _MIXED_STEPS, _KEPT_STEPS = 40, 10, 5
_WARM_UP_STEPS = 3
"""Under the profiler, which starts slowly."""
_ids = map(str, itertools.count())


def trace(name: str = "Qwen3-0.6B") -> dict[str, Any]:
    """Figures of 256 sequences that decode, then of the same beside a prompt a step, and some events of the former."""
    with tempfile.TemporaryDirectory() as folder:
        llm = LLM(str(write_config(Path(folder), name)), **ENGINE)
    engine = llm.llm_engine
    annotate(engine)
    ask(engine, Requests.drawn(250), num_sampled=400)
    for _ in range(30):  # prompts are done, graphs and kernels have run
        engine.step()
    decode = profiled(engine, _DECODE_STEPS)
    seeds = itertools.count(1)  # a prompt that was seen is not computed again

    def arrive() -> None:
        ask(engine, Requests.drawn(1, low=1024, high=1024, seed=next(seeds)), num_sampled=2)

    mixed = profiled(engine, _MIXED_STEPS, before=arrive)
    return {"decode": figures(decode), "mixed": figures(mixed), "events": last_steps(decode, _KEPT_STEPS)}


def ask(engine: LLMEngine, requests: Requests, num_sampled: int) -> None:
    """Add them all, for so many tokens each."""
    params = SamplingParams(temperature=0.6, max_tokens=num_sampled, logprobs=0, ignore_eos=True, detokenize=False)
    for prompt in requests.prompts:
        engine.add_request(next(_ids), {"prompt_token_ids": prompt}, params)


def annotate(engine: LLMEngine) -> None:
    """Name, in traces, what a step does on the host."""
    client = engine.frontend.client
    assert isinstance(client, LocalClient), "an engine in this process"
    core = client.driver.core
    for owner, method, name in (
        (core, "_schedule", "schedule"),
        (client.driver.executor, "submit", "launch"),
        (core, "_update", "update"),
        (client.driver, "deliver", "outputs"),
    ):
        setattr(owner, method, _named(getattr(owner, method), name))


def profiled(engine: LLMEngine, num_steps: int, before: Callable[[], None] = lambda: None) -> list[Event]:
    """Events of so many steps, `before` each of which that is called."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as profiler:
        for _ in range(_WARM_UP_STEPS):
            before()
            engine.step()
        for _ in range(num_steps):
            before()
            with record_function(STEP):
                engine.step()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read(path)


def _named(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    def named(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return call(*args, **kwargs)

    return named
