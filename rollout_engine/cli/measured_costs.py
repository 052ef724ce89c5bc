"""Measures the costs of steps of a real engine, and writes them as the table [costs] of a fleet file."""

import random
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.capacity.costs import Fit, StepShape, fit
from rollout_engine.cli import machine
from rollout_engine.faces.llm_engine import LLMEngine

_NUM_ROUNDS = 2
_NUM_DECODED = 24
_MAX_PREFILLED = 8192
"""Prompt tokens of one work: if its rows would have more, some are samples of the same prompt."""
_ENGINE: dict[str, Any] = {"skip_tokenizer_init": True, "log_stats": False, "enable_prefix_caching": False}


class Measured(NamedTuple):
    """Costs of an engine's steps, and the sizes that go with them."""

    fit: Fit
    steps: list[tuple[StepShape, float]]
    """The measurements: each step, and its seconds."""
    engine: dict[str, Any]
    """The table [engine] of the engine that was measured."""
    model: str


class MeasuredWork(NamedTuple):
    """Prompts of one length, and samples of each, that decode together."""

    num_prompts: int
    num_samples: int
    num_prompt_tokens: int

    @property
    def num_rows(self) -> int:
        """Sequences that decode."""
        return self.num_prompts * self.num_samples


def measure(model: str, options: dict[str, Any], on_progress: Any = lambda num_steps: None) -> Measured:
    """Run a model at several batch sizes and context lengths, and fit the costs of its steps.

    `options`: fields of `EngineConfig`. `on_progress` is called after each work with 1. Raises `ConfigError`.
    """
    config = EngineConfig.from_kwargs(model=model, **(_ENGINE | options))
    engine = LLMEngine.from_config(config)
    try:
        info = engine.frontend.client.info
        source, steps = random.Random(0), list[tuple[StepShape, float]]()
        todo = works(config.max_num_seqs, info.max_model_len, info.num_blocks * info.block_size)
        list(_steps(engine, todo[0], source, info.vocab_size))  # warms up
        for work in todo:
            for _ in range(_NUM_ROUNDS):
                steps += _steps(engine, work, source, info.vocab_size)
            on_progress(1)
    finally:
        engine.shutdown()
    table = dict(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_prefill_beside_decode=info.max_prefill_beside_decode,
        num_kv_blocks=info.num_blocks,
        block_size=info.block_size,
    )
    return Measured(fit(*zip(*steps, strict=True)), steps, table, model)


def works(max_num_seqs: int, max_model_len: int, num_kv_tokens: int) -> list[MeasuredWork]:
    """Batch sizes up to `max_num_seqs`, each with a short, a middle and a long context that fit the engine."""
    longest = min(max_model_len, 2048) - _NUM_DECODED
    if longest < 2:
        raise ConfigError(f"max_model_len={max_model_len} leaves no room to measure: at least {_NUM_DECODED + 2}.")
    found = []
    for rows in sorted({max(max_num_seqs // part, 1) for part in (max_num_seqs, 16, 4, 1)}):
        for length in sorted({min(32, longest), max(longest // 4, 1), longest}):
            num_prompts = min(max(_MAX_PREFILLED // length, 1), rows)
            found.append(MeasuredWork(num_prompts, rows // num_prompts, length))
    fitting = [work for work in found if work.num_rows * (work.num_prompt_tokens + _NUM_DECODED) <= num_kv_tokens]
    return fitting or found[:1]


def as_toml(measured: Measured) -> str:
    """The tables [engine] and [costs] as TOML."""
    found = measured.fit
    lines = [
        f"# {measured.model} on {machine.cpu_name()}, {found.num_steps} steps: their sum is off by "
        f"{found.total_error:+.1%}, 95 % of them by less than {found.p95_error:.0%}.",
        "",
        "[engine]",
        *(f"{name} = {value}" for name, value in measured.engine.items()),
        "",
        "[costs]",
        *(f"{name} = {value:.4g}" for name, value in found.costs._asdict().items()),
    ]
    return "\n".join(lines) + "\n"


def _steps(
    engine: LLMEngine, work: MeasuredWork, source: random.Random, vocab_size: int
) -> Iterator[tuple[StepShape, float]]:
    """Each step of one work: its shape, and its seconds."""
    prompts = [[source.randrange(vocab_size) for _ in range(work.num_prompt_tokens)] for _ in range(work.num_prompts)]
    params = SamplingParams(
        n=work.num_samples,
        max_tokens=_NUM_DECODED,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        output_kind="final_only",
    )
    engine.add_requests(prompts, params)
    progress, num_prefilled = _Progress(work), engine.stats.num_prompt_tokens_computed
    while engine.has_unfinished_requests():
        start = time.perf_counter()
        engine.step()
        duration = time.perf_counter() - start
        before, num_prefilled = num_prefilled, engine.stats.num_prompt_tokens_computed
        if shape := progress.step(num_prefilled - before):
            yield shape, duration


class _Progress:
    """Progress of each prompt of a work. Counters of the engine give a step's prompt tokens, in order of prompts."""

    def __init__(self, work: MeasuredWork) -> None:
        self._work = work
        self._num_computed, self._num_sampled = [0] * work.num_prompts, [0] * work.num_prompts

    def step(self, num_prefill: int) -> StepShape | None:
        """The shape of the step's work; None: there was none."""
        num_prompt, num_samples = self._work.num_prompt_tokens, self._work.num_samples
        decoding = [i for i, count in enumerate(self._num_sampled) if 0 < count < _NUM_DECODED]
        context = sum(num_samples * (num_prompt + self._num_sampled[i]) for i in decoding)
        left = num_prefill
        for i, computed in enumerate(self._num_computed):
            if left and (added := min(num_prompt - computed, left)):
                left -= added
                self._num_computed[i] += added
                context += self._num_computed[i]
                self._num_sampled[i] = int(self._num_computed[i] == num_prompt)
        for i in decoding:
            self._num_sampled[i] += 1
        return StepShape(num_samples * len(decoding), num_prefill, context) if decoding or num_prefill else None
