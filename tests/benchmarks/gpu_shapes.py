"""Models with random weights in published shapes, and the least time that the field's small benchmark takes.

The benchmark: 256 sequences, prompts and outputs of U(100, 1024) tokens, seed 0, all there at the start.
"""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig

_QWEN3 = dict(model_type="qwen3", head_dim=128, vocab_size=151936, rope_theta=1e6, max_position_embeddings=4096)
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": _QWEN3
    | dict(
        hidden_size=1024, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=3072, tie_word_embeddings=True,
    ),
    "Qwen2.5-0.5B": dict(
        model_type="qwen2", hidden_size=896, num_hidden_layers=24, num_attention_heads=14, num_key_value_heads=2,
        intermediate_size=4864, vocab_size=151936, tie_word_embeddings=True, max_position_embeddings=4096,
    ),
    "Qwen3-1.7B": _QWEN3
    | dict(
        hidden_size=2048, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        intermediate_size=6144, tie_word_embeddings=True,
    ),
    "Qwen3-8B": _QWEN3
    | dict(
        hidden_size=4096, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        intermediate_size=12288, tie_word_embeddings=False,
    ),
    "Llama-3.2-1B": dict(
        model_type="llama", hidden_size=2048, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
        head_dim=64, intermediate_size=8192, vocab_size=128256, tie_word_embeddings=True, max_position_embeddings=4096,
    ),
    "Gemma-2-2B": dict(
        model_type="gemma2", hidden_size=2304, num_hidden_layers=26, num_attention_heads=8, num_key_value_heads=4,
        head_dim=256, intermediate_size=9216, vocab_size=256000, tie_word_embeddings=True, max_position_embeddings=8192,
    ),
}  # fmt: skip
_BYTES = 2
"""Of one number in bfloat16."""


class Requests(NamedTuple):
    """What is asked for: token ids, and how many to sample for each."""

    prompts: list[list[int]]
    num_sampled: list[int]

    @classmethod
    def drawn(cls, count: int = 256, *, low: int = 100, high: int = 1024, seed: int = 0) -> "Requests":
        """Prompts first, then lengths of outputs, from one generator."""
        source = random.Random(seed)
        prompts = [[source.randint(3, 10_000) for _ in range(source.randint(low, high))] for _ in range(count)]
        return cls(prompts, [source.randint(low, high) for _ in range(count)])

    @property
    def num_kv_reads(self) -> int:
        """Positions that decode steps read: each token's whole context, the prompt's own tokens apart."""
        pairs = zip(map(len, self.prompts), self.num_sampled, strict=True)
        return sum(n * prompt + n * (n - 1) // 2 for prompt, n in pairs)


def write_config(directory: Path, name: str) -> Path:
    """A checkpoint directory without weights; the engine makes some up on its device."""
    directory.mkdir(parents=True, exist_ok=True)
    shape = dict(SHAPES[name])
    kind = shape.pop("model_type")
    config = AutoConfig.for_model(kind, dtype="bfloat16", bos_token_id=1, eos_token_id=2, pad_token_id=0, **shape)
    config.architectures = [
        {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama", "gemma2": "Gemma2"}[kind] + "ForCausalLM"
    ]
    config.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return directory


def kv_bytes(name: str) -> int:
    """Bytes of KV of one position, in all layers."""
    shape = SHAPES[name]
    return 2 * shape["num_key_value_heads"] * _head_dim(shape) * shape["num_hidden_layers"] * _BYTES


def least_seconds(name: str, requests: Requests, bandwidth: float, rate: float) -> float:
    """KV and weights read at `bandwidth` bytes/s, prompts computed at `rate` FLOP/s (decode's products come free)."""
    shape = SHAPES[name]
    head_dim = _head_dim(shape)
    attention = shape["hidden_size"] * head_dim * 2 * (shape["num_attention_heads"] + shape["num_key_value_heads"])
    layers = shape["num_hidden_layers"] * (attention + 3 * shape["hidden_size"] * shape["intermediate_size"])
    weight_bytes = (layers + shape["vocab_size"] * shape["hidden_size"]) * _BYTES
    read = requests.num_kv_reads * kv_bytes(name) + max(requests.num_sampled) * weight_bytes
    return read / bandwidth + 2 * layers * sum(map(len, requests.prompts)) / rate


def _head_dim(shape: dict[str, Any]) -> int:
    return shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]


def expected_tokens_per_second(bandwidth: float, attention_share: float) -> float:
    """Of Qwen3-0.6B, guessed before any device had run it; KV is read at a share of `bandwidth`, bytes/s.

    Beside it a step takes 0.6 ms for its products, at up to 256 rows, and 0.42 ms for its small kernels: 288 in a
    captured graph, each as short as a launch from it, and the draw. All prompts take 0.35 s.
    """
    requests = Requests.drawn()
    reading = requests.num_kv_reads * kv_bytes("Qwen3-0.6B") / (bandwidth * attention_share)
    steps = max(requests.num_sampled) * (0.6e-3 + 0.42e-3)
    return sum(requests.num_sampled) / (reading + steps + 0.35)


if __name__ == "__main__":
    for device, bandwidth in (("H200", 4.8e12), ("H100", 3.35e12)):
        print(
            device, *(f"{share}: {expected_tokens_per_second(bandwidth, share):,.0f}" for share in (0.75, 0.85, 0.92))
        )
