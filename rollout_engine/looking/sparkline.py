"""A run in lines of text: each statistic with its newest value, its range, and its course."""

from collections.abc import Mapping, Sequence

from rollout_engine.looking.samples import visible

_BARS = "▁▂▃▄▅▆▇█"
Values = Sequence[float | None]


def sparkline(values: Values, width: int) -> str:
    """The last `width` values as bars between the least and the greatest of them; a dot if there is none."""
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
