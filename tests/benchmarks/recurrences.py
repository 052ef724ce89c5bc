"""One layer's recurrence with a state on the CPU, against the same steps in torch.

    python tests/benchmarks/recurrences.py --threads 1 --json

32 heads of 128 x 128, the gated delta rule (Qwen3-Next) and KDA (Kimi Linear), and 64 heads of 128 x 64 without a delta
rule (Mamba 2); decoding of 64 sequences, whose states are read and written once each, and a prompt of 2,048 tokens,
whose state stays in the cache. The best of several rounds counts. GB/s are those of the states alone, read and written.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from rollout_engine.cli import machine
from rollout_engine.kernels.recurrence import gated_recurrence
from rollout_engine.kernels.state_chunks import StateChunks

FEW = 32
"""Tokens of a prompt for which torch's steps are timed."""


class Case(NamedTuple):
    """Heads of a layer, and the tokens of a step."""

    name: str
    num_heads: int
    key_size: int
    value_size: int
    delta: bool
    by_channel: bool = False
    num_sequences: int = 64
    num_tokens: int = 1
    """Of each sequence."""
    dtype: torch.dtype = torch.bfloat16


DELTA, CHANNEL = ("delta", 32, 128, 128, True), ("by channel", 32, 128, 128, True, True)
MAMBA = ("mamba", 64, 128, 64, False)
CASES = (
    Case(*DELTA, dtype=torch.float32),
    *(Case(*form) for form in (DELTA, CHANNEL, MAMBA)),
    *(Case(*form)._replace(num_sequences=1, num_tokens=2048) for form in (DELTA, CHANNEL, MAMBA)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    result = measure(args.rounds)
    if args.json:
        print(json.dumps({"machine": machine.describe(), "threads": args.threads} | result, indent=1))
    else:
        for name, value in result.items():
            print(f"{name:64} {value}")


def measure(rounds: int) -> dict[str, float]:
    """Nanoseconds of a token and head by case, bytes of states a second, and times the speed of torch's steps."""
    result: dict[str, float] = {}
    for case in CASES:
        kind = "decode 64" if case.num_tokens == 1 else f"prompt of {case.num_tokens:,}"
        name = f"{case.name}, {kind}, {str(case.dtype).removeprefix('torch.')}"
        inputs, states = _draw(case)
        ours = min(_seconds_of(lambda i=inputs, s=states, c=case: _run(c, i, s)) for _ in range(rounds))
        steps = min(FEW, case.num_tokens)
        plain = min(_seconds_of(lambda i=inputs, s=states, c=case, n=steps: _run_plainly(c, i, s, n)) for _ in range(2))
        per_head = 1e9 / (case.num_sequences * case.num_heads)
        result[f"{name}: nanoseconds a token and head"] = round(ours * per_head / case.num_tokens, 1)
        if case.num_tokens == 1:
            result[f"{name}: GB/s of states"] = round(2 * states.numel() * 4 / ours / 1e9, 1)
        result[f"{name}: times the speed of torch"] = round(plain / steps / (ours / case.num_tokens), 1)
    return result


def _draw(case: Case) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Inputs of a step, and states of all sequences."""
    total = case.num_sequences * case.num_tokens
    size = (total, case.num_heads, case.key_size)
    directions = [torch.randn(total, case.num_heads // 2, case.key_size) for _ in range(2)]
    q, k = (torch.nn.functional.normalize(each, dim=-1).to(case.dtype) for each in directions)
    v = torch.randn(total, case.num_heads, case.value_size).to(case.dtype)
    log_decay = -torch.rand(size if case.by_channel else size[:2])
    inputs = dict(q=q, k=k, v=v, log_decay=log_decay, beta=torch.rand(size[:2]))
    return inputs, torch.randn(case.num_sequences, case.num_heads, case.key_size, case.value_size)


def _run(case: Case, inputs: dict[str, torch.Tensor], states: torch.Tensor) -> None:
    numbers = np.arange(case.num_sequences + 1)
    starts, slots = numbers * case.num_tokens, numbers[:-1]
    chunks = StateChunks(starts, slots, numbers, starts[1:], slots)
    gated_recurrence(**inputs, delta=case.delta, scale=case.key_size**-0.5, chunks=chunks, states=states)


def _run_plainly(case: Case, inputs: dict[str, torch.Tensor], states: torch.Tensor, num_steps: int) -> None:
    """The first tokens of all sequences, in torch: a step of all at a time, in place."""
    by_step = (case.num_sequences, case.num_tokens)
    q, k = (inputs[name].float().repeat_interleave(2, 1).unflatten(0, by_step)[..., None] for name in ("q", "k"))
    v, g, beta = (inputs[name].float().unflatten(0, by_step) for name in ("v", "log_decay", "beta"))
    decay = g.exp()[..., None] if case.by_channel else g.exp()[..., None, None]
    for t in range(num_steps):
        states.mul_(decay[:, t])
        error = v[:, t] - (states.mT @ k[:, t])[..., 0] if case.delta else v[:, t]
        states.addcmul_(k[:, t], (beta[:, t, :, None] * error)[..., None, :])
        (states.mT @ q[:, t]) * case.key_size**-0.5


def _seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
