"""Decoding with layers as one C++ call against the same layers as modules, for types with mixers.

    python tests/benchmarks/mixers.py lfm2 bamba --rounds 5

Models of eight layers without trained weights in bfloat16, 1, 16 and 64 sequences. Engines take turns, in one process
by one thread; seconds are CPU seconds, which other processes disturb less than the clock.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from prompts import FreshPrompts
from transformers import AutoConfig

from rollout_engine import LLM, SamplingParams
from rollout_engine.cli import machine
from rollout_engine.model.cpu import decoder_trial

NUM_SEQUENCES, NUM_PROMPT_TOKENS, NUM_SAMPLED_TOKENS = (1, 16, 64), 16, 24
VOCABULARY, _LAYERS = 4096, 8
_KINDS = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(_LAYERS)]
_COMMON: dict[str, Any] = dict(
    hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64, intermediate_size=1536,
    vocab_size=VOCABULARY, num_hidden_layers=_LAYERS, tie_word_embeddings=False, max_position_embeddings=4096,
    pad_token_id=0, bos_token_id=1, eos_token_id=2, dtype="bfloat16",
)  # fmt: skip
_MAMBA = dict(mamba_n_heads=16, mamba_d_head=64, mamba_n_groups=2, mamba_d_state=64, mamba_expand=2)
TYPES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": dict(
        layer_types=_KINDS,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "lfm2": dict(
        layer_types=["conv" if kind == "linear_attention" else kind for kind in _KINDS], block_auto_adjust_ff_dim=False
    ),
    "bamba": _MAMBA | dict(attn_layer_indices=[3, 7]),
    "granitemoehybrid": _MAMBA
    | dict(
        layer_types=_KINDS,
        num_local_experts=16,
        num_experts_per_tok=4,
        intermediate_size=256,
        shared_intermediate_size=512,
        residual_multiplier=0.22,
        position_embedding_type="nope",
    ),
    "nemotron_h": dict(
        layers_block_type=[
            *["linear_attention", "moe", "linear_attention", "moe"],
            *["full_attention", "moe", "linear_attention", "mlp"],
        ],
        ssm_state_size=64,
        mamba_num_heads=16,
        mamba_head_dim=64,
        n_groups=2,
        n_routed_experts=16,
        num_experts_per_tok=4,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=256,
        moe_shared_expert_intermediate_size=512,
    ),
}  # fmt: skip
"""Arguments of each type's configuration, over those of all."""


class Engines:
    """Two engines of one type: its layers as one call, and as modules."""

    def __init__(self, model_type: str, directory: Path) -> None:
        torch.set_num_threads(1)
        AutoConfig.for_model(model_type, **_COMMON | TYPES[model_type]).save_pretrained(directory)
        ends = {name: _COMMON[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
        (directory / "generation_config.json").write_text(json.dumps(ends))
        self._llms = {"one call": _engine(directory)}
        with patch.object(decoder_trial, "unsupported_reason", lambda *_: "measured as modules"):
            self._llms["modules"] = _engine(directory)
        for name, word in (("one call", "compiled"), ("modules", "modules")):
            choices = self._llms[name].frontend.client.info.choices
            assert f"decoder {word}" in choices, f"{model_type}: the layers of {name!r} run otherwise: {choices}"

    def decode(self, prompts: FreshPrompts, num_sequences: int, rounds: int) -> dict[str, Any]:
        """Sampled tokens for each CPU second, medians, and their ratio; the first round warms up."""
        params = SamplingParams(max_tokens=NUM_SAMPLED_TOKENS, ignore_eos=True, logprobs=0, detokenize=False)
        seconds: dict[str, list[float]] = {name: [] for name in self._llms}
        for number in range(rounds + 1):
            asked = prompts.draw(num_sequences, NUM_PROMPT_TOKENS)
            for name in [*seconds] if number % 2 else [*seconds][::-1]:
                start = time.process_time()
                self._llms[name].generate(asked, params, use_tqdm=False)
                seconds[name].append(time.process_time() - start)
        pairs = zip(seconds["one call"][1:], seconds["modules"][1:], strict=True)
        ratios = [modules / one_call for one_call, modules in pairs]
        count = num_sequences * NUM_SAMPLED_TOKENS
        return {
            "tokens_per_cpu_second": {
                name: round(count / statistics.median(values[1:]), 1) for name, values in seconds.items()
            },
            "one_call_over_modules": round(statistics.median(ratios), 3),
            "rounds": [round(ratio, 3) for ratio in ratios],
        }

    def close(self) -> None:
        """Free them."""
        for llm in self._llms.values():
            llm.shutdown()


def _engine(directory: Path) -> LLM:
    return LLM(
        str(directory),
        load_format="dummy",
        skip_tokenizer_init=True,
        kv_cache_bytes=1 << 26,
        state_cache_bytes=1 << 20,
        max_num_seqs=max(NUM_SEQUENCES),
        log_stats=False,
        num_threads=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=[*TYPES], help=f"of {' '.join(TYPES)}; all without")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    prompts = FreshPrompts(VOCABULARY)
    print(json.dumps({"machine": machine.describe()}))
    for model_type in args.types:
        with tempfile.TemporaryDirectory() as directory:
            engines = Engines(model_type, Path(directory))
            for num_sequences in NUM_SEQUENCES:
                print(
                    model_type,
                    num_sequences,
                    json.dumps(engines.decode(prompts, num_sequences, args.rounds)),
                    flush=True,
                )
            engines.close()


if __name__ == "__main__":
    main()
