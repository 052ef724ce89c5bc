"""Metrics, profiles, traces and log lines of the server."""

import json
import logging
import re
from pathlib import Path

import msgspec
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families

from rollout_engine.serve import request_log
from rollout_engine.serve.route import Reply
from rollout_engine.telemetry.spans import OpenTelemetrySpans

COMPLETION = {"prompt": [5, 6, 7], "max_tokens": 6, "min_tokens": 6, "seed": 1, "n": 2}


def scraped(client):
    response = client.send("GET", "/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(response.text)
    return {(s.name, *sorted(s.labels.items())): s.value for family in families for s in family.samples}


def test_metrics_are_told_under_three_libraries_names(client):
    before = scraped(client)
    client.post("/v1/completions", COMPLETION)
    after = scraped(client)
    assert set(after) == set(before)
    grown = {key: after[key] - before[key] for key in after}
    vllm, sglang = (("engine", "0"), ("model_name", "tiny")), (("engine_type", "unified"), ("model_name", "tiny"))
    for name, labels, count in (
        ("rollout_engine_tokens_sampled_total", (("engine", "0"),), 12),
        ("rollout_engine_samples_finished_total", (("engine", "0"), ("finish_reason", "length")), 2),
        ("vllm:generation_tokens_total", vllm, 12),
        ("vllm:prompt_tokens_total", vllm, 3),
        ("vllm:request_success_total", (("engine", "0"), ("finished_reason", "length"), ("model_name", "tiny")), 2),
        ("vllm:time_to_first_token_seconds_count", vllm, 1),
        ("vllm:inter_token_latency_seconds_count", vllm, 10),
        ("vllm:e2e_request_latency_seconds_bucket", (("engine", "0"), ("le", "+Inf"), ("model_name", "tiny")), 1),
        ("vllm:num_preemptions_total", vllm, 0),
        ("vllm:request_params_n_sum", vllm, 2),
        ("vllm:request_params_max_tokens_sum", vllm, 6),
        ("vllm:iteration_tokens_total_sum", vllm, 3 + 2 * 5),
        *((f"vllm:request_{phase}_time_seconds_count", vllm, 1) for phase in ("inference", "prefill", "decode")),
        ("vllm:request_time_per_output_token_seconds_count", vllm, 1),
        ("vllm:time_per_output_token_seconds_count", vllm, 10),
        ("sglang:generation_tokens_total", sglang, 12),
        ("sglang:prompt_tokens_total", sglang, 3),
        ("sglang:num_requests_total", sglang, 1),
        ("sglang:inter_token_latency_seconds_count", sglang, 10),
        ("sglang:e2e_request_latency_seconds_count", sglang, 1),
    ):
        assert grown[name, *labels] == count, name
    assert grown["vllm:prefix_cache_queries_total", *vllm] > 0
    idle = [f"vllm:{name}" for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")]
    assert [after[name, *vllm] for name in idle] == [0, 0, 0]
    assert [after[f"sglang:{name}", *sglang] for name in ("num_running_reqs", "num_queue_reqs", "token_usage")] == [
        0
    ] * 3
    assert after["rollout_engine_policy_version", ("engine", "0")] == 0
    [cache] = [dict(labels) for name, *labels in after if name == "vllm:cache_config_info"]
    assert int(cache["block_size"]) > 0 and int(cache["num_gpu_blocks"]) > 0
    assert after["vllm:num_requests_waiting_by_reason", *sorted({**dict(vllm), "reason": "capacity"}.items())] == 0
    phases = [grown[f"vllm:request_{phase}_time_seconds_sum", *vllm] for phase in ("prefill", "decode", "inference")]
    assert phases[0] + phases[1] == pytest.approx(phases[2])


VLLM_TESTS = (
    *("num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc"),
    *("prefix_cache_queries", "prefix_cache_hits", "num_preemptions_total", "prompt_tokens_total"),
    *("generation_tokens_total", "iteration_tokens_total", "cache_config_info", "request_success_total"),
    *("request_prompt_tokens", "request_generation_tokens", "request_params_n", "request_params_max_tokens"),
    *("time_per_output_token_seconds", "time_to_first_token_seconds", "inter_token_latency_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds"),
    *("request_prefill_time_seconds", "request_decode_time_seconds", "request_time_per_output_token_seconds"),
)


@pytest.mark.parametrize("name", VLLM_TESTS)
def test_names_that_vllms_own_tests_look_for_are_there(client, name):
    assert f"vllm:{name}" in client.send("GET", "/metrics").text


def test_a_profile_is_a_trace_on_disk(client, tmp_path):
    fields = {"num_steps": 3, "activities": ["CPU", "GPU"], "with_stack": False, "record_shapes": True}
    assert client.post("/start_profile", {"output_dir": str(tmp_path), **fields})["success"]
    assert "call stop_profile" in client.problem("/start_profile", {"output_dir": str(tmp_path)}, status=409)["message"]
    client.post("/v1/completions", COMPLETION)
    (path,) = client.post("/stop_profile")["traces"]
    assert [Path(path)] == [*tmp_path.iterdir()]
    events = json.loads(Path(path).read_text())["traceEvents"]
    steps = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert len(steps) == 3 and "1 sequences, 3 tokens" in steps[0]
    assert "no profile is running" in client.problem("/stop_profile", status=409)["message"]


@pytest.mark.parametrize(
    "field, value, said",
    [
        ("start_step", 5, "begins at once"),
        ("profile_by_stage", True, "prompts and samples together"),
        ("merge_profiles", True, "stay apart"),
        ("profile_prefix", "mine", "give another output_dir"),
        ("activities", ["MEM"], "Leave it out"),
        ("activities", ["GPU"], "Leave it out"),
        ("num_steps", 0, "at least 1"),
        ("output_dir", __file__, "can write to"),
        ("output_dir", None, "EngineConfig(profiler_dir"),
        ("num_step", 5, "Did you mean"),
    ],
)
def test_a_profile_that_cannot_be_had_is_refused_with_the_reason(client, field, value, said):
    problem = client.problem("/start_profile", {field: value} | ({} if field == "output_dir" else {"output_dir": "x"}))
    assert said in problem["message"] and problem["param"] == field
    client.problem("/stop_profile", status=409)


def test_a_request_joins_its_callers_trace(client, policy, monkeypatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    spans = OpenTelemetrySpans(provider, "tiny")
    monkeypatch.setattr(policy.frontend.streams._processor, "_on_closed", spans.request)
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    client.post("/v1/completions", COMPLETION, headers={"traceparent": f"00-{trace}-{parent}-01"})
    (span,) = exporter.get_finished_spans()
    assert (f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}") == (trace, parent)
    assert span.attributes["gen_ai.request.choice.count"] == 2


def test_log_lines_name_the_request_that_they_are_about(client, caplog, monkeypatch):
    async def fail(**_):
        raise KeyError("a fault of ours")

    monkeypatch.setattr(client.app.served.engine, "is_paused", fail, raising=False)
    problem = client.problem("/is_paused", method="GET", status=500, headers={"x-request-id": "mine-%s"})
    assert problem["message"] == "Internal error."
    (record,) = caplog.records
    assert record.request_id == "mine-%s"
    assert record.getMessage() == "GET /is_paused failed [request mine-%s]" and "a fault of ours" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO, "rollout_engine.serve"):
        request_log.logger.info("%d replicas", 2)
    assert caplog.messages == ["2 replicas"]


@pytest.mark.parametrize("value", ["\ud800", object()])
def test_an_answer_that_cannot_be_written_is_an_error_of_the_server(client, monkeypatch, caplog, value):
    async def answer(served, asked):
        return Reply({"value": value})

    row = client.app._routes["/is_paused"]
    monkeypatch.setitem(row, "GET", msgspec.structs.replace(row["GET"], handler=answer))
    assert client.problem("/is_paused", status=500, method="GET")["message"] == "Internal error."
    assert "GET /is_paused failed" in caplog.text


def test_each_answer_is_a_line_of_the_log(client, caplog):
    with caplog.at_level(logging.INFO, "rollout_engine.serve"):
        client.send("POST", "/v1/completions", COMPLETION, headers={"x-request-id": "one"})
        client.send("GET", "/nowhere", headers={"x-request-id": "two"})
        client.send("GET", "/a%0aGET%20/b:%20200", headers={"x-request-id": "three"})
    first, second, third = caplog.messages
    assert re.fullmatch(r"POST /v1/completions: 200, \d+\.\d{3} s \[request one\]", first)
    assert re.fullmatch(r"GET /nowhere: 404, \d+\.\d{3} s \[request two\]", second)
    assert third.startswith(r"GET '/a\nGET /b: 200': 404, ") and "\n" not in third
