"""The metrics that an engine exports, from the code that exports them: `markdown()`, and their names for tests.

python docs/tools/metric_tables.py      prints the page's generated part
"""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from rollout_engine.base.metrics import CoreMetrics, CoreStats, EngineMetrics, ReplicaMetrics, RequestStats
from rollout_engine.telemetry.prometheus import own_families


def families() -> list[Metric]:
    """Every family of a fleet with one replica, under each name that a scrape may show."""
    counters = CoreStats()
    counters.drafts.count("ngram", 1, 1)
    counters.updates.add_failure("ChecksumError")
    core = CoreMetrics(0, 0, 0, 0.0, 0, "RUNNING", counters)
    replica = ReplicaMetrics("SYNCED", True, 0, 0, core)
    return list(own_families(EngineMetrics(core, RequestStats(), {0: replica}), {"engine": "0"}))


def series() -> set[str]:
    """The names of all series, as a query writes them: with `_total`, `_bucket`, `_sum` and `_count`."""
    return {sample.name for family in families() for sample in family.samples}


def markdown() -> str:
    """A table of the engine's own metrics, and one of its replicas'."""
    shown = families()
    replicas = [family for family in shown if family.name.startswith("rollout_engine_replica_")]
    own = [family for family in shown if family not in replicas]
    return (
        "## Of an engine\n\nOver a fleet these are sums over its replicas.\n\n"
        + "\n".join(_rows(own))
        + "\n\n## Of each replica of a fleet\n\nThe label `replica` is its index.\n\n"
        + "\n".join(_rows(replicas))
        + "\n"
    )


def _rows(shown: list[Metric]) -> Iterator[str]:
    yield "| metric | kind | labels | meaning |"
    yield "|---|---|---|---|"
    for family in shown:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"engine", "replica", "le"}
        named = ", ".join(f"`{each}`" for each in sorted(labels))
        yield f"| `{name}` | {family.type} | {named} | {family.documentation} |"


if __name__ == "__main__":
    print(markdown())
