"""Follows a run while it goes on: reward, lengths, entropy, KL to the trainer, staleness, stalls, tokens per second.

    rollout-engine watch runs/grpo
    rollout-engine watch runs/grpo --once

The directory is that of StepLog or of rollout(log_to=...): files named rollouts*.jsonl and steps.jsonl at any depth are
read as they grow. Where no steps are logged, the statistics are those of every 32 rollouts, without what only a trainer
knows. The live view needs the extra [view]; --once prints the state of now and ends.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.cli.terminal import require_terminal
from rollout_engine.looking.run_watch import RunWatch
from rollout_engine.looking.samples import visible
from rollout_engine.rollouts.evaluation.ledger import SAMPLES

try:
    from rollout_engine.looking.terminal import Dashboard
except ModuleNotFoundError:  # the extra is not installed
    Dashboard = None  # type: ignore[assignment,misc]

_COLUMNS = 120
_NUM_SAMPLES = 5
_BARS = "▁▂▃▄▅▆▇█"
Values = Sequence[float | None]
"""A statistic, step by step; None if it was not finite."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `watch`."""
    parser.add_argument("directory", type=Path, metavar="DIR", help="directory of a run")
    parser.add_argument("--once", action="store_true", help="print the state of now, and end")
    parser.add_argument("--every", type=float, default=1.0, metavar="SECONDS", help="between two looks (1)")


def run(arguments: argparse.Namespace) -> None:
    """Print the state, or draw it until the user quits."""
    if not 0.05 <= arguments.every <= 3600:
        raise RequestError.for_field("--every", arguments.every, "from 0.05 to 3600 seconds")
    watch = RunWatch(arguments.directory)
    if arguments.once:
        watch.read()
        while watch.is_behind:
            watch.read()
        print("\n".join(lines_of(watch, _COLUMNS)))
        return
    if Dashboard is None:
        advice = 'pip install "rollout-engine[view]", or look once with --once'
        raise ConfigError(f"The live view needs the packages rich and textual: {advice}.")
    require_terminal("look once with --once")

    def read(columns: int) -> list[str]:
        watch.read()
        return lines_of(watch, columns)

    Dashboard(read, f"run {arguments.directory}", arguments.every).run()


def lines_of(watch: RunWatch, columns: int) -> list[str]:
    """A run as lines of text. Texts of rollouts in it are on one line each, with pictures of control characters."""
    series = watch.series()
    head = f"{watch.num_samples} samples, {watch.num_tokens} sampled tokens"
    if watch.tokens_per_second is not None:
        head += f", {watch.tokens_per_second:,.0f} tokens/s come in"
    if watch.last_step is not None:
        head = f"step {watch.last_step}: {head}"
    lines = [visible(str(watch.directory)), head]
    if watch.num_bad_lines:
        lines.append(f"{watch.num_bad_lines} lines cannot be read, and are left out")
    if series:
        lines += ["", *(["of every 32 rollouts, since no steps are logged:"] if watch.is_estimated else [])]
        lines += table(series, columns)
    else:
        lines += ["", "No statistics yet: waiting for steps (steps.jsonl), or for 32 rollouts (rollouts*.jsonl)."]
        if (watch.directory / SAMPLES).is_file():  # no run to follow
            lines += [f"{SAMPLES} is of an evaluation, which view shows, and its report.html."]
    if watch.samples:
        lines += ["", "newest samples:"]
        for sample in list(watch.samples)[-_NUM_SAMPLES:]:
            reward = "" if sample.reward is None else f", reward {number(sample.reward)}"
            text = visible(" ".join(sample.text.split()))
            lines.append(
                f"{sample.where}{reward}, {sample.num_tokens} tokens, version {sample.newest}: {text}"[:columns]
            )
    return lines


def sparkline(values: Values, width: int) -> str:
    """The last `width` values as bars between the least and the greatest of them; a dot for a missing one."""
    shown = values[-width:]
    known = [value for value in shown if value is not None]
    if not known:
        return "·" * len(shown)
    low, high = min(known), max(known)
    return "".join("·" if value is None else _bar(value, low, high) for value in shown)


def table(series: Mapping[str, Values], width: int) -> list[str]:
    """A line for each statistic. `width`: columns of a line."""
    name_width = max((len(name) for name in series), default=0)
    name_width = min(max(name_width, 12), 28)
    lines = []
    for name, values in series.items():
        known = [value for value in values if value is not None]
        newest = number(values[-1]) if values else ""
        span = f"{number(min(known))} to {number(max(known))}" if known else ""
        shown = visible(" ".join(name.split()))
        head = f"{shown[:name_width]:{name_width}} {newest:>11}  {span:>24}  "
        lines.append(head + sparkline(values, max(width - len(head), 8)))
    return lines


def number(value: float | None) -> str:
    """A number in few characters; a statistic that was not finite is named so."""
    return "not finite" if value is None else f"{value:.4g}"


def _bar(value: float, low: float, high: float) -> str:
    part = 0.5 if high == low else (value - low) / (high - low)
    return _BARS[min(int(part * len(_BARS)), len(_BARS) - 1)]
