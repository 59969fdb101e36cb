"""What a node counts. Names follow vLLM's with our prefix; gauges are read from the engine when scraped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, Info
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from kvferry.common.config import EngineConfig, TransportName
from kvferry.common.errors import (
    BlockCorrupt,
    DeadlineExceeded,
    Internal,
    KvferryError,
    Overloaded,
    TransferFailed,
    Unavailable,
)
from kvferry.common.fail_points import FailPoints
from kvferry.common.fault_metrics import FaultCollector
from kvferry.common.nodes import LayoutCard, Link, NodeLoad
from kvferry.common.requests import FinishReason
from kvferry.services.engine.outputs import StepReport
from kvferry.services.transfer.base import PullResult

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class _LoadCollector(Collector):
    def __init__(self, load: Callable[[], NodeLoad]) -> None:
        self._load = load

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        load = self._load()
        a = load.accounts
        for name, text, value in (
            ("kvferry:num_requests_running", "Sequences in the running batch.", load.num_running),
            ("kvferry:num_requests_waiting", "Sequences that are not running yet.", load.num_waiting),
            ("kvferry:num_tokens_waiting", "Prompt tokens still to be computed.", load.num_waiting_tokens),
            (
                "kvferry:kv_cache_usage_perc",
                "Share of blocks not available at once.",
                1 - a.available / load.num_blocks,
            ),
            ("kvferry:kv_blocks_total", "Blocks in the pool.", load.num_blocks),
            ("kvferry:kv_blocks_accounted", "Sum of all accounts; always the pool.", a.total),
            ("kvferry:kv_blocks_shared", "Blocks that several sequences use.", load.num_shared_blocks),
            ("kvferry:leases_open", "Leases that peers hold on blocks here.", load.num_leases),
        ):
            yield GaugeMetricFamily(name, text, value=value)
        blocks = GaugeMetricFamily("kvferry:kv_blocks", "Blocks by account.", labels=["account"])
        for account in ("free", "cached", "sequence", "lease", "incoming"):
            blocks.add_metric([account], getattr(a, account))
        yield blocks


class _LinkCollector(Collector):
    def __init__(self, links: Callable[[], Iterable[Link]]) -> None:
        self._links = links

    def describe(self) -> Iterator[GaugeMetricFamily]:
        return iter(())

    def collect(self) -> Iterator[GaugeMetricFamily]:
        labels = ["peer", "address", "transport", "reason"]
        family = GaugeMetricFamily(
            "kvferry:transfer_link", "1 for each peer that blocks are pulled from.", labels=labels
        )
        for link in self._links():
            family.add_metric([link.instance_id, link.address, link.transport, link.reason], 1)
        yield family


def engine_info(card: LayoutCard, batch_invariant: bool) -> dict[str, str]:
    """Labels of `kvferry:engine_info`."""
    return {
        "batch_invariant": str(batch_invariant).lower(),
        "numerics_id": card.numerics_id,
        "weights": card.weights,
        "kv_cache_dtype": card.dtype,
        "block_size": str(card.block_size),
    }


def cache_config_info(config: EngineConfig, card: LayoutCard, num_blocks: int) -> dict[str, str]:
    """Labels of `kvferry:cache_config_info`; vLLM's names, wherever the blocks lie."""
    return {
        "block_size": str(card.block_size),
        "cache_dtype": card.dtype,
        "enable_prefix_caching": str(config.enable_prefix_caching),
        "gpu_memory_utilization": str(config.gpu_memory_utilization),
        "num_gpu_blocks": str(num_blocks),
        "block_bytes": str(card.block_bytes),
    }


class NodeMetrics:
    def __init__(
        self,
        load: Callable[[], NodeLoad],
        fail_points: FailPoints | None = None,
        links: Callable[[], Iterable[Link]] = tuple,
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_LoadCollector(load))
        self.registry.register(FaultCollector(fail_points or FailPoints()))
        self.registry.register(_LinkCollector(links))

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kvferry:{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"kvferry:{name}", text, labels, buckets=buckets, registry=self.registry)

        self.cache_config_info = Info("kvferry:cache_config", "The KV cache of this node.", registry=self.registry)
        self.engine_info = Info("kvferry:engine", "What this node computes with.", registry=self.registry)
        self.generation_tokens = counter("generation_tokens", "Tokens produced.")
        self.prompt_tokens = counter(
            "prompt_tokens_by_source", "Prompt tokens: computed here, found in the cache here, received.", "source"
        )
        self._cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up in the cache here.")
        self._cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache here.")
        self._external_queries = counter(
            "external_prefix_cache_queries", "Prompt tokens not in the cache here, which other nodes might give."
        )
        self._external_hits = counter("external_prefix_cache_hits", "Prompt tokens that other nodes gave.")
        self.preemptions = counter("num_preemptions", "Sequences that gave their blocks back to run again later.")
        self.copied_blocks = counter("kv_blocks_copied", "Half-filled blocks copied because a branch wrote into them.")
        self.requests = counter(
            "request_success", "Requests that left this node, by how they ended.", "finished_reason"
        )
        self.local_fallbacks = counter(
            "prefill_fallback",
            "Prompts computed on the decode node for want of a prefill node that could, not by the router's choice.",
            "cause",
        )
        self.transfer_bytes = counter("transfer_bytes", "Bytes pulled from peers, used or not.", "transport")
        self.transfer_blocks = counter("transfer_blocks", "Blocks pulled from peers, used or not.", "transport")
        self.transfer_failures = counter("transfer_failures", "Receives that did not complete, by error code.", "cause")
        self.transport_failures = counter(
            "transport_failures",
            "Pulls that a transport could not do, by error code: the next one took over, or the receive failed.",
            "transport",
            "cause",
        )
        self.cached_pulls = counter(
            "cached_pulls", "Pulls of blocks that a peer may have cached, by what became of them.", "outcome"
        )
        self.leases_revoked = counter("leases_revoked", "Leases of cached blocks that were needed here.")
        self.leases_expired = counter("leases_expired", "Leases that ran out without being renewed.")
        self.queue_seconds = histogram(
            "engine_queue_time_seconds", "From a request's arrival at this node to its first step.", _SECONDS
        )
        self.step_tokens = histogram(
            "iteration_tokens_total", "Tokens per engine step.", (1, 4, 16, 64, 256, 1024, 4096)
        )
        self.step_seconds = histogram("engine_step_seconds", "Seconds per engine step.", _SECONDS)
        self.transfer_seconds = histogram("transfer_seconds", "Seconds per pull.", _SECONDS, "transport")
        self.transfer_exposed = counter(
            "transfer_exposed_seconds", "Of the pulls' time and their confirmation: not hidden behind computing."
        )
        self.cancel_to_free = histogram(
            "cancel_to_free_seconds",
            "From a cancel to its blocks given back: after the running step, or after the last copy into them.",
            _SECONDS,
        )
        self._begin_at_zero()

    def _begin_at_zero(self) -> None:
        """Series that exist from the start: the first increment of one that does not is no rate."""
        for transport in get_args(TransportName):
            for labelled in (self.transfer_bytes, self.transfer_blocks, self.transfer_seconds):
                labelled.labels(transport)
            for failure in (Unavailable, TransferFailed, BlockCorrupt):
                self.transport_failures.labels(transport, failure.code)
        for source in ("local_compute", "local_cache_hit", "external_kv_transfer"):
            self.prompt_tokens.labels(source)
        for reason in FinishReason:
            self.requests.labels(reason.value)
        causes: list[type[KvferryError]] = [Unavailable, BlockCorrupt, Overloaded, DeadlineExceeded, Internal]
        for error in [*causes, *Unavailable.__subclasses__()]:
            self.transfer_failures.labels(error.code)
        for cause in ("all_candidates_failed", "no_candidate"):
            self.local_fallbacks.labels(cause)
        for outcome in ("moved", "failed", "computing_is_cheaper"):
            self.cached_pulls.labels(outcome)

    def note_prompt(self, num_computed: int, num_cached: int, num_received: int) -> None:
        """Where this node has the tokens of one prompt from."""
        self.prompt_tokens.labels("local_compute").inc(num_computed)
        self.prompt_tokens.labels("local_cache_hit").inc(num_cached)
        self.prompt_tokens.labels("external_kv_transfer").inc(num_received)
        self._cache_queries.inc(num_computed + num_cached + num_received)
        self._cache_hits.inc(num_cached)
        self._external_queries.inc(num_computed + num_received)
        self._external_hits.inc(num_received)

    def note_pull(self, pull: PullResult) -> None:
        self.transfer_bytes.labels(pull.transport).inc(pull.num_bytes)
        self.transfer_blocks.labels(pull.transport).inc(pull.num_blocks)
        self.transfer_seconds.labels(pull.transport).observe(pull.seconds)

    def note_transport_failure(self, transport: str, cause: str) -> None:
        self.transport_failures.labels(transport, cause).inc()

    def note_step(self, report: StepReport) -> None:
        stats = report.stats
        if stats.seconds:
            self.step_tokens.observe(stats.num_prompt_tokens + stats.num_decode_tokens)
            self.step_seconds.observe(stats.seconds)
        if stats.num_preemptions:
            self.preemptions.inc(stats.num_preemptions)
        if stats.num_copied_blocks:
            self.copied_blocks.inc(stats.num_copied_blocks)
        for seconds in report.cancel_to_free_s:
            self.cancel_to_free.observe(seconds)
        for first in (token.first for token in report.tokens):
            if first is not None:
                self.queue_seconds.observe(first.admitted_s - first.arrival_s)
        for blocks in report.blocks:
            if blocks.complete:
                self.queue_seconds.observe(blocks.admitted_s - blocks.arrival_s)
        if report.tokens:
            self.generation_tokens.inc(len(report.tokens))
