"""The outcome of a simulated run, as plain numbers and as a table."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from rollout_engine.capacity.fleet import SimulatedFleet
from rollout_engine.capacity.options import FleetFile
from rollout_engine.capacity.training import UpdateRecord
from rollout_engine.capacity.workload import Workload


class Quantiles(msgspec.Struct, frozen=True):
    """How some figure is distributed."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def over(cls, values: Sequence[float]) -> "Quantiles | None":
        """The quantiles of some values; None without any."""
        if not len(values):
            return None
        found = np.asarray(values, dtype=np.float64)
        return cls(float(found.mean()), *map(float, np.quantile(found, (0.5, 0.95, 0.99, 1.0))))


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one case. Seconds are simulated ones unless a name says otherwise."""

    seconds: float
    """From the first request to the end of the last one, or of the last update."""
    num_samples: int
    num_tokens: int
    """Sampled, those that failures have thrown away left out."""
    tokens_per_second: float
    busy_share: float
    """Share of the replicas' time in which they compute steps."""
    request_seconds: Quantiles | None
    """From the submission to the end of a request's last sample."""
    first_token_seconds: Quantiles | None
    batch_seconds: Quantiles | None
    """The same of whole batches; None if prompts arrive independently."""
    staleness: Quantiles | None
    """Versions, of each sample when it is trained on; when it ends, if prompts arrive independently."""
    prefix_hit_share: float
    """Looked-up tokens that were found in a prefix cache."""
    update_seconds: Quantiles | None
    update_gigabytes: float
    """Bytes that cross the network in one update."""
    num_preempted: int
    """Sequences that lost their KV because there was none left."""
    num_failures: int
    out_of_service_share: float
    """Share of the replicas' time between a failure and the return to service, of those that have returned."""
    num_moved: int
    """Sequences that continued at another replica."""
    num_carried_tokens: int
    """Tokens that these took along."""
    num_lost_tokens: int
    """Tokens that these sampled again."""
    wall_seconds: float
    """Seconds that the simulation took, on this machine."""
    num_events: int


def summarize(
    file: FleetFile,
    workload: Workload,
    fleet: SimulatedFleet,
    *,
    batch_seconds: list[float],
    staleness: list[int],
    updates: list[UpdateRecord],
    update_gigabytes: float,
    seconds: float,
    wall_seconds: float,
    num_events: int,
) -> Outcome:
    """The figures of a run that is over."""
    counts, engines, jobs = fleet.counts, fleet.engine_counts, workload.jobs
    replica_seconds = max(seconds, 1e-12) * file.fleet.num_replicas
    return Outcome(
        seconds=seconds,
        num_samples=workload.num_sequences,
        num_tokens=workload.num_tokens,
        tokens_per_second=workload.num_tokens / max(seconds, 1e-12),
        busy_share=engines.busy_seconds / replica_seconds,
        request_seconds=Quantiles.over([job.ended_at - job.submitted_at for job in jobs]),
        first_token_seconds=Quantiles.over([job.first_token_at - job.submitted_at for job in jobs]),
        batch_seconds=Quantiles.over(batch_seconds),
        staleness=Quantiles.over(staleness),
        prefix_hit_share=engines.num_cached / max(engines.num_looked_up, 1),
        update_seconds=Quantiles.over([update.seconds for update in updates]),
        update_gigabytes=update_gigabytes,
        num_preempted=engines.num_preempted,
        num_failures=counts.num_failures,
        out_of_service_share=counts.seconds_out / replica_seconds,
        num_moved=counts.num_moved,
        num_carried_tokens=counts.num_carried_tokens,
        num_lost_tokens=counts.num_lost_tokens,
        wall_seconds=wall_seconds,
        num_events=num_events,
    )


_COLUMNS: dict[str, Callable[[Outcome], str]] = {
    "tokens/s": lambda o: f"{o.tokens_per_second:,.0f}",
    "busy": lambda o: f"{o.busy_share:.0%}",
    "request p50": lambda o: _seconds(o.request_seconds, "p50"),
    "p95": lambda o: _seconds(o.request_seconds, "p95"),
    "p99": lambda o: _seconds(o.request_seconds, "p99"),
    "batch p50": lambda o: _seconds(o.batch_seconds, "p50"),
    "max": lambda o: _seconds(o.batch_seconds, "max"),
    "staleness": lambda o: "-" if o.staleness is None else f"{o.staleness.mean:.2f}",
    "most": lambda o: "-" if o.staleness is None else f"{o.staleness.max:.0f}",
    "prefix hits": lambda o: f"{o.prefix_hit_share:.1%}",
    "update": lambda o: _seconds(o.update_seconds, "p50"),
    "preempted": lambda o: f"{o.num_preempted:,}",
    "failures": lambda o: f"{o.num_failures:,}",
    "lost tokens": lambda o: f"{o.num_lost_tokens:,}",
}


def table(outcomes: Sequence[tuple[dict[str, Any], Outcome]]) -> str:
    """A row for each case: its settings, then its figures. Columns that are 0 or missing everywhere are left out."""
    rows = [
        {
            **{key: _format_value(value) for key, value in case.items()},
            **{key: make(o) for key, make in _COLUMNS.items()},
        }
        for case, o in outcomes
    ]
    empty = {key for key in _COLUMNS if all(row[key] in ("-", "0", "0.0%", "0.00") for row in rows)}
    names = [key for key in rows[0] if key not in empty]
    widths = [max(len(name), *(len(row[name]) for row in rows)) for name in names]
    lines = [names, *([row[name] for name in names] for row in rows)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _seconds(quantiles: Quantiles | None, name: str) -> str:
    return "-" if quantiles is None else f"{getattr(quantiles, name):,.1f} s"


def _format_value(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
