import logging
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rollout_engine.base.errors import ConfigError
from rollout_engine.base.metrics import CoreMetrics, CoreStats, EngineMetrics, RequestStats
from rollout_engine.telemetry import stat_loggers
from rollout_engine.telemetry.stat_loggers import LogLine, PrometheusLogger, all_loggers


def metrics(**core):
    requests = RequestStats()
    requests.finished["stop"] = 2
    requests.queue_seconds.observe(0.003, times=2)
    return EngineMetrics(
        CoreMetrics(
            num_requests=3,
            num_running=4,
            num_waiting=5,
            cache_usage=0.25,
            policy_version=7,
            state="RUNNING",
            counters=CoreStats(**core),
        ),
        requests,
    )


def scraped(registry):
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_prometheus_reads_the_metrics_of_the_moment_of_the_scrape():
    registry, now = CollectorRegistry(), metrics(num_tokens_sampled=10)
    exporter = PrometheusLogger(engine="a", registry=registry)
    exporter.attach(lambda: now)
    assert scraped(registry)["rollout_engine_tokens_sampled_total", ("engine", "a")] == 10
    now.core.counters.num_tokens_sampled = 11
    seen = scraped(registry)
    assert seen["rollout_engine_tokens_sampled_total", ("engine", "a")] == 11
    assert seen["rollout_engine_policy_version", ("engine", "a")] == 7
    assert seen["rollout_engine_kv_cache_usage_ratio", ("engine", "a")] == 0.25
    assert seen["rollout_engine_samples_finished_total", ("engine", "a"), ("finish_reason", "stop")] == 2
    assert seen["rollout_engine_queue_seconds_bucket", ("engine", "a"), ("le", "0.0025")] == 0
    assert seen["rollout_engine_queue_seconds_bucket", ("engine", "a"), ("le", "0.005")] == 2
    assert seen["rollout_engine_queue_seconds_count", ("engine", "a")] == 2
    exporter.close()
    exporter.close()
    assert scraped(registry) == {}


def test_two_engines_of_one_process_are_told_apart():
    registry = CollectorRegistry()
    for name, sampled in (("a", 1), ("b", 2)):
        PrometheusLogger(engine=name, registry=registry).attach(lambda n=sampled: metrics(num_tokens_sampled=n))
    seen = scraped(registry)
    assert [seen["rollout_engine_tokens_sampled_total", ("engine", name)] for name in "ab"] == [1, 2]


def test_the_log_line_tells_what_happened_since_the_last(caplog):
    line = LogLine()
    line.attach(lambda: metrics(num_tokens_sampled=100))
    with caplog.at_level(logging.INFO, "rollout_engine"):
        line.log(metrics(num_tokens_sampled=150, num_steps=3), 2.0)
        line.log(metrics(num_tokens_sampled=151, num_steps=4), 1.0)
    first, second = caplog.messages
    assert "2.00 s: 50 tokens sampled (25 tokens/s)" in first and "3 steps" in first and "policy version 7" in first
    assert "1 tokens sampled" in second and "1 steps" in second and "4 running, 5 waiting" in second


@dataclass
class Recorder:
    closed: bool = False

    def attach(self, read):
        pass

    def log(self, metrics, seconds):
        pass

    def close(self):
        self.closed = True


def test_loggers_come_from_the_user_and_from_entry_points(monkeypatch):
    registered = EntryPoint("mine", f"{__name__}:Recorder", stat_loggers.ENTRY_POINTS)
    monkeypatch.setattr(EntryPoint, "load", lambda self: Recorder)
    monkeypatch.setattr(stat_loggers, "entry_points", lambda group: [registered])
    given = Recorder()
    found = all_loggers([given], log_line=True)
    assert [type(each) for each in found] == [LogLine, Recorder, Recorder]
    assert found[1] is given


def test_a_registered_logger_that_cannot_be_loaded_is_named(monkeypatch):
    broken = EntryPoint("mine", "no_such_module:Logger", stat_loggers.ENTRY_POINTS)
    monkeypatch.setattr(stat_loggers, "entry_points", lambda group: [broken])
    with pytest.raises(ConfigError, match=r"stat logger 'mine' \(no_such_module:Logger\)"):
        all_loggers([], log_line=False)


def test_what_is_not_a_logger_is_refused():
    with pytest.raises(ConfigError, match="has no method attach, log, close"):
        all_loggers(["prometheus"], log_line=False)
