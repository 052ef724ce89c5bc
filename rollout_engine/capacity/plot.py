"""Draws outcomes: tokens per second over time, and how long requests take."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_engine.base.errors import ConfigError, refused
from rollout_engine.capacity.replica import Timeline

KINDS = (".png", ".svg")
_NUM_BINS = 200


def check_plot(path: Path) -> None:
    """Raise `ConfigError` if a plot cannot be drawn or written: before hours of simulation, not after."""
    if path.suffix not in KINDS:
        raise ConfigError(refused("--plot", str(path), f"a file named {' or '.join('*' + kind for kind in KINDS)}"))
    if not path.parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.parent}. Make it, or give another one.")
    _figure_class()


def draw(path: Path, curves: Sequence[tuple[str, Timeline, Sequence[float]]]) -> None:
    """Write a plot of (label, tokens over time, seconds of each request), one curve each. Raises as `check_plot`."""
    check_plot(path)
    figure = _figure_class()(figsize=(11, 4.5), layout="constrained")
    over_time, latency = figure.subplots(1, 2)
    for label, timeline, seconds in curves:
        over_time.plot(*tokens_per_second(timeline), label=label)
        latency.plot(np.sort(np.asarray(seconds)), np.linspace(0, 1, len(seconds)), label=label)
    over_time.set(xlabel="seconds", ylabel="tokens per second", ylim=(0, None))
    latency.set(xlabel="seconds of a request", ylabel="share of requests", ylim=(0, 1))
    for axes in (over_time, latency):
        axes.grid(alpha=0.3)
    if len(curves) > 1:
        latency.legend(loc="lower right", fontsize="small")
    try:
        figure.savefig(path)
    except OSError as problem:
        raise ConfigError(f"--plot {path} cannot be written: {problem.strerror}.") from None


def tokens_per_second(timeline: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """Middles of equal spans of time float64 [N], and the fleet's tokens per second in each; runs count evenly."""
    begins, ends = np.asarray(timeline.begins), np.asarray(timeline.ends)
    rates = np.asarray(timeline.tokens) / np.maximum(ends - begins, 1e-12)
    edges = np.linspace(0.0, ends.max(initial=0.0) or 1.0, _NUM_BINS + 1)
    sampled = np.zeros(len(edges))  # tokens until each edge: of runs that have begun, less those not over
    for times, sign in ((begins, 1.0), (ends, -1.0)):
        order = np.argsort(times)
        rate = np.concatenate([[0.0], np.cumsum(rates[order])])
        moment = np.concatenate([[0.0], np.cumsum(rates[order] * times[order])])
        count = np.searchsorted(times[order], edges, side="right")
        sampled += sign * (rate[count] * edges - moment[count])
    return (edges[:-1] + edges[1:]) / 2, np.maximum(np.diff(sampled), 0.0) / np.diff(edges)


def _figure_class() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed: it is in the extra `examples` "
            "(pip install 'rollout-engine[examples]')."
        ) from None
    return Figure
