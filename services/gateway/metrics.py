"""The gateway's metrics. Names follow vLLM's with our prefix, so that boards port by search and replace."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from kvferry.common.errors import Draining, NodeLost, Unavailable
from kvferry.common.requests import FinishReason, RequestTimes

# Up to CPU minutes: a first token may take a 1,500-token prompt's seconds behind a queue.
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


class GatewayMetrics:
    """Built once by the composition root around its own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"kvferry:{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"kvferry:{name}", text, buckets=buckets, registry=registry)

        self.running = Gauge("kvferry:num_requests_running", "choices without an end yet", registry=registry)
        self._success = counter("request_success", "choices by how they ended", ("finished_reason",))
        self.finished = {reason: self._success.labels(reason.value) for reason in FinishReason}
        self.e2e = histogram("e2e_request_latency_seconds", "HTTP request received to answer ended", _REQUEST_BUCKETS)
        self.first_token = histogram(
            "time_to_first_token_seconds", "request received to its first token", _REQUEST_BUCKETS
        )
        self._queue = histogram("request_queue_time_seconds", "share of the first token: queues", _REQUEST_BUCKETS)
        self._prefill = histogram("request_prefill_time_seconds", "share of the first token: prompt", _REQUEST_BUCKETS)
        self._transfer = histogram(
            "request_transfer_time_seconds", "share of the first token: blocks", _REQUEST_BUCKETS
        )
        self._step = histogram(
            "request_first_step_time_seconds", "share of the first token: one step", _REQUEST_BUCKETS
        )
        self.inter_token = histogram("inter_token_latency_seconds", "gap between outputs of one choice", _TOKEN_BUCKETS)
        self.prompt_length = histogram("request_prompt_tokens", "tokens of a prompt", _LENGTH_BUCKETS)
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens accepted")
        self.cached_tokens = counter("prompt_tokens_cached", "prompt tokens found in a cache")
        self.generation_tokens = counter("generation_tokens", "tokens produced")
        self.index_up = Gauge(
            "kvferry:index_up", "1 while the index answers, 0 while requests go on without", registry=registry
        )
        self.index_lookups = counter("index_lookups", "prefix lookups answered")
        self.index_failures = counter("index_lookup_failures", "prefix lookups failed or too late")
        self.retries = counter("request_retries", "submissions repeated on another node before any token")
        self.resumes = counter("request_resumes", "prompts that went on elsewhere behind their tokens", ("reason",))
        for error in (NodeLost, Draining, Unavailable):
            self.resumes.labels(error.code)
        self.aborted = counter("requests_aborted", "HTTP requests whose client left")
        self.stalled = counter("client_stalls", "HTTP requests whose client accepted nothing for too long")
        self.errors = counter("request_errors", "admitted HTTP requests that ended in an error", ("code",))

    def first_token_came(self, seconds: float, times: RequestTimes) -> None:
        self.first_token.observe(seconds)
        self._queue.observe(times.queue_s)
        self._prefill.observe(times.prefill_s)
        self._transfer.observe(times.transfer_s)
        self._step.observe(times.first_step_s)
