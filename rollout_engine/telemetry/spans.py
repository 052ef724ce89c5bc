"""Records OpenTelemetry spans of requests, pauses and weight updates. The package is imported only if asked for.

    caller's trace ── trace_headers ──> rollout_engine.request            events: scheduled, first_token
    caller's span  ── its context ────> rollout_engine.pause, .update_weights, .collective_rpc (each verb of an update)

The span of a request is made after its end, from times that are kept anyway: until then it costs nothing.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rollout_engine.base.errors import ConfigError, RequestError
from rollout_engine.base.outputs import UpdateReport
from rollout_engine.results.open_request import OpenRequest

logger = logging.getLogger("rollout_engine")

_EXPORT_SECONDS = 3.0
"""Timeout of an export: how long an unreachable collector may delay a shutdown."""

TraceHeaders = Mapping[str, str]
"""W3C trace context: `traceparent`, and perhaps `tracestate`."""


class Spans:
    """Records nothing; used by an engine without `otlp_traces_endpoint`."""

    is_enabled = False
    """Whether anything is recorded."""

    def __init__(self) -> None:
        self._has_warned = False

    def check_headers(self, headers: TraceHeaders | None) -> None:
        """Raise `RequestError` unless `headers` is None or a mapping of str to str; warn if they go unused."""
        if headers is None:
            return
        if not isinstance(headers, Mapping) or not all(isinstance(x, str) for pair in headers.items() for x in pair):
            raise RequestError.for_field("trace_headers", headers, "a mapping of str to str")
        self._warn_unused()

    def request(self, request: OpenRequest, error: BaseException | None) -> None:
        """Record a request that has ended, by `error` if given, or whose reader has left."""

    @contextmanager
    def during(self, name: str, **attributes: Any) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Open a span; call the yielded function to add attributes. An exception inside marks it as failed."""
        yield lambda _: None

    def update(self, update: Callable[[], UpdateReport]) -> UpdateReport:
        """Run a weight update inside a span."""
        with self.during("update_weights") as set_attributes:
            report = update()
            names = ("version", "num_tensors", "num_bytes", "stall_seconds", "num_in_flight", "staging")
            set_attributes({f"rollout_engine.{name}": getattr(report, name) for name in names})
        return report

    def close(self) -> None:
        """Send the spans that have not been sent."""

    def _warn_unused(self) -> None:
        if not self._has_warned:
            logger.warning("trace_headers are not used: EngineConfig.otlp_traces_endpoint is not set")
            self._has_warned = True


class OpenTelemetrySpans(Spans):
    """Records spans with a `TracerProvider` of the OpenTelemetry SDK, which `close` shuts down.

    Those of requests have the attributes of OpenTelemetry's conventions for generative AI. `model`: name of the model.
    """

    is_enabled = True

    def __init__(self, provider: Any, model: str = "") -> None:
        from opentelemetry.context import Context
        from opentelemetry.trace import StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        super().__init__()
        self._provider, self._tracer = provider, provider.get_tracer("rollout_engine")
        self._extract, self._no_context = TraceContextTextMapPropagator().extract, Context()
        self._failed, self._model = StatusCode.ERROR, model
        self._has_failed = False

    def request(self, request: OpenRequest, error: BaseException | None) -> None:
        try:
            self._record(request, error)
        except Exception as problem:  # losing a span must not lose a result
            if not self._has_failed:
                self._has_failed = True
                logger.warning("the span of a request cannot be recorded: %r", problem, exc_info=problem)

    def _record(self, request: OpenRequest, error: BaseException | None) -> None:
        metrics, now = request.metrics, time.monotonic()
        to_epoch = time.time() - now
        headers = {name.lower(): value for name, value in (request.trace_headers or {}).items()}
        span = self._tracer.start_span(
            "rollout_engine.request",
            context=self._extract(headers, self._no_context),
            start_time=_nanoseconds(metrics.arrival_time + to_epoch),
            attributes=_attributes(request, self._model),
        )
        for event, at in (("scheduled", metrics.scheduled_time), ("first_token", metrics.first_token_time)):
            if at is not None:
                span.add_event(event, timestamp=_nanoseconds(at + to_epoch))
        why = str(error) if error is not None else next((s.error for s in request.samples if s.error), None)
        if why is not None:
            span.set_status(self._failed, why)
        span.end(_nanoseconds((metrics.finished_time or now) + to_epoch))

    @contextmanager
    def during(self, name: str, **attributes: Any) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        named = {f"rollout_engine.{key}": value for key, value in attributes.items()}
        with self._tracer.start_as_current_span(f"rollout_engine.{name}", attributes=named) as span:
            yield span.set_attributes

    def close(self) -> None:
        self._provider.shutdown()

    def _warn_unused(self) -> None:
        """Do nothing: trace headers are used."""


def spans_to(endpoint: str | None, model: str = "") -> Spans:
    """Send spans to an OTLP/HTTP collector in batches, from a thread. Raises `ConfigError` without the extra.

    The service is called OTEL_SERVICE_NAME, or "rollout-engine".
    """
    if endpoint is None:
        return Spans()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        what = f"otlp_traces_endpoint={endpoint!r} needs OpenTelemetry: pip install 'rollout-engine[otel]'"
        raise ConfigError(f"{what} ({error}).") from error
    service = os.environ.get("OTEL_SERVICE_NAME", "rollout-engine")
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)))
    return OpenTelemetrySpans(provider, model)


def _attributes(request: OpenRequest, model: str) -> dict[str, Any]:
    versions: set[int] = set().union(*(sample.policy_versions for sample in request.samples))
    params = request.params
    asked: dict[str, Any] = {
        "model": model or None,
        "choice.count": params.n,
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or None,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "seed": params.seed if (params.seed or 0) < 2**63 else None,  # an attribute has 64 bits, one for the sign
        "stop_sequences": params.stop or None,
    }
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "rollout_engine",
        **{f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None},
        "gen_ai.response.id": request.request_id,
        **({"gen_ai.response.model": model} if model else {}),
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": sum(sample.num_tokens for sample in request.samples),
        "gen_ai.response.finish_reasons": [sample.finish_reason or "abort" for sample in request.samples],
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "rollout_engine.request_id": request.request_id,
        "rollout_engine.num_cached_tokens": request.num_cached_tokens,
        "rollout_engine.policy_versions": sorted(versions),
    }


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
