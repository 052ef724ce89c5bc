"""Gain by a draft model: the same requests with it and without, taking turns, in one engine.

The target is a random model of which all layers behind the first add little, by a factor that is given; the first layer
is the draft model. So the factor sets how often it is right: at 0 always. "never" drafts by another random model.
Tokens and log-probs must be the same with and without. Read the ratios of CPU seconds, of one thread, in which costs of
steps are measured too.
"""

import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from prompts import FreshPrompts
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_engine import LLM, SamplingParams, SpeculationConfig

SHAPE: dict[str, Any] = dict(
    num_hidden_layers=16, hidden_size=512, num_attention_heads=8, num_key_value_heads=4, head_dim=64,
    intermediate_size=1536, vocab_size=4096, tie_word_embeddings=False, max_position_embeddings=1024,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
"""50 million parameters in float32, of which the first layer and the head, the draft model, are a tenth."""
_HEAD_SCALE = 10.0
"""Factor on the head's weights: logits are as far from uniform as a language model's."""


class Case(NamedTuple):
    """One work, and how right the draft model is."""

    num_prompts: int
    num_tokens: int
    draft: str
    """"good", "never"."""


CASES = [Case(1, 64, "good"), Case(4, 64, "good"), Case(1, 64, "never"), Case(4, 64, "never"), Case(32, 32, "never")]


def write_models(directory: Path, factor: float = 0.006) -> dict[str, Path]:
    """Directories of the target and of both draft models."""
    torch.manual_seed(0)
    target = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **SHAPE))
    draft = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **(SHAPE | {"num_hidden_layers": 1})))
    models = {"target": target, "never": draft}
    with torch.no_grad():
        target.lm_head.weight.mul_(_HEAD_SCALE)
        for layer in target.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(factor)
            layer.mlp.down_proj.weight.mul_(factor)
    paths = {name: directory / name for name in ("target", "never", "good")}
    for name, model in models.items():
        model.save_pretrained(paths[name])
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    draft.save_pretrained(paths["good"])
    return paths


class Engine:
    """One engine, with its draft model and without."""

    def __init__(self, paths: dict[str, Path], draft: str) -> None:
        speculation = SpeculationConfig(sources=(), draft_model=str(paths[draft]))
        options: dict[str, Any] = dict(skip_tokenizer_init=True, log_stats=False, num_kv_blocks=512)
        with patch("time.perf_counter", time.process_time):  # what steps cost, without other processes' share
            self._llm = LLM(str(paths["target"]), speculation=speculation, **options)
        self.core = self._llm.frontend.client.driver.core  # type: ignore[attr-defined]
        self._speculator = self.core._scheduler.speculator

    def run(self, asked: list[list[int]], params: SamplingParams, *, drafts: bool) -> tuple[list[Any], float]:
        """Answers, and the CPU seconds of their tokens: the KV of the prompts is known to the target."""
        self._llm.reset_prefix_cache()
        self._llm.generate(asked, SamplingParams(max_tokens=1, speculation=False), use_tqdm=False)
        self.core._scheduler.speculator = self._speculator if drafts else None
        start = time.process_time()
        answers = self._llm.generate(asked, params, use_tqdm=False)
        return answers, time.process_time() - start

    def close(self) -> None:
        """Free it."""
        self._llm.shutdown()


def measure(engine: Engine, case: Case, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
    """CPU seconds without / with, and what was drafted. The first round warms up."""
    ratios, stats = [], engine.core.stats
    before = sum(stats.drafts.num_drafted), sum(stats.drafts.num_accepted)
    for number in range(rounds + 1):
        params = SamplingParams(
            max_tokens=case.num_tokens, ignore_eos=True, logprobs=0, detokenize=False, seed=1000 + number
        )
        asked, seconds, answers = prompts.draw(case.num_prompts, 64), {}, {}
        for drafts in (True, False) if number % 2 else (False, True):
            answers[drafts], seconds[drafts] = engine.run(asked, params, drafts=drafts)
        for one, two in zip(answers[True], answers[False], strict=True):
            a, b = one.outputs[0], two.outputs[0]
            if a.token_ids != b.token_ids or a.logprobs.tobytes() != b.logprobs.tobytes():
                raise AssertionError("the draft model changed a token or a log-prob")
        if number:
            ratios.append(seconds[False] / seconds[True])
    drafted, accepted = sum(stats.drafts.num_drafted) - before[0], sum(stats.drafts.num_accepted) - before[1]
    return {
        "cpu_ratio": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
        "drafted": drafted,
        "accepted": round(accepted / max(drafted, 1), 3),
    }
