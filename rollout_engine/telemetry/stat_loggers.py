"""Collects the stat loggers of an engine, and defines the stock ones: a log line, and Prometheus."""

import logging
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from importlib.metadata import entry_points
from itertools import accumulate

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rollout_engine.errors import ConfigError
from rollout_engine.metrics import CoreStats, EngineMetrics, Histogram, StatLogger

ENTRY_POINTS = "rollout_engine.stat_loggers"
logger = logging.getLogger("rollout_engine")


def all_loggers(given: Iterable[StatLogger], *, log_line: bool) -> list[StatLogger]:
    """Collect an engine's loggers: the log line unless it is off, the user's, and those that packages registered.

    Raises `ConfigError` for one that is not a `StatLogger` or cannot be loaded.
    """
    found: list[StatLogger] = [LogLine()] if log_line else []
    found += given
    for entry in entry_points(group=ENTRY_POINTS):
        try:
            found.append(entry.load()())
        except Exception as error:
            raise ConfigError(f"stat logger '{entry.name}' ({entry.value}) cannot be loaded: {error!r}.") from error
    for each in found:
        missing = [name for name in ("attach", "log", "close") if not callable(getattr(each, name, None))]
        if missing:
            raise ConfigError(f"stat logger {each!r} has no method {', '.join(missing)}: see metrics.StatLogger.")
    return found


def is_stock(stat_logger: StatLogger) -> bool:
    """Whether a logger is one of ours, which never wait."""
    return type(stat_logger) in (LogLine, PrometheusLogger)


class LogLine:
    """Logs one line of text: what has happened since the last one."""

    def __init__(self) -> None:
        self._last = CoreStats()

    def attach(self, read: Callable[[], EngineMetrics]) -> None:
        self._last = copy(read().core.counters)

    def log(self, metrics: EngineMetrics, seconds: float) -> None:
        core, now, before = metrics.core, copy(metrics.core.counters), self._last
        self._last = now
        num_sampled = now.num_tokens_sampled - before.num_tokens_sampled
        logger.info(
            "%.2f s: %d tokens sampled (%.0f tokens/s), %d prompt tokens computed, %d tokens cached, %d steps, "
            "%d preemptions; %d running, %d waiting, KV cache %.0f %% used, policy version %d",
            seconds,
            num_sampled,
            num_sampled / max(seconds, 1e-9),
            now.num_prompt_tokens_computed - before.num_prompt_tokens_computed,
            now.num_cached_tokens - before.num_cached_tokens,
            now.num_steps - before.num_steps,
            now.num_preemptions - before.num_preemptions,
            core.num_running,
            core.num_waiting,
            100 * core.cache_usage,
            core.policy_version,
        )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class PrometheusLogger:
    """Exports the metrics when Prometheus scrapes, at no cost to steps.

    >>> engine = LLMEngine.from_config(config, stat_loggers=[PrometheusLogger(engine="0")])
    >>> prometheus_client.start_http_server(9090)

    `engine` is the label that tells engines of one process apart.
    """

    def __init__(self, *, engine: str = "0", registry: CollectorRegistry = REGISTRY) -> None:
        self._engine = engine
        self._registry = registry
        self._collector: _EngineCollector | None = None

    def attach(self, read: Callable[[], EngineMetrics]) -> None:
        self._collector = _EngineCollector(read, self._engine)
        self._registry.register(self._collector)

    def log(self, metrics: EngineMetrics, seconds: float) -> None:
        """Do nothing: a scrape reads the metrics itself."""

    def close(self) -> None:
        if self._collector is not None:
            self._registry.unregister(self._collector)
            self._collector = None


class _EngineCollector(Collector):
    def __init__(self, read: Callable[[], EngineMetrics], engine: str) -> None:
        self._read = read
        self._engine = engine

    def describe(self) -> list[Metric]:
        return []  # several engines may register the same names, under labels of their own

    def collect(self) -> Iterator[Metric]:
        metrics = self._read()
        for name, text, value in _gauges(metrics):
            gauge = GaugeMetricFamily(f"rollout_engine_{name}", text, labels=["engine"])
            gauge.add_metric([self._engine], value)
            yield gauge
        for name, text, value in _counters(metrics):
            counter = CounterMetricFamily(f"rollout_engine_{name}", text, labels=["engine"])
            counter.add_metric([self._engine], value)
            yield counter
        finished = CounterMetricFamily(
            "rollout_engine_samples_finished", "Samples that ended.", labels=["engine", "finish_reason"]
        )
        for reason, count in metrics.requests.finished.items():
            finished.add_metric([self._engine, reason], count)
        yield finished
        for name, text, histogram in _histograms(metrics):
            family = HistogramMetricFamily(f"rollout_engine_{name}", text, labels=["engine"])
            family.add_metric([self._engine], _buckets(histogram), histogram.sum)
            yield family
        failures = CounterMetricFamily(
            "rollout_engine_update_failures", "Weight updates that raised an error.", labels=["engine", "error"]
        )
        for kind, count in metrics.core.counters.updates.failures.items():
            failures.add_metric([self._engine, kind], count)
        yield failures


def _gauges(metrics: EngineMetrics) -> list[tuple[str, str, float]]:
    core = metrics.core
    return [
        ("requests_unfinished", "Requests that have not ended.", core.num_requests),
        ("sequences_running", "Sequences with a place in the batch.", core.num_running),
        ("sequences_waiting", "Sequences that wait for a place.", core.num_waiting),
        ("kv_cache_usage_ratio", "KV blocks referenced by live requests / all blocks.", core.cache_usage),
        ("policy_version", "Version of the live weights.", core.policy_version),
        ("running", "1 where requests may compute, 0 while paused, asleep or dirty.", core.state == "RUNNING"),
    ]


def _counters(metrics: EngineMetrics) -> list[tuple[str, str, float]]:
    core, requests = metrics.core.counters, metrics.requests
    return [
        ("steps", "Steps of the engine.", core.num_steps),
        ("steps_failed", "Steps in which the executor raised.", core.num_failed_steps),
        ("tokens_computed", "Tokens put through the model.", core.num_tokens_computed),
        ("prompt_tokens_computed", "Prompt tokens put through the model.", core.num_prompt_tokens_computed),
        ("tokens_sampled", "Tokens sampled.", core.num_tokens_sampled),
        ("tokens_recomputed", "Tokens computed again, after their KV was given up.", core.num_recomputed_tokens),
        ("tokens_looked_up", "Tokens of sequences looked up in the prefix cache.", core.num_looked_up_tokens),
        ("tokens_cached", "Those of them found there, under the live version.", core.num_cached_tokens),
        ("tokens_surplus", "Tokens computed past an end that was not known yet.", core.num_surplus_tokens),
        ("preemptions", "Running sequences that lost their blocks.", core.num_preemptions),
        ("update_bytes", "Bytes of the weights that complete updates brought.", core.updates.num_bytes),
        ("samples_dropped", "Samples not returned because enough others had ended.", requests.dropped_samples),
        ("groups_regenerated", "Groups that a collector started again.", requests.regenerated_groups),
    ]


def _histograms(metrics: EngineMetrics) -> list[tuple[str, str, Histogram]]:
    requests, core = metrics.requests, metrics.core.counters
    return [
        ("queue_seconds", "From arrival to the first step.", requests.queue_seconds),
        ("time_to_first_token_seconds", "From arrival.", requests.time_to_first_token_seconds),
        ("inter_token_seconds", "Between steps that brought a request tokens.", requests.inter_token_seconds),
        ("request_seconds", "From arrival to the end of the last sample.", requests.request_seconds),
        ("request_prompt_tokens", "Prompt tokens of a request.", requests.prompt_tokens),
        ("request_generation_tokens", "Sampled tokens of a request.", requests.generation_tokens),
        ("staleness_versions", "Live version - oldest of a sample, at its end.", requests.staleness),
        ("rollout_staleness_versions", "The same when a rollout is handed out.", requests.rollout_staleness),
        ("pause_seconds", "From a pause's call until it was complete.", core.pause_seconds),
        ("update_seconds", "Complete weight updates.", core.updates.seconds),
        ("update_stall_seconds", "How long steps stood still for one.", core.updates.stall_seconds),
    ]


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    names = [str(bound) for bound in histogram.bounds] + ["+Inf"]
    return list(zip(names, accumulate(histogram.counts), strict=True))
