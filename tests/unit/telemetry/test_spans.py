"""Spans of an engine in process, in memory."""

import logging
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from rollout_engine import LLM
from rollout_engine.base.config import EngineConfig
from rollout_engine.base.errors import ConfigError, LifecycleError, RequestError, StaleVersionError
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.base.sampling_params import SamplingParams
from rollout_engine.telemetry.spans import OpenTelemetrySpans, spans_to

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"Traceparent": f"00-{TRACE}-{PARENT}-01"}
ENDPOINT = "http://localhost:4318/v1/traces"


@pytest.fixture
def exporter():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


@pytest.fixture
def engine(make_engine, provider):
    return make_engine(spans=OpenTelemetrySpans(provider, "org/model"))


def greedy(max_tokens, **changes):
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **changes)


def test_a_request_is_one_span_from_arrival_to_its_end(engine, exporter, drain):
    engine.add_request("a", [7, 8, 9], greedy(4, n=2))
    engine.step()
    engine.core.commit_version(3)
    assert exporter.get_finished_spans() == ()
    timings = drain(engine)[-1].metrics
    (span,) = exporter.get_finished_spans()
    assert span.name == "rollout_engine.request" and span.parent is None
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "rollout_engine",
        "gen_ai.request.model": "org/model",
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 1.0,
        "gen_ai.request.top_p": 1.0,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.response.id": "a",
        "gen_ai.response.model": "org/model",
        "gen_ai.usage.cache_read.input_tokens": 0,
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.response.finish_reasons": ("length", "length"),
        "rollout_engine.request_id": "a",
        "rollout_engine.num_cached_tokens": 0,
        "rollout_engine.policy_versions": (0, 3),
    }
    assert [event.name for event in span.events] == ["scheduled", "first_token"]
    since = [at - span.start_time for at in (*(event.timestamp for event in span.events), span.end_time)]
    times = (timings.scheduled_time, timings.first_token_time, timings.finished_time)
    assert since == pytest.approx([(at - timings.arrival_time) * 1e9 for at in times], abs=2_000)
    assert span.status.status_code is StatusCode.UNSET


def test_a_span_has_the_settings_that_its_request_gave(engine, exporter, drain):
    for seed in (7, 2**64 - 1):
        engine.add_request(f"{seed}", [7], SamplingParams(max_tokens=1, top_k=5, seed=seed, temperature=0.5))
    drain(engine)
    small, large = ({k.removeprefix("gen_ai.request."): v for k, v in s.attributes.items()} for s in finished(exporter))
    assert (small["top_k"], small["seed"], small["temperature"]) == (5, 7, 0.5)
    assert "seed" not in large  # attributes of integers have 63 bits


def finished(exporter):
    return sorted(exporter.get_finished_spans(), key=lambda span: len(span.attributes["rollout_engine.request_id"]))


def test_trace_headers_make_it_part_of_the_callers_trace(engine, exporter, drain):
    engine.add_request("a", [7], greedy(1), trace_headers=HEADERS)
    engine.add_request("b", [7], greedy(1))
    drain(engine)
    joined, alone = exporter.get_finished_spans()
    assert f"{joined.context.trace_id:032x}" == TRACE and f"{joined.parent.span_id:016x}" == PARENT
    assert alone.parent is None and alone.context.trace_id != joined.context.trace_id


def test_trace_headers_of_a_call_are_those_of_all_its_requests(engine, exporter):
    llm = LLM.from_engine(engine)
    llm.generate([[7], [8]], greedy(1), use_tqdm=False, trace_headers=HEADERS)
    assert [f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans()] == [TRACE] * 2
    with pytest.raises(RequestError, match="trace_headers"):
        llm.generate([7], greedy(1), use_tqdm=False, trace_headers={"traceparent": 1})


def test_an_engine_says_whether_it_records_spans(engine, make_engine):
    assert engine.is_tracing_enabled()
    assert not make_engine().is_tracing_enabled()


def test_requests_that_nobody_waits_for_have_a_span_too(engine, exporter, drain):
    engine.add_request("a", [7], greedy(50))
    engine.step()
    engine.abort_request("a", discard=True)
    (span,) = exporter.get_finished_spans()
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort",)
    assert span.attributes["gen_ai.usage.output_tokens"] == 1
    drain(engine)
    assert len(exporter.get_finished_spans()) == 1


def test_a_request_that_failed_says_why(make_engine, provider, exporter, drain):
    engine = make_engine(spans=OpenTelemetrySpans(provider), errors={0: "NaN logits"})
    engine.add_request("a", [7], greedy(5))
    drain(engine)
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR and span.status.description == "NaN logits"


def test_a_pause_is_a_span_inside_the_callers(engine, exporter, provider):
    with provider.get_tracer("trainer").start_as_current_span("optimizer step") as caller:
        engine.pause_generation(mode="keep")
        engine.resume_generation()
    pause, _ = exporter.get_finished_spans()
    assert (pause.name, dict(pause.attributes)) == ("rollout_engine.pause", {"rollout_engine.mode": "keep"})
    assert pause.parent.span_id == caller.get_span_context().span_id


def test_a_pause_that_is_refused_is_a_failed_span(engine, exporter):
    with pytest.raises(LifecycleError):
        engine.pause_generation(mode="now")
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR


def test_an_update_tells_its_report_or_its_error(provider, exporter):
    spans, report = OpenTelemetrySpans(provider), UpdateReport(4, "digest", 2, 100, 0.5, 0.01, 3)

    def refuse():
        raise StaleVersionError("version 1 is older")

    assert spans.update(lambda: report) is report
    with pytest.raises(StaleVersionError):
        spans.update(refuse)
    done, failed = exporter.get_finished_spans()
    assert done.name == failed.name == "rollout_engine.update_weights"
    assert done.attributes["rollout_engine.version"] == 4 and done.attributes["rollout_engine.num_in_flight"] == 3
    assert done.attributes["rollout_engine.stall_seconds"] == 0.01
    assert failed.status.status_code is StatusCode.ERROR and "version 1 is older" in failed.status.description


@pytest.mark.parametrize("headers", ["traceparent", {"traceparent": 5}, [("a", "b")]])
def test_what_is_no_headers_is_refused(engine, headers):
    with pytest.raises(RequestError, match="trace_headers"):
        engine.add_request("a", [7], greedy(1), trace_headers=headers)


def test_headers_that_nothing_reads_are_warned_of_once(make_engine, drain, caplog):
    engine = make_engine()
    with caplog.at_level(logging.WARNING, "rollout_engine"):
        for name in "ab":
            engine.add_request(name, [7], greedy(1), trace_headers=HEADERS)
    assert [message for message in caplog.messages if "trace_headers are not used" in message] == caplog.messages
    assert len(caplog.messages) == 1
    drain(engine)


def test_an_endpoint_without_the_extra_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with pytest.raises(ConfigError, match=r"pip install 'rollout-engine\[otel\]'"):
        spans_to(ENDPOINT)


def test_an_endpoint_is_a_url():
    assert EngineConfig(model="m", otlp_traces_endpoint=ENDPOINT).otlp_traces_endpoint == ENDPOINT
    with pytest.raises(ConfigError, match="otlp_traces_endpoint='localhost:4317'"):
        EngineConfig(model="m", otlp_traces_endpoint="localhost:4317")


def test_a_span_that_cannot_be_recorded_costs_no_result(engine, drain, monkeypatch, caplog):
    monkeypatch.setattr(OpenTelemetrySpans, "_record", lambda self, request, error: 1 / 0)
    for _ in range(2):
        engine.add_request("a", [7], greedy(2, output_kind="final_only"))
        assert len(drain(engine)) == 1
    (record,) = caplog.records
    assert "the span of a request cannot be recorded: ZeroDivisionError" in record.message
