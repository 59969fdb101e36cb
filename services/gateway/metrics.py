"""The gateway's metrics. Names follow vLLM's with our prefix, so that boards port by search and replace."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, values
from prometheus_client.multiprocess import MultiProcessCollector

from kvferry.common.errors import Draining, NodeLost, Unavailable
from kvferry.common.requests import FinishReason, RequestOutput, RequestTimes, SamplingParams
from kvferry.services.gateway.breaker import BreakerView
from kvferry.services.gateway.plan import RouteKind
from kvferry.services.gateway.token_totals import CountedHistogram, TokenTotals

# Up to CPU minutes: a first token may take a 1,500-token prompt's seconds behind a queue.
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_LENGTH_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)

_COUNT_BUCKETS = (0, *_LENGTH_BUCKETS)
_N_BUCKETS = (1, 2, 5, 10, 20)

_ERROR_BUCKETS = tuple(sorted({0, *(sign * s for s in (0.05, *_REQUEST_BUCKETS[3:16]) for sign in (-1, 1))}))

_Mode = Literal["livesum", "livemin", "livemax"]


def go_on_counting(worker_number: int) -> None:
    """Where processes share prometheus_client's folder, counts on in the files of the last worker of this number, which
    must have ended. So there are as many files as workers, however often they die. Before any metric is made."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        values.ValueClass = values.MultiProcessValue(lambda: worker_number)  # type: ignore[no-untyped-call]


def exposition(registry: CollectorRegistry) -> bytes:
    """What `/metrics` says: of `registry`, or summed over all processes that share prometheus_client's folder."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
    return generate_latest(registry)


class GatewayMetrics:
    """Built once by the composition root around its own registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"kvferry:{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, mode: _Mode, labels: tuple[str, ...] = ()) -> Gauge:
            """`mode`: what becomes of the values of several worker processes that live."""
            return Gauge(f"kvferry:{name}", text, labels, registry=registry, multiprocess_mode=mode)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"kvferry:{name}", text, buckets=buckets, registry=registry)

        self.running = gauge("num_requests_running", "choices without an end yet", "livesum")
        self.waiting = gauge("num_requests_waiting", "of those: choices without a first token yet", "livesum")
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
        self._decode = histogram(
            "request_decode_time_seconds", "first to last token of a finished choice", _REQUEST_BUCKETS
        )
        self._inference = histogram(
            "request_inference_time_seconds",
            "finished choice: prefill, transfer, first step and decode, all but queues",
            _REQUEST_BUCKETS,
        )
        self._per_token = histogram(
            "request_time_per_output_token_seconds",
            "finished choice: decode time per token behind the first",
            _TOKEN_BUCKETS,
        )
        self._prompt_length = histogram("request_prompt_tokens", "tokens of a prompt", _LENGTH_BUCKETS)
        self._generation_length = histogram("request_generation_tokens", "tokens of a finished choice", _LENGTH_BUCKETS)
        self._params_n = histogram("request_params_n", "choices asked for, per prompt", _N_BUCKETS)
        self._params_max_tokens = histogram(
            "request_params_max_tokens", "most tokens that a choice may have, per prompt", _LENGTH_BUCKETS
        )
        self._computed_length = histogram(
            "request_prefill_kv_computed_tokens", "tokens of a prompt that some node computed for it", _COUNT_BUCKETS
        )
        self._prompt_tokens = counter("prompt_tokens", "prompt tokens accepted")
        self._cached_tokens = counter("prompt_tokens_cached", "prompt tokens found in a cache")
        self._by_source = counter(
            "prompt_tokens_by_source", "prompt tokens by where the decode node had them from", ("source",)
        )
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self._by_source.labels(source)
        self.tokens = TokenTotals(
            Counter("kvferry:generation_tokens", "tokens produced", registry=None),
            CountedHistogram(
                "kvferry:inter_token_latency_seconds",
                "gap between outputs of one choice",
                buckets=_TOKEN_BUCKETS,
                registry=None,
            ),
        )
        registry.register(self.tokens)
        self.index_up = gauge("index_up", "1 while the index answers, 0 while requests go on without", "livemin")
        self.index_lookups = counter("index_lookups", "prefix lookups answered")
        self.index_failures = counter(
            "index_lookup_failures", "lookups, and news for other gateways, failed or too late"
        )
        self.retries = counter("request_retries", "submissions repeated on another node before any token")
        self.resumes = counter("request_resumes", "prompts that went on elsewhere behind their tokens", ("reason",))
        for error in (NodeLost, Draining, Unavailable):
            self.resumes.labels(error.code)
        self.refused_late = counter("requests_refused_late", "HTTP requests refused by --max-ttft")
        self.breaker_opens = counter("breaker_opens", "times that a failing decode node was taken out for a while")
        self.breakers = gauge("breakers", "decode nodes by breaker, if not closed", "livemax", ("state",))
        self.note_breakers(())
        decisions = counter("route_decisions", "decisions by who is counted on for most of the prompt", ("kind",))
        self.route_decisions = {kind: decisions.labels(kind) for kind in get_args(RouteKind)}
        self.route_error = histogram(
            "route_ttft_error_seconds", "time from routing to the first token, less what was predicted", _ERROR_BUCKETS
        )
        self.aborted = counter("requests_aborted", "HTTP requests whose client left")
        self.stalled = counter("client_stalls", "HTTP requests whose client accepted nothing for too long")
        of_key = ("api_key_name",)
        self._key_requests = counter("api_key_requests", "generations admitted, by the key's name", of_key)
        self._key_refused = counter("api_key_requests_refused", "refused: a limit of the key was used up", of_key)
        self._key_prompt = counter("api_key_prompt_tokens", "prompt tokens by the key's name", of_key)
        self._key_generation = counter("api_key_generation_tokens", "tokens produced, by the key's name", of_key)
        self.errors = counter("request_errors", "admitted HTTP requests that ended in an error", ("code",))

    def note_breakers(self, breakers: Iterable[BreakerView]) -> None:
        states = [breaker.state for breaker in breakers]
        for state in ("open", "half_open"):
            self.breakers.labels(state).set(states.count(state))

    def key_known(self, name: str) -> None:
        """`name`: of a key that is configured, never what a stranger has sent."""
        for each in (self._key_requests, self._key_refused, self._key_prompt, self._key_generation):
            each.labels(name)

    def key_used(self, name: str, prompt_tokens: int, generation_tokens: int) -> None:
        """A request that the key's limits let in has ended, however."""
        self._key_requests.labels(name).inc()
        self._key_prompt.labels(name).inc(prompt_tokens)
        self._key_generation.labels(name).inc(generation_tokens)

    def key_refused(self, name: str) -> None:
        self._key_refused.labels(name).inc()

    def prompt_accepted(self, num_tokens: int, sampling: SamplingParams, n: int) -> None:
        self._prompt_tokens.inc(num_tokens)
        self._prompt_length.observe(num_tokens)
        self._params_n.observe(n)
        self._params_max_tokens.observe(sampling.max_tokens)

    def prompt_computed(self, num_tokens: int, first: RequestOutput) -> None:
        """`first`: the first output of a prompt of `num_tokens`."""
        self._cached_tokens.inc(first.cached_tokens)
        self._computed_length.observe(first.computed_tokens)
        self._by_source.labels("local_cache_hit").inc(first.local_cached_tokens)
        self._by_source.labels("external_kv_transfer").inc(first.received_tokens)
        elsewhere = first.local_cached_tokens + first.received_tokens
        self._by_source.labels("local_compute").inc(max(num_tokens - elsewhere, 0))

    def choice_finished(self, num_tokens: int, decode_s: float, times: RequestTimes) -> None:
        """A choice had its last token `decode_s` after its first; `times`: of its prompt."""
        self._generation_length.observe(num_tokens)
        self._decode.observe(decode_s)
        self._inference.observe(times.prefill_s + times.transfer_s + times.first_step_s + decode_s)
        if num_tokens > 1:
            self._per_token.observe(decode_s / (num_tokens - 1))

    def first_token_came(self, seconds: float, times: RequestTimes) -> None:
        self.first_token.observe(seconds)
        self._queue.observe(times.queue_s)
        self._prefill.observe(times.prefill_s)
        self._transfer.observe(times.transfer_s)
        self._step.observe(times.first_step_s)
