"""What a GRPO step of TRL costs, by who generates.

    PYTHONPATH=examples build/trainers/trl/bin/python tests/benchmarks/trl_step.py

The trainers of examples/trl_grpo.py take turns in one process, and train the same model from the same start. Medians
over steps: CPU seconds of that process, of all its threads, in which other processes do not count; and seconds by the
clock, which mean something where the machine does nothing else.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import PrinterCallback, TrainerCallback

import trl_grpo as example
from grpo import Task, make_items, make_policy
from rollout_engine import RolloutPolicy

KINDS = {"TRL generates": ["--generation", "trl"], "engine generates": ["--plain"], "engine generates, exact": []}


CLOCKS = {"CPU s": time.process_time, "clock s": time.perf_counter}

Seconds = dict[str, list[tuple[float, ...]]]
"""What was timed -> for each time that it ran, seconds by each of `CLOCKS`."""


class StepTimes(TrainerCallback):
    """Times each step, and each call that it was asked to time."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._start = _now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._seconds["step"].append(_since(self._start))

    def timed(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        """The same call, timed."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = _now()
            try:
                return call(*args, **kwargs)
            finally:
                self._seconds[name].append(_since(start))

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6, help="of each trainer in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warm-up-steps", type=int, default=150, help="imitation steps of the model")
    options = parser.parse_args()
    seconds: dict[str, Seconds] = {kind: defaultdict(list) for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        given = {kind: _given(arguments, options, f"{folder}/{i}") for i, (kind, arguments) in enumerate(KINDS.items())}
        training, _ = make_items(0)
        model = str(make_policy(Path(folder, "policy"), training, next(iter(given.values()))))
        with RolloutPolicy.from_pretrained(model, dtype="float32", log_stats=False) as policy:
            for i in range(options.rounds):
                for kind in list(KINDS)[:: 1 if i % 2 else -1]:
                    given[kind].model = model
                    _train(policy, training, given[kind], StepTimes(seconds[kind]))
    for place, clock in enumerate(CLOCKS):
        for kind, found in seconds.items():
            print(f"{clock:8} {kind:24} {_medians(found, place)}", flush=True)


def _now() -> tuple[float, ...]:
    return tuple(read() for read in CLOCKS.values())


def _since(start: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(now - then for now, then in zip(_now(), start, strict=True))


def _medians(found: Seconds, place: int) -> dict[str, float]:
    """Medians by one clock; "trainer" is what is left of a step."""
    parts = {name: statistics.median(each[place] for each in values) for name, values in found.items()}
    parts["trainer"] = parts["step"] - parts["generation"] - parts.get("weights", 0.0)
    return {name: round(value, 3) for name, value in parts.items()}


def _given(arguments: list[str], options: argparse.Namespace, out: str) -> argparse.Namespace:
    counts = ["--steps", str(options.steps), "--warm-up-steps", str(options.warm_up_steps)]
    return example.parse([*arguments, *counts, "--out", out])


def _train(policy: RolloutPolicy, training: Any, given: argparse.Namespace, times: StepTimes) -> None:
    trainer = example.make_trainer(Task(policy.tokenizer), training, policy, given)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(times)
    if given.generation == "trl":
        trainer._generate_single_turn = times.timed(trainer._generate_single_turn, "generation")
        trainer.train()
        return
    rollout, update = policy.rollout, policy.update_weights
    policy.rollout, policy.update_weights = times.timed(rollout, "generation"), times.timed(update, "weights")  # type: ignore[method-assign]
    try:
        trainer.train()
    finally:
        del policy.rollout, policy.update_weights


if __name__ == "__main__":
    main()
