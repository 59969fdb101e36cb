"""Spans of one request across processes, with OpenTelemetry where its packages are installed and an endpoint is named.

A span's `traceparent` (W3C) goes to other processes inside our own messages, which share one stream. Without tracing
every call here does nothing, and a caller's traceparent is passed on as it came.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from kvferry.common.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import Tracer

Value = str | int | float | bool


class Span:
    """One phase. Ends once: `end`, or leaving it as a context manager, whose exception becomes its status."""

    __slots__ = ("_span", "_tracing", "traceparent")

    def __init__(self, tracing: Tracing, span: OtelSpan | None, traceparent: str) -> None:
        self._tracing = tracing
        self._span = span
        self.traceparent = traceparent

    @property
    def trace_id(self) -> str:
        """32 hex digits; "" without tracing."""
        return self.traceparent.split("-")[1] if self._span is not None and self.traceparent else ""

    def set(self, **attributes: Value) -> None:
        """Names with `__` stand for dots: `gen_ai__request__id`."""
        if self._span is not None:
            self._span.set_attributes({name.replace("__", "."): value for name, value in attributes.items()})

    def child(self, name: str, started_s: float | None = None, **attributes: Value) -> Span:
        """`started_s`: `time.monotonic` seconds; None: now."""
        return self if self._span is None else self._tracing.start(name, self.traceparent, started_s, **attributes)

    def phase(self, name: str, started_s: float, ended_s: float, **attributes: Value) -> None:
        """A child that is over: from `started_s` to `ended_s`."""
        if self._span is not None:
            self.child(name, started_s, **attributes).end(ended_s)

    def end(self, ended_s: float | None = None, error: BaseException | str | None = None) -> None:
        if self._span is None:
            return
        if error is not None:
            from opentelemetry.trace import Status, StatusCode

            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end(_wall_ns(ended_s))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(error=exc)


class Tracing:
    """What starts spans in this process. `Tracing()` is off."""

    def __init__(self, tracer: Tracer | None = None, flush: Callable[[], object] = lambda: None) -> None:
        self._tracer = tracer
        self.flush = flush
        """Hands what has ended to the collector; for the end of the process."""

    @property
    def is_on(self) -> bool:
        return self._tracer is not None

    def start(self, name: str, traceparent: str = "", started_s: float | None = None, **attributes: Value) -> Span:
        """`traceparent`: of the span that this one belongs to; "" (or nonsense) begins a trace."""
        if self._tracer is None:
            return Span(self, None, traceparent)
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        propagator, carrier = TraceContextTextMapPropagator(), dict[str, str]()
        parent = propagator.extract({"traceparent": traceparent})
        begun = self._tracer.start_span(name, parent, start_time=_wall_ns(started_s))
        from opentelemetry.trace import set_span_in_context

        propagator.inject(carrier, set_span_in_context(begun))
        span = Span(self, begun, carrier.get("traceparent", ""))
        span.set(**attributes)
        return span


NO_SPAN = Tracing().start("")


def open_tracing(endpoint: str | None, service: str) -> Tracing:
    """`endpoint`: of an OTLP collector (gRPC), or `file:PATH` for one JSON line per span; None: off.

    Sampling and batching follow OpenTelemetry's own environment variables. Raises ConfigError without the packages.
    """
    if not endpoint:
        return Tracing()
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(endpoint)
    except ImportError as exc:
        raise ConfigError(f"otlp-traces-endpoint needs {exc.name}: pip install 'kvferry[otel]'") from exc
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracing(provider.get_tracer("kvferry"), provider.force_flush)


def _exporter(endpoint: str) -> SpanExporter:
    if endpoint.startswith("file:"):
        return _file_exporter(Path(endpoint.removeprefix("file:").removeprefix("//")))
    if not endpoint.startswith(("http://", "https://", "grpc://")):
        raise ConfigError(f"otlp-traces-endpoint {endpoint!r}: expected http://HOST:4317, https://… or file:PATH")
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))


def _file_exporter(path: Path) -> SpanExporter:
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class FileExporter(SpanExporter):
        def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
            lines = "".join(json.dumps(_as_dict(span)) + "\n" for span in spans)
            with path.open("a") as out:
                out.write(lines)
            return SpanExportResult.SUCCESS

    try:
        path.open("a").close()
    except OSError as exc:
        raise ConfigError(f"otlp-traces-endpoint file:{path}: {exc.strerror}") from exc
    return FileExporter()


def _as_dict(span: ReadableSpan) -> dict[str, object]:
    context = span.get_span_context()
    assert context is not None
    return {
        "name": span.name,
        "service": span.resource.attributes.get("service.name"),
        "trace_id": f"{context.trace_id:032x}",
        "span_id": f"{context.span_id:016x}",
        "parent_id": f"{span.parent.span_id:016x}" if span.parent else None,
        "start_ns": span.start_time,
        "end_ns": span.end_time,
        "attributes": dict(span.attributes or {}),
        "error": None if span.status.is_ok or span.status.is_unset else span.status.description,
    }


def _wall_ns(monotonic_s: float | None) -> int:
    now = time.time_ns()
    return now if monotonic_s is None else now - time.monotonic_ns() + round(1e9 * monotonic_s)
