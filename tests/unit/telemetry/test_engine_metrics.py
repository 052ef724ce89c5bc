"""What `get_metrics` and the stat loggers see of a running engine."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest

from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.engine import driver
from rollout_engine.telemetry import logger_thread


class Recorder:
    def __init__(self):
        self.lines, self.closed = [], 0

    def attach(self, read):
        self.read = read

    def log(self, metrics, seconds):
        self.lines.append((metrics, seconds))

    def close(self):
        self.closed += 1


def test_requests_are_counted_and_timed_from_arrival_to_their_end(make_engine, drain):
    engine = make_engine()
    engine.add_request("a", [7, 8, 9], SamplingParams(n=3, max_tokens=5, ignore_eos=True))
    waiting = engine.get_metrics()
    assert (waiting.core.num_requests, waiting.core.num_running, waiting.core.num_waiting) == (1, 0, 1)
    engine.step()
    running = engine.get_metrics().core
    assert (running.num_running + running.num_waiting, running.counters.num_tokens_sampled) == (3, 3)
    assert running.cache_usage > 0
    drain(engine)
    metrics = engine.get_metrics()
    stats = metrics.requests
    assert (metrics.core.num_requests, metrics.core.cache_usage) == (0, 0.0)
    assert stats.finished == {"stop": 0, "length": 3, "abort": 0, "error": 0}
    assert stats.inter_token_seconds.count == 3 * 4
    assert (stats.prompt_tokens.sum, stats.generation_tokens.sum) == (3, 15)
    for once in (stats.queue_seconds, stats.time_to_first_token_seconds, stats.request_seconds):
        assert once.count == 1
    assert stats.queue_seconds.sum <= stats.time_to_first_token_seconds.sum <= stats.request_seconds.sum


def test_a_result_tells_when_its_request_left_the_queue(make_engine, drain):
    engine = make_engine()
    engine.add_request("a", [7, 8, 9], SamplingParams(max_tokens=2))
    timings = drain(engine)[-1].metrics
    order = [timings.arrival_time, timings.scheduled_time, timings.first_token_time, timings.finished_time]
    assert order == sorted(order)


def test_the_gap_between_tokens_is_that_between_their_steps(make_engine, drain, monkeypatch):
    clock = SimpleNamespace(monotonic=itertools.count(100.0).__next__, perf_counter=time.perf_counter)
    engine = make_engine()
    engine.add_request("a", [7], SamplingParams(max_tokens=3, ignore_eos=True))
    monkeypatch.setattr(driver, "time", clock)
    engine.step()
    engine.step()
    seen = engine.get_metrics().requests.inter_token_seconds
    assert (seen.count, seen.sum) == (1, 1.0)
    drain(engine)


def test_aborted_requests_are_counted_as_such_and_discarded_ones_not(make_engine, drain):
    engine = make_engine()
    for name in "abc":
        engine.add_request(name, [7], SamplingParams(max_tokens=50, ignore_eos=True))
    engine.step()
    engine.abort_request("a")
    engine.abort_request("b", discard=True)
    finished = engine.get_metrics().requests.finished
    assert finished["abort"] == 1
    drain(engine)
    assert engine.get_metrics().requests.finished == {"stop": 0, "length": 1, "abort": 1, "error": 0}


def test_loggers_see_the_work_at_an_interval_and_at_its_end(make_engine, drain):
    recorder = Recorder()
    engine = make_engine(stat_loggers=[recorder], log_interval=0.001)
    engine.add_request("a", [7], SamplingParams(max_tokens=100, ignore_eos=True))
    engine.executor.before_step = lambda: time.sleep(0.01)
    while not recorder.lines:
        engine.step()
    drain(engine)
    engine.shutdown()
    sampled = [metrics.core.counters.num_tokens_sampled for metrics, _ in recorder.lines]
    assert sampled == sorted(sampled) and sampled[0] < sampled[-1] == 100
    assert all(seconds > 0 for _, seconds in recorder.lines)


def test_a_line_can_be_asked_for_and_shutdown_closes_the_loggers_once(make_engine):
    recorder = Recorder()
    engine = make_engine(stat_loggers=[recorder])
    engine.do_log_stats()
    assert [seconds for _, seconds in recorder.lines] == [0.0]
    assert recorder.read() == engine.get_metrics()
    engine.shutdown()
    engine.shutdown()
    assert recorder.closed == 1


class Broken(Recorder):
    def log(self, metrics, seconds):
        raise OSError("the disk is full")


def test_a_logger_that_raises_loses_no_result_and_is_logged_once(make_engine, drain, caplog):
    recorder, broken = Recorder(), Broken()
    engine = make_engine(stat_loggers=[broken, recorder])
    for _ in range(3):
        engine.add_requests([[5], [6], [7]], SamplingParams(max_tokens=3, output_kind="final_only"))
        assert len(drain(engine)) == 3
    engine.do_log_stats()
    assert recorder.lines[-1][0].requests.finished["length"] == 9
    (record,) = caplog.records
    assert record.message == f"stat logger {__name__}.Broken raised OSError: the disk is full"
    engine.shutdown()
    assert broken.closed == recorder.closed == 1


def test_a_logger_that_hangs_holds_neither_steps_nor_other_loggers_nor_the_end(make_engine, drain, caplog, monkeypatch):
    monkeypatch.setattr(logger_thread, "PATIENCE_SECONDS", 0.0)
    released, recorder, hanging = threading.Event(), Recorder(), Recorder()
    hanging.log = lambda metrics, seconds: released.wait()
    engine = make_engine(stat_loggers=[hanging, recorder])
    for _ in range(20):
        engine.add_requests([[5], [6], [7]], SamplingParams(max_tokens=3, output_kind="final_only"))
        assert len(drain(engine)) == 3
    engine.do_log_stats()
    assert "Recorder has not returned for 0 s: nobody waits for it" in caplog.text
    engine.shutdown()
    assert "Recorder has not ended within 0 s: it is left behind" in caplog.text
    released.set()


@pytest.mark.parametrize("n", [1, 4])
def test_every_token_after_a_samples_first_counts_one_gap(make_engine, drain, n):
    engine = make_engine()
    for i in range(5):
        engine.add_request(str(i), [7] * (i + 1), SamplingParams(n=n, max_tokens=i + 1, ignore_eos=True))
    drain(engine)
    assert engine.get_metrics().requests.inter_token_seconds.count == n * sum(range(5))
