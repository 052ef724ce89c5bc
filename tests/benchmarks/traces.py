"""What a trace of torch.profiler tells of steps: how busy the device was, and what the host did in its gaps.

    host      ├── step ──────────────┤├── step ──────────────┤
              ├ schedule ┤├ submit ─┤  ...
    device    ████████ gap ███████████████ gap █████████

Events are those of the Chrome format: "ts" and "dur" in microseconds, "cat" says of what kind.
"""

import gzip
import json
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

STEP = "step"
"""Name of the annotation around each step."""
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_HOST = ("cpu_op", "user_annotation", *_CALLS)
_NUM_GAPS = 5
_NUM_NAMES = 4

Event = dict[str, Any]


class Span(NamedTuple):
    """An event that takes time."""

    thread: str
    start: float
    end: float
    name: str
    kind: str

    def within(self, start: float, end: float) -> float:
        """Microseconds of it between the two."""
        return max(0.0, min(self.end, end) - max(self.start, start))


def read(path: Path) -> list[Event]:
    """Of a file that the profiler has exported."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events: list[Event] = json.loads(text)["traceEvents"]
    return events


def figures(events: Iterable[Event], *, device: Collection[str] = DEVICE) -> dict[str, Any]:
    """Of the time from the first annotated step's start to the last one's end. `device`: kinds that keep it busy."""
    spans = [_span(event) for event in events if event.get("ph") == "X"]
    start, end, num_steps = _steps(spans)
    inside = [span for span in spans if span.within(start, end)]
    busy = _merged([span for span in inside if span.kind in device], start, end)
    calls = [span.name for span in inside if span.kind in _CALLS]
    copies = Counter(_direction(span.name) for span in inside if span.kind == "gpu_memcpy")
    host = [span for span in inside if span.kind in _HOST]
    busy_share = sum(last - first for first, last in busy) / (end - start)
    return {
        "num_steps": num_steps,
        "microseconds_per_step": (end - start) / num_steps,
        "busy_share": busy_share,
        "gap_share": 1 - busy_share,
        "kernels_per_step": sum(span.kind == "kernel" for span in inside) / num_steps,
        "launches_per_step": sum("Launch" in name for name in calls) / num_steps,
        "waits_per_step": sum("Synchronize" in name for name in calls) / num_steps,
        "copies_per_step": {direction: count / num_steps for direction, count in copies.items()},
        "largest_gaps": [
            {"microseconds": last - first, "after": first - start, "host": _doing(host, first, last)}
            for first, last in _gaps(busy, start, end)[:_NUM_GAPS]
        ],
    }


def last_steps(events: Sequence[Event], count: int) -> list[Event]:
    """Events of the last annotated steps, and those that name processes and threads."""
    steps = sorted(_span(event) for event in events if _is_step(event))[-count:]
    start, end = min(step.start for step in steps), max(step.end for step in steps)
    return [
        event for event in events if event.get("ph") == "M" or ("ts" in event and start <= float(event["ts"]) <= end)
    ]


def _is_step(event: Event) -> bool:
    return event.get("ph") == "X" and event.get("cat") == "user_annotation" and event["name"] == STEP


def _span(event: Event) -> Span:
    start = float(event["ts"])
    return Span(str(event.get("tid")), start, start + float(event["dur"]), event["name"], event.get("cat", ""))


def _steps(spans: Iterable[Span]) -> tuple[float, float, int]:
    steps = [span for span in spans if span.kind == "user_annotation" and span.name == STEP]
    if not steps:
        raise ValueError(f"expected events named '{STEP}', there are none: annotate the steps")
    return min(step.start for step in steps), max(step.end for step in steps), len(steps)


def _merged(spans: Iterable[Span], start: float, end: float) -> list[tuple[float, float]]:
    """Disjoint, in order, within the two."""
    found: list[tuple[float, float]] = []
    for first, last in sorted((max(span.start, start), min(span.end, end)) for span in spans):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return found


def _gaps(busy: Sequence[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    """What is left between the two, the largest first."""
    bounded = [(start, start), *busy, (end, end)]
    gaps = [(one[1], other[0]) for one, other in pairwise(bounded) if other[0] > one[1]]
    return sorted(gaps, key=lambda gap: gap[0] - gap[1])


def _doing(host: Iterable[Span], start: float, end: float) -> dict[str, float]:
    """Microseconds by name, the most first; what happens inside something else counts for itself alone."""
    own: Counter[str] = Counter()
    inside = (span for span in host if span.within(start, end))
    for _, spans in groupby(sorted(inside, key=lambda span: (span[:2], -span.end)), key=lambda span: span.thread):
        around: list[Span] = []
        for span in spans:
            while around and around[-1].end <= span.start:
                around.pop()
            if around:
                own[around[-1].name] -= span.within(start, end)
            own[span.name] += span.within(start, end)
            around.append(span)
    return {name: spent for name, spent in own.most_common(_NUM_NAMES) if spent > 0}


def _direction(name: str) -> str:
    """Of a copy: "HtoD" of "Memcpy HtoD (Pinned -> Device)"."""
    return name.split()[1] if len(name.split()) > 1 else name
