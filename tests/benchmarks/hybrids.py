"""Models with layers that keep a state, beside dense ones whose matrices have the same bytes.

Two models of the Qwen3.5 architecture in bfloat16, three of whose four layers are linear: one whose states are larger
than its matrices when 64 sequences are decoded, and one with small states. Beside each a Qwen3 model with a wider MLP.
A decode step must read all matrices once and read and write the states of all sequences, at the bandwidth of this
machine: so the first one may lose by far. Engines take turns, in one process by one thread; seconds are CPU seconds,
which other processes disturb less than the clock. Training steps are those of `training.py`.
"""

import json
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from prompts import FreshPrompts
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from rollout_engine import LLM, SamplingParams

NUM_SEQUENCES, NUM_PROMPT_TOKENS, NUM_SAMPLED_TOKENS = 64, 16, 24
LONG_PROMPT = 2048
_LAYERS, _HIDDEN, _MLP, VOCABULARY = 12, 1024, 3584, 4096
_STATE_BYTES = 4
CASES = {
    "large states": dict(linear_num_key_heads=16, linear_num_value_heads=16, size=128),
    "small states": dict(linear_num_key_heads=4, linear_num_value_heads=4, size=64),
}
"""Heads of the linear layers, and the size of their keys and values."""


def write_configs(directory: Path, case: str) -> dict[str, Path]:
    """Checkpoint directories without weights: the hybrid of a case, and the dense model of as many bytes."""
    common: dict[str, Any] = dict(
        dtype="bfloat16", num_hidden_layers=_LAYERS, hidden_size=_HIDDEN, num_attention_heads=8, num_key_value_heads=2,
        head_dim=256, vocab_size=VOCABULARY, tie_word_embeddings=False, max_position_embeddings=4096,
        pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    heads = dict(CASES[case])
    size = heads.pop("size")
    kinds = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(_LAYERS)]
    linear = dict(linear_key_head_dim=size, linear_value_head_dim=size, layer_types=kinds)
    rotary = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    hybrid = AutoConfig.for_model(
        "qwen3_5_text", **common, **heads, **linear, intermediate_size=_MLP, rope_parameters=rotary
    )
    dense = AutoConfig.for_model("qwen3", **common, intermediate_size=0)
    missing = _num_weights(hybrid, "Qwen3_5ForCausalLM") - _num_weights(dense, "Qwen3ForCausalLM")
    dense.intermediate_size = round(missing / (3 * _HIDDEN * _LAYERS * 64)) * 64
    paths = {}
    for name, config in (("hybrid", hybrid), ("dense", dense)):
        paths[name] = directory / f"{case}, {name}"
        config.save_pretrained(paths[name])
        ends = {key: common[key] for key in ("pad_token_id", "bos_token_id", "eos_token_id")}
        (paths[name] / "generation_config.json").write_text(json.dumps(ends))
    return paths


def _num_weights(config: PretrainedConfig, architecture: str) -> int:
    """Elements of the matrices of a model, without its embedding."""
    config.architectures = [architecture]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    return sum(p.numel() for name, p in model.named_parameters() if p.dim() == 2 and "embed_tokens" not in name)


class Engines:
    """The hybrid of a case and the dense model."""

    def __init__(self, paths: dict[str, Path]) -> None:
        torch.set_num_threads(1)
        self._configs = {name: AutoConfig.from_pretrained(path) for name, path in paths.items()}
        self._llms = {
            name: LLM(
                str(path),
                load_format="dummy",
                skip_tokenizer_init=True,
                kv_cache_bytes=1 << 28,
                state_cache_bytes=1 << 20 if name == "hybrid" else None,
                max_num_seqs=NUM_SEQUENCES,
                log_stats=False,
                num_threads=1,
            )
            for name, path in paths.items()
        }

    def decode(self, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
        """Sampled tokens for each CPU second of 64 sequences, medians, their ratio, and what bounds the hybrid."""
        params = SamplingParams(max_tokens=NUM_SAMPLED_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
        rates = self._rates(prompts, params, NUM_SEQUENCES, NUM_PROMPT_TOKENS, rounds)
        num_tokens = NUM_SEQUENCES * NUM_SAMPLED_TOKENS
        return _compared(rates, num_tokens) | self._bounds(num_tokens / statistics.median(rates["hybrid"]))

    def prefill(self, prompts: FreshPrompts, rounds: int) -> dict[str, Any]:
        """Tokens of one long prompt for each CPU second."""
        params = SamplingParams(max_tokens=1, logprobs=0, detokenize=False)
        return _compared(self._rates(prompts, params, 1, LONG_PROMPT, rounds), LONG_PROMPT)

    def close(self) -> None:
        """Free them."""
        for llm in self._llms.values():
            llm.shutdown()

    def _rates(
        self, prompts: FreshPrompts, params: SamplingParams, num_prompts: int, length: int, rounds: int
    ) -> dict[str, list[float]]:
        """CPU seconds of each; the first round warms up."""
        seconds: dict[str, list[float]] = {name: [] for name in self._llms}
        for number in range(rounds + 1):
            asked = prompts.draw(num_prompts, length)
            for name in [*seconds] if number % 2 else [*seconds][::-1]:
                start = time.process_time()
                self._llms[name].generate(asked, params, use_tqdm=False)
                seconds[name].append(time.process_time() - start)
        return {name: values[1:] for name, values in seconds.items()}

    def _bounds(self, rate: float) -> dict[str, Any]:
        """Megabytes that a decode step must move, and how many of them a second at `rate` tokens a second."""
        config = self._configs["hybrid"]
        matrices = _num_weights(config, config.architectures[0]) * config.dtype.itemsize
        num_linear = config.layer_types.count("linear_attention")
        size = math.prod(
            (config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim, _STATE_BYTES)
        )
        states = 2 * NUM_SEQUENCES * num_linear * size
        bandwidth = _moving_bandwidth()
        return {
            "matrices_mb_a_step": round(matrices / 1e6, 1),
            "states_mb_a_step_read_and_written": round(states / 1e6, 1),
            "bandwidth_gb_s": round(bandwidth / 1e9, 1),
            "bound_tokens_per_second": round(NUM_SEQUENCES * bandwidth / (matrices + states), 1),
            "share_of_bound": round(rate * (matrices + states) / bandwidth / NUM_SEQUENCES, 3),
        }


def _moving_bandwidth() -> float:
    """Bytes read and written for each CPU second, as rates are, by multiplying 512 MB in place; the best of five."""
    numbers = torch.ones(1 << 27)
    found = []
    for _ in range(5):
        start = time.process_time()
        numbers.mul_(1.0001)
        found.append(2 * numbers.nbytes / (time.process_time() - start))
    return max(found)


def _compared(seconds: dict[str, list[float]], num_tokens: int) -> dict[str, Any]:
    ratios = [dense / hybrid for hybrid, dense in zip(seconds["hybrid"], seconds["dense"], strict=True)]
    return {
        "tokens_per_cpu_second": {
            name: round(num_tokens / statistics.median(values), 1) for name, values in seconds.items()
        },
        "hybrid_over_dense": round(statistics.median(ratios), 3),
        "rounds": [round(ratio, 3) for ratio in ratios],
    }
