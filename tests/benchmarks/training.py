"""What exactness costs a trainer: a training step with `exact`, beside the same step by plain Hugging Face.

A step is what a GRPO trainer computes for one batch: log-probs of all tokens, a loss of ratios, backward, AdamW.
Both sides have the same weights and take turns.
"""

import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from rollout_engine import exact
from rollout_engine.model.packing.linear_groups import linear_groups

CASES = {"S, float32": ("S", torch.float32), "M, bfloat16": ("M", torch.bfloat16), "M, float32": ("M", torch.float32)}
_ROWS, _SHORTEST, _LONGEST = 8, 48, 128


class Batch:
    """Right-padded sequences of random tokens, and the same ones packed."""

    def __init__(self, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(_SHORTEST, _LONGEST + 1, (_ROWS,), generator=generator)
        lengths[0] = _LONGEST
        self.ids = torch.randint(3, vocab_size, (_ROWS, _LONGEST), generator=generator)
        self.mask = torch.arange(_LONGEST) < lengths[:, None]
        self.packed = self.ids[self.mask][None]
        self.cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        self.advantages = torch.randn(_ROWS, 1, generator=generator)

    def packed_advantages(self) -> Tensor:
        """[1, T - 1], each sequence's on its tokens."""
        return self.advantages.flatten().repeat_interleave(self.cu_seqlens.diff())[None, 1:]


def measure(directory: Path, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Seconds of a step and of its forward, and their ratios to plain Hugging Face's: medians of the rounds' ratios."""
    config = AutoConfig.from_pretrained(directory)
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype).train()
    ours = exact.enable(copy.deepcopy(plain))
    batch = Batch(config.vocab_size)
    sides: dict[str, tuple[nn.Module, Callable[[nn.Module], Tensor], Tensor]] = {
        "plain": (plain, lambda model: _plain_logprobs(model, batch), batch.advantages),
        "exact": (ours, lambda model: exact.token_logprobs(model, batch.ids, batch.mask), batch.advantages),
        "packed": (
            copy.deepcopy(ours),
            lambda model: exact.token_logprobs(model, batch.packed, cu_seqlens=batch.cu_seqlens),
            batch.packed_advantages(),
        ),
    }
    optimizers = {name: torch.optim.AdamW(side[0].parameters(), lr=1e-6, fused=True) for name, side in sides.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for i in range(rounds + 1):  # the first warms up
        for name in sides if i % 2 == 0 else reversed(sides):
            seconds[name].append(_step(*sides[name], optimizers[name]))
    forward = {name: [pair[0] for pair in runs[1:]] for name, runs in seconds.items()}
    whole = {name: [pair[1] for pair in runs[1:]] for name, runs in seconds.items()}
    return {
        "step_ratio": _ratio(whole["exact"], whole["plain"]),
        "forward_ratio": _ratio(forward["exact"], forward["plain"]),
        "packed_step_ratio": _ratio(whole["packed"], whole["plain"]),
        "share_of_following_weights": round(_following(ours) / statistics.median(whole["exact"]), 5),
        "step_ms": {name: round(1e3 * statistics.median(values), 1) for name, values in whole.items()},
        "tokens": int(batch.mask.sum()),
    }


def _step(
    model: nn.Module,
    logprobs_of: Callable[[nn.Module], Tensor],
    advantages: Tensor,
    optimizer: torch.optim.Optimizer,
) -> tuple[float, float]:
    """Seconds of the forward, and of the whole step."""
    start = time.perf_counter()
    logprobs = logprobs_of(model)
    forward = time.perf_counter() - start
    ratio = (logprobs - logprobs.detach()).exp()
    (-(ratio * advantages).mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
    return forward, time.perf_counter() - start


def _plain_logprobs(model: nn.Module, batch: Batch) -> Tensor:
    """As trainers compute them by Hugging Face alone: float32 log-softmax of all logits."""
    logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits[:, :-1].float()
    chosen = logits.log_softmax(-1).gather(2, batch.ids[:, 1:, None])[..., 0]
    return chosen * (batch.mask[:, 1:] & batch.mask[:, :-1])


def _following(model: nn.Module) -> float:
    """Seconds in which one forward finds out whether weights have changed: the least of five."""
    groups, seconds = linear_groups(model), []
    for _ in range(5):
        start = time.perf_counter()
        for group in groups:
            group._values()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def _ratio(ours: list[float], plain: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(ours, plain, strict=True)), 3)
