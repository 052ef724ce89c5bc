"""Writes the Grafana dashboard over the engine's own metrics: python docs/tools/dashboard.py

Change the rows below and run it; a test compares docs/dashboards/grafana.json with what it writes, and every metric in
it with what is exported.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).parents[1] / "dashboards" / "grafana.json"
ENGINE = 'engine=~"$engine"'
SOURCE = {"type": "prometheus", "uid": "${source}"}


class Panel(NamedTuple):
    """A picture: title, unit by Grafana's name, curves (query, legend). `@` is our prefix, `#` the labels."""

    title: str
    unit: str
    curves: tuple[tuple[str, str], ...]


def rate(name: str) -> str:
    """Per second, over a fleet's engines."""
    return f"sum(rate(@{name}_total{{#}}[$__rate_interval]))"


def quantiles(name: str, title: str, unit: str = "s") -> Panel:
    """The median and the 99th percentile of a histogram."""
    return Panel(
        title,
        unit,
        tuple(
            (
                f"histogram_quantile({q}, sum by (le) (rate(@{name}_bucket{{#}}[$__rate_interval])))",
                f"p{round(100 * q)}",
            )
            for q in (0.5, 0.99)
        ),
    )


ROWS: dict[str, tuple[Panel, ...]] = {
    "Throughput and load": (
        Panel("Tokens a second", "short", ((rate("tokens_sampled"), "sampled"), (rate("tokens_computed"), "computed"))),
        Panel("Sequences", "short", (("sum(@sequences_running{#})", "run"), ("sum(@sequences_waiting{#})", "wait"))),
        Panel("KV cache in use", "percentunit", (("avg(@kv_cache_usage_ratio{#})", "of the blocks"),)),
        Panel(
            "Ends of samples",
            "ops",
            ((rate("samples_finished").replace("sum(", "sum by (finish_reason) ("), "{{finish_reason}}"),),
        ),
    ),
    "Latency": (
        quantiles("time_to_first_token_seconds", "Time to the first token"),
        quantiles("inter_token_seconds", "Between two tokens"),
        quantiles("queue_seconds", "In the queue"),
        quantiles("request_seconds", "Whole requests"),
    ),
    "Weight updates and staleness": (
        Panel("Policy version", "none", (("max(@policy_version{#})", "newest"), ("min(@policy_version{#})", "oldest"))),
        quantiles("update_seconds", "Updates, begin to commit"),
        quantiles("update_stall_seconds", "Steps stood still for an update"),
        Panel("Bytes of updates", "Bps", ((rate("update_bytes"), "bytes"),)),
        Panel(
            "Updates that failed", "ops", ((rate("update_failures").replace("sum(", "sum by (error) ("), "{{error}}"),)
        ),
        quantiles("rollout_staleness_versions", "Staleness of samples that the trainer gets", "none"),
        Panel("Runs", "bool", (("min(@running{#})", "runs"),)),
    ),
    "Cache, preemptions, drafts": (
        Panel(
            "Prefix cache hits",
            "percentunit",
            ((f"{rate('tokens_cached')} / {rate('tokens_looked_up')}", "of the tokens looked up"),),
        ),
        Panel("Computed again", "short", ((rate("tokens_recomputed"), "tokens"), (rate("preemptions"), "preemptions"))),
        Panel(
            "Drafted tokens that were right",
            "percentunit",
            ((f"{rate('tokens_accepted')} / {rate('tokens_drafted')}", "of those drafted"),),
        ),
        Panel("Steps", "ops", ((rate("steps"), "all"), (rate("steps_failed"), "failed"))),
    ),
    "Replicas": (
        Panel("States", "none", (("sum by (state) (@replica_state{#})", "{{state}}"),)),
        Panel("Version", "none", (("@replica_policy_version{#}", "{{replica}}"),)),
        Panel("Sequences that run", "short", (("@replica_sequences_running{#}", "{{replica}}"),)),
        Panel(
            "Tokens a second", "short", (("rate(@replica_tokens_sampled_total{#}[$__rate_interval])", "{{replica}}"),)
        ),
    ),
}


def dashboard() -> dict[str, Any]:
    """The whole dashboard, in Grafana's JSON model."""
    return {
        "title": "rollout-engine",
        "uid": "rollout-engine",
        "schemaVersion": 39,
        "tags": ["rollout-engine"],
        "time": {"from": "now-1h", "to": "now"},
        "refresh": "10s",
        "templating": {
            "list": [
                {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"},
                {
                    "name": "engine",
                    "label": "Engine",
                    "type": "query",
                    "datasource": SOURCE,
                    "query": {"query": "label_values(rollout_engine_policy_version, engine)", "refId": "engine"},
                    "refresh": 2,
                    "includeAll": True,
                    "multi": True,
                    "current": {"text": "All", "value": "$__all"},
                },
            ]
        },
        "panels": list(_panels()),
    }


def _panels() -> Iterator[dict[str, Any]]:
    top = number = 0
    for row, panels in ROWS.items():
        number += 1
        yield {
            "id": number,
            "type": "row",
            "title": row,
            "collapsed": False,
            "panels": [],
            "gridPos": _place(0, top, 24, 1),
        }
        top += 1
        for i, panel in enumerate(panels):
            number += 1
            yield _panel(panel, number, _place(6 * (i % 4), top + 8 * (i // 4), 6, 8))
        top += 8 * -(-len(panels) // 4)


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "datasource": SOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + i),
                "datasource": SOURCE,
                "expr": query.replace("@", "rollout_engine_").replace("#", ENGINE),
                "legendFormat": legend,
            }
            for i, (query, legend) in enumerate(panel.curves)
        ],
    }


def _place(x: int, y: int, width: int, height: int) -> dict[str, int]:
    return {"x": x, "y": y, "w": width, "h": height}


if __name__ == "__main__":
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
