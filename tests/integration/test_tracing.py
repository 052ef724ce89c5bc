"""Spans as an OTLP collector receives them."""

import asyncio
import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rollout_engine import LLM, AsyncLLM, LifecycleError, ManifestMismatchError, RolloutPolicy, SamplingParams
from rollout_engine.testing import tiny_checkpoint, tiny_model

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module", autouse=True)
def protocol():
    """The messages of the wire, where the extra `otel` is installed."""
    reason = "needs the extra `otel`"
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason=reason)
    return pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2", reason=reason)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("model"))


class Collector(ThreadingHTTPServer):
    """Keeps what is posted to it."""

    def __init__(self, protocol):
        super().__init__(("127.0.0.1", 0), Handler)
        self.protocol, self.received = protocol, []
        self.status, self.headers = 200, {}
        self.endpoint = f"http://127.0.0.1:{self.server_port}/v1/traces"

    def spans(self):
        """(service, span) of all."""
        for message in self.received:
            for resource in message.resource_spans:
                (service,) = [x.value.string_value for x in resource.resource.attributes if x.key == "service.name"]
                yield from ((service, span) for scope in resource.scope_spans for span in scope.spans)


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.received.append(self.server.protocol.ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.status)
        for header in self.server.headers.items():
            self.send_header(*header)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def collector(protocol):
    with Collector(protocol) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.mark.slow
def test_an_engine_in_its_own_process_sends_requests_pauses_and_updates(checkpoint, collector):
    async def run(engine):
        async for _ in engine.generate("hello", PARAMS, "a", trace_headers=HEADERS):
            pass
        await engine.pause_generation(mode="keep")
        await engine.resume_generation()
        await engine.update_weights(tiny_model(seed=1))
        with pytest.raises(ManifestMismatchError):
            await engine.update_weights({})
        await engine.collective_rpc("abort_weight_update")
        with pytest.raises(LifecycleError):
            await engine.collective_rpc("verify_weights")

    options = dict(num_kv_blocks=64, num_threads=1, log_stats=False, otlp_traces_endpoint=collector.endpoint)
    with AsyncLLM(checkpoint, **options) as engine:
        asyncio.run(run(engine))
        policy = RolloutPolicy(engine)
        policy.pause_generation(mode="keep")
        policy.resume_generation()
        policy.update_weights(tiny_model(seed=2))
        policy.collective_rpc("abort_weight_update")
    services, spans = zip(*collector.spans(), strict=True)
    assert set(services) == {"rollout-engine"}
    assert [span.name.removeprefix("rollout_engine.") for span in spans] == [
        *("request", "pause", "update_weights", "update_weights", "collective_rpc", "collective_rpc"),
        *("pause", "update_weights", "collective_rpc"),
    ]
    verbs = [{a.key: a.value.string_value for a in span.attributes}.get("rollout_engine.method") for span in spans]
    assert [verbs[i] for i in (4, 5, 8)] == ["abort_weight_update", "verify_weights", "abort_weight_update"]
    assert (spans[0].trace_id.hex(), spans[0].parent_span_id.hex()) == (TRACE, PARENT)
    assert [span.status.code for span in spans] == [0, 0, 0, 2, 0, 2, 0, 0, 0]
    assert all(0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9 for span in spans)
    assert abs(spans[0].end_time_unix_nano / 1e9 - time.time()) < 60


def test_an_engine_in_process_sends_what_it_has_at_its_shutdown(checkpoint, collector):
    with LLM(checkpoint, num_kv_blocks=64, log_stats=False, otlp_traces_endpoint=collector.endpoint) as llm:
        llm.generate(["hello", "there"], PARAMS, use_tqdm=False)
        llm.update_weights(tiny_model(seed=1))
        llm.collective_rpc("abort_weight_update")
    names = [span.name.removeprefix("rollout_engine.") for _, span in collector.spans()]
    assert names == ["request", "request", "update_weights", "collective_rpc"]


def test_a_collector_that_is_not_there_costs_no_request(checkpoint):
    endpoint = "http://127.0.0.1:9/v1/traces"
    with LLM(checkpoint, num_kv_blocks=64, log_stats=False, otlp_traces_endpoint=endpoint) as llm:
        (output,) = llm.generate(["hello"], PARAMS, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 4


def test_a_shutdown_does_not_wait_for_a_collector_that_asks_for_four_seconds(checkpoint, collector):
    collector.status, collector.headers = 503, {"Retry-After": "4"}
    with LLM(checkpoint, num_kv_blocks=64, log_stats=False, otlp_traces_endpoint=collector.endpoint) as llm:
        llm.generate(["hello"], PARAMS, use_tqdm=False)
    assert len(collector.received) == 1  # it was not tried again
