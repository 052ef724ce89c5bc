"""What is measured: four shapes of the Qwen3 architectures with random weights, and the works done on each."""

import json
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from rollout_engine.cli.ceilings import Work

SHAPES: dict[str, dict[str, Any]] = {
    "S": dict(
        dtype="float32", num_hidden_layers=4, hidden_size=128, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=384, vocab_size=4096, tie_word_embeddings=False,
    ),
    "M": dict(
        dtype="bfloat16", num_hidden_layers=12, hidden_size=768, num_attention_heads=12, num_key_value_heads=4,
        head_dim=64, intermediate_size=2048, vocab_size=4096, tie_word_embeddings=False,
    ),
    "L": dict(
        dtype="bfloat16", num_hidden_layers=28, hidden_size=1024, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, intermediate_size=3072, vocab_size=151936, tie_word_embeddings=True,
    ),
    "E": dict(
        model_type="qwen3_moe", dtype="bfloat16", num_hidden_layers=12, hidden_size=768, num_attention_heads=12,
        num_key_value_heads=4, head_dim=64, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=384,
        norm_topk_prob=True, vocab_size=4096, tie_word_embeddings=False,
    ),
}  # fmt: skip
"""L is Qwen3-0.6B; E is a mixture of experts."""

WORKS = {
    "S": [Work(8, 8, 64, 128)],
    "M": [Work(8, 8, 64, 64), Work(8, 16, 512, 64)],
    "L": [Work(4, 4, 64, 32), Work(1, 1, 64, 32)],
    "E": [Work(8, 8, 64, 64), Work(8, 16, 512, 64)],
}
MAX_MODEL_LEN = 1024
KV_POOL_BYTES = 1 << 30
"""For every engine that takes a size."""


def figure_name(shape: str, work: Work) -> str:
    """``M 8x16, 512+64``."""
    return f"{shape} {work}"


def write_config(directory: Path, shape: str) -> Path:
    """A checkpoint directory without weights: every engine is told to make up its own."""
    directory.mkdir(parents=True, exist_ok=True)
    end_ids = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    fields = {"model_type": "qwen3"} | SHAPES[shape]
    model_type = fields.pop("model_type")
    config = AutoConfig.for_model(model_type, max_position_embeddings=MAX_MODEL_LEN, **end_ids, **fields)
    config.architectures = [{"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[model_type]]
    config.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(end_ids))
    return directory
