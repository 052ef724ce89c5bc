"""What a push costs when few of the weights have changed: the engine in one process, the trainer in another.

python tests/benchmarks/push_delta.py [--shape L] [--rounds 5] [--share 0.03] [--dtype bfloat16]

Three kinds of pushes by shared memory take turns: of everything (`delta=False`), after a change of neighbouring pieces
of 512 KiB (some layers are trained, the others are frozen), and after a change of as many pieces, spread at random. A
ratio is the median time of such a push over that of a push of everything. Digesting all weights, with nothing else, is
what no push of changes can go below. A stall is the time in which no step could begin. `--dtype` is the engine's; the
default is what it chooses for this machine.
"""

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import results
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from works import MAX_MODEL_LEN, SHAPES, write_config

from rollout_engine import AsyncLLM
from rollout_engine.base.outputs import UpdateReport
from sync.digests import PIECE_BYTES, piece_digests
from sync.threads import in_threads


def change(trainer: torch.nn.Module, share: float, *, spread: bool) -> None:
    """Change an element in each of that share of the pieces of all weights."""
    pieces = [(p, start) for p in trainer.parameters() for start in range(0, p.nbytes, PIECE_BYTES)]
    count = round(share * len(pieces))
    first = random.randrange(len(pieces) - count)
    for parameter, start in random.sample(pieces, count) if spread else pieces[first : first + count]:
        parameter.data.view(-1)[start // parameter.itemsize] += random.uniform(1, 2)


def digest_seconds(trainer: torch.nn.Module) -> float:
    """How long it takes to digest all weights, on as many threads as a push has."""
    weights = [parameter.detach() for parameter in trainer.parameters()]
    start = time.perf_counter()
    in_threads(piece_digests, weights, torch.get_num_threads(), [weight.nbytes for weight in weights])
    return time.perf_counter() - start


def measure(push: Callable[..., UpdateReport], trainer: torch.nn.Module, rounds: int, share: float) -> dict[str, Any]:
    """The figure; the first push makes fresh pages and does not count."""
    times: dict[str, list[float]] = {}
    stalls: dict[str, list[float]] = {}
    sent: dict[str, list[int]] = {}
    digesting: list[float] = []
    push(trainer)
    for _ in range(rounds):
        digesting.append(digest_seconds(trainer))
        for kind in ("full", "together", "spread"):
            change(trainer, share, spread=kind == "spread")
            start = time.perf_counter()
            report: UpdateReport = push(trainer, delta=kind != "full")
            times.setdefault(kind, []).append(time.perf_counter() - start)
            stalls.setdefault(kind, []).append(report.stall_seconds)
            sent.setdefault(kind, []).append(report.num_bytes_sent)
    median = {kind: statistics.median(values) for kind, values in times.items()}
    return {
        **{f"{kind}_ratio": round(median[kind] / median["full"], 3) for kind in ("together", "spread")},
        "digesting_ms": round(1000 * statistics.median(digesting), 1),
        **{f"{kind}_ms": round(1000 * seconds, 1) for kind, seconds in median.items()},
        **{f"{kind}_stall_ms": round(1000 * statistics.median(seconds), 2) for kind, seconds in stalls.items()},
        **{f"{kind}_share_staged": round(statistics.median(sent[kind]) / sent["full"][0], 3) for kind in sent},
        "megabytes": round(sent["full"][0] / 1e6, 1),
        "rounds": rounds,
    }


def main() -> None:
    """See the file's first lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", default="L", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--share", type=float, default=0.03)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--results", type=Path, default=results.HERE / "results")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directory = write_config(Path(folder), arguments.shape)
        config = AutoConfig.from_pretrained(directory)
        dtype = getattr(torch, SHAPES[arguments.shape]["dtype"])
        trainer = AutoModelForCausalLM.from_config(config, dtype=dtype)
        options = dict(
            load_format="dummy", skip_tokenizer_init=True, max_model_len=MAX_MODEL_LEN, dtype=arguments.dtype
        )
        with AsyncLLM(directory, **options) as engine:

            def push(source: torch.nn.Module, **options: Any) -> UpdateReport:
                return asyncio.run(engine.update_weights(source, **options))

            figure = measure(push, trainer, arguments.rounds, arguments.share)
    name = f"push of changes by shm, {arguments.shape}" + ("" if arguments.dtype == "auto" else f", {arguments.dtype}")
    print(name, json.dumps(figure, indent=1), flush=True)
    command = f"push_delta.py --shape {arguments.shape} --rounds {arguments.rounds} --dtype {arguments.dtype}"
    results.save(arguments.results, name, figure, {}, command)


if __name__ == "__main__":
    main()
