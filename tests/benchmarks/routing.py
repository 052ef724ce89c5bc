"""How many tokens go to other experts on the trainer, and what a replay of their routing does about it.

    python -m tests.benchmarks.routing

A small mixture of experts with random weights (4 layers, 32 experts, 4 a token) rolls out in float32. Then trainers of
the same weights, exact and not, and of those after one AdamW step on a policy-gradient loss with random advantages,
compute the same tokens. Figures do not depend on the machine's speed.
"""

import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rollout_engine import RolloutPolicy, SamplingParams, exact, routing
from rollout_engine.testing import tiny_checkpoint

SIZES: dict[str, Any] = dict(
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    moe_intermediate_size=64,
    num_experts=32,
    num_experts_per_tok=4,
    std=0.06,
)
LEARNING_RATES = (1e-6, 1e-5, 1e-4)


def main() -> None:
    """Print one row of the table for each trainer."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = str(tiny_checkpoint(directory, "qwen3_moe", **SIZES))
        params = SamplingParams(max_tokens=64, ignore_eos=True, return_routed_experts=True)
        with RolloutPolicy.from_pretrained(checkpoint, dtype="float32", log_stats=False) as policy:
            prompts = [list(range(3 + 7 * i, 35 + 7 * i)) for i in range(8)]
            batch = policy.rollout(prompts, params, num_samples=4, seed=0, use_tqdm=False)
        print("trainer | choices that flip | tokens with one | replayed | log-probs change: mean, most | replayed")
        for name, model in trainers(checkpoint, batch):
            print(f"{name} | " + " | ".join(measured(model, batch)))


def trainers(checkpoint: str, batch: Any) -> Iterator[tuple[str, nn.Module]]:
    """Names of trainers, and their models."""
    yield "the same weights, exact", exact.enable(load(checkpoint, torch.float32))
    yield "the same weights, Hugging Face's module in float32", load(checkpoint, torch.float32)
    yield "the same weights, Hugging Face's module in bfloat16", load(checkpoint, torch.bfloat16)
    for rate in LEARNING_RATES:
        model = exact.enable(load(checkpoint, torch.float32))
        advantages = torch.randn(len(batch), generator=torch.Generator().manual_seed(0))[:, None]
        sampled = batch["masks", "all_assistant_mask"][:, 1:]
        (-(logprobs_of(model, batch) * advantages * sampled).sum() / sampled.sum()).backward()
        torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0).step()
        yield f"one step at {rate:g}, exact", model


def load(checkpoint: str, dtype: torch.dtype) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype)
    return model


def logprobs_of(model: nn.Module, batch: Any, routed_experts: Tensor | None = None) -> Tensor:
    """float32 [B, T - 1]; the ids are a copy, which carries no note of the rollout's dtype."""
    ids, mask = batch["tokens", "full"].clone(), batch["masks", "all_attention_mask"]
    return exact.token_logprobs(model, ids, mask, routed_experts=routed_experts)


@torch.no_grad()
def measured(model: nn.Module, batch: Any) -> list[str]:
    """Shares that flip, without a replay and with, and changes of log-probs."""
    ids, mask, experts = batch["tokens", "full"], batch["masks", "all_attention_mask"], batch["routed_experts"]
    sampled = batch["masks", "all_assistant_mask"][:, 1:]
    with routing.record(model) as anew:
        model(input_ids=ids)
    with routing.replay(model, experts), routing.record(model) as replayed:
        model(input_ids=ids)
    flips = [routing.flipped(each.routed_experts.view_as(experts), experts)[mask] for each in (anew, replayed)]
    shares = [flips[0].float().mean(), flips[0].any(-1).float().mean(), flips[1].float().mean()]
    changes = [
        (logprobs_of(model, batch, given) - batch["log_probs", "full"][:, 1:])[sampled].abs()
        for given in (None, experts)
    ]
    return [f"{100 * share:.2f} %" for share in shares] + [f"{each.mean():.2g}, {each.max():.2g}" for each in changes]


if __name__ == "__main__":
    main()
