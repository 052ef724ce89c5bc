"""Collects the stat loggers of an engine, and defines the stock ones: a log line, and Prometheus."""

import logging
from collections.abc import Callable, Iterable
from copy import copy
from importlib.metadata import entry_points

from prometheus_client import REGISTRY, CollectorRegistry

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.metrics import CoreStats, EngineMetrics, StatLogger
from rollout_engine.telemetry.prometheus import MetricsCollector, own_families

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
    """Logs one line of text: changes since the last one."""

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
            "%d preemptions; %d running, %d waiting, KV cache %.0f %% used%s, policy version %d",
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
            f", states {100 * core.state_usage:.0f} % used" if core.num_state_slots else "",
            core.policy_version,
        )

    def close(self) -> None:
        """Do nothing: there is nothing to release."""


class PrometheusLogger:
    """Exports the metrics when Prometheus scrapes, at no cost to steps.

    >>> engine = LLMEngine.from_config(config, stat_loggers=[PrometheusLogger(engine="0")])
    >>> prometheus_client.start_http_server(9090)

    `engine` is the label that distinguishes engines of one process.
    """

    def __init__(self, *, engine: str = "0", registry: CollectorRegistry = REGISTRY) -> None:
        self._engine = engine
        self._registry = registry
        self._collector: MetricsCollector | None = None

    def attach(self, read: Callable[[], EngineMetrics]) -> None:
        self._collector = MetricsCollector(lambda: own_families(read(), {"engine": self._engine}))
        self._registry.register(self._collector)

    def log(self, metrics: EngineMetrics, seconds: float) -> None:
        """Do nothing: a scrape reads the metrics itself."""

    def close(self) -> None:
        if self._collector is not None:
            self._registry.unregister(self._collector)
            self._collector = None
