"""The gateway's composition root: builds everything, wires it, runs until told to stop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

import kvferry
from kvferry.common.config import Config
from kvferry.common.errors import ConfigError, Draining, IndexUnavailable
from kvferry.common.fail_points import FailPoints
from kvferry.common.fault_metrics import FaultCollector
from kvferry.common.log import setup_logging
from kvferry.common.models import resolve_model
from kvferry.common.nodes import NodeState
from kvferry.common.tracing import open_tracing
from kvferry.services.gateway import errors, server
from kvferry.services.gateway.asgi import RequestIds
from kvferry.services.gateway.cluster import ClusterView
from kvferry.services.gateway.generation_config import GenerationConfig
from kvferry.services.gateway.guard import guard
from kvferry.services.gateway.http_tls import HttpTls
from kvferry.services.gateway.intake import Intake
from kvferry.services.gateway.lookup import PrefixLookup
from kvferry.services.gateway.metrics import GatewayMetrics, go_on_counting
from kvferry.services.gateway.nodes import POLL_S, NodeTable
from kvferry.services.gateway.routes import Routes
from kvferry.services.gateway.serving import Service
from kvferry.services.gateway.sessions import SessionPool
from kvferry.services.gateway.shared_usage import SharedUsage
from kvferry.services.gateway.tokenizer import Tokenizer
from kvferry.services.gateway.tools import tool_form_of
from kvferry.services.index.base import PrefixIndex
from kvferry.services.index.faulty import with_faults
from kvferry.services.index.open import open_index
from kvferry.services.rpc.aio import dialer
from kvferry.services.rpc.tls import Tls

log = logging.getLogger("kvferry.gateway")


class Gateway:
    """Everything that lives as long as the process. `app` is what serves it; tests enter `running` themselves."""

    def __init__(
        self,
        config: Config,
        index: PrefixIndex,
        tokenizer: Tokenizer,
        registry: CollectorRegistry | None = None,
        defaults: GenerationConfig | None = None,
    ) -> None:
        self.metrics = GatewayMetrics(registry or CollectorRegistry())
        fail_points = FailPoints(config.cluster.fail_points or "", config.cluster.fail_points_seed)
        self.metrics.registry.register(FaultCollector(fail_points))
        index = with_faults(index, fail_points)
        self.table = NodeTable(index, config.served_model)
        self.pool = SessionPool(
            config.node.peer_timeout_s, dial=dialer(Tls.of(config.cluster)), fail_points=fail_points
        )
        self.pool.breakers.on_open = self.metrics.breaker_opens.inc
        self.service = Service(
            tokenizer,
            self.table,
            PrefixLookup(index, config.gateway.index_timeout_s, self.metrics),
            self.pool,
            self.metrics,
            queue_timeout_s=config.gateway.queue_timeout,
            max_num_requests=config.gateway.max_num_requests,
            max_resumptions=config.gateway.max_resumptions,
            resume_timeout_s=config.gateway.resume_timeout,
            max_ttft_s=config.gateway.max_ttft,
            stream_delay_weight=config.gateway.stream_delay_weight,
            tracing=open_tracing(config.cluster.otlp_traces_endpoint, "kvferry-gateway"),
        )
        self.app = FastAPI(
            title="kvferry", version=kvferry.__version__, openapi_url=None, lifespan=lambda app: self.running()
        )
        self.usage = SharedUsage.of(config)
        guard(self.app, config.gateway, self.usage, self.metrics)
        self.app.add_middleware(RequestIds)
        errors.install(self.app)
        tool_form = tool_form_of(config.gateway.tool_call_parser, tokenizer.chat_template)
        intake = Intake(tokenizer, self.table, config.served_model, defaults, tool_form)
        self.view = ClusterView(self.service, config.served_model, kvferry.__version__, config.gateway.workers)
        self.admin_app: FastAPI | None = None
        if config.gateway.admin_port is not None:
            self.admin_app = FastAPI(title="kvferry admin", version=kvferry.__version__)
            guard(self.admin_app, config.gateway, self.usage, self.metrics)
            self.admin_app.add_middleware(RequestIds)
            errors.install(self.admin_app)
        routes = Routes(config.gateway, config.served_model, intake, self.service, self.view)
        routes.install(self.app, self.admin_app)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What works in the background: the node table is kept fresh, the index told, sessions live in the pool."""
        await self._look()
        async with self.pool:
            works = self._watch_nodes(), self.service.lookup.tell(), self.usage.renew()
            beside = [asyncio.create_task(work) for work in works]
            try:
                yield
            finally:
                for task in beside:
                    task.cancel()
                await asyncio.gather(*beside, return_exceptions=True)
                await self.view.close()
                await self.usage.aclose()
                await asyncio.to_thread(self.service.tracing.flush)

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self._look()
            except Exception:  # a bug in an index must not freeze the node table
                log.exception("cannot read the node table")

    async def _look(self) -> None:
        await self.table.refresh()
        self.service.table_is_fresh()
        self.view.note_nodes()
        self.pool.give_up(node.instance_id for node in self.table.nodes if node.state is NodeState.STALLED)
        self.metrics.index_up.set(self.table.index_ok)
        self.pool.forget_all_but(node.instance_id for node in self.table.nodes)
        self.metrics.note_breakers(self.pool.breakers.views().values())
        self.metrics.tokens.flush()

    def drain(self) -> None:
        """No new requests. Discovery goes on until the last one has ended."""
        self.service.draining = True

    def end_grace(self) -> None:
        self.service.fail_all(Draining("the gateway is shutting down"))


def main(config: Config) -> int:
    """Runs the gateway until SIGTERM or SIGINT and returns its exit code. Raises StartupError for the CLI to print."""
    setup_logging(config.cluster.log_level, config.cluster.log_format)
    for name in ("uvicorn", "asyncio"):  # their warnings in our format
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = logging.getLogger("kvferry").handlers, False
        logger.setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(config))
    return 0


async def serve(config: Config) -> None:
    """The gateway on its port, which is bound before anything slow is done."""
    if config.cluster.redis_url is None:
        raise ConfigError("redis_url is not set: pass --redis-url, or use `kvferry up`, which brings a Redis along")
    go_on_counting(config.gateway.worker_number)
    tls = HttpTls.of(config.gateway)
    listeners = server.open_listeners(config.gateway)
    try:
        folder = await asyncio.to_thread(resolve_model, config.cluster.model, weights=False)
        tokenizer = await asyncio.to_thread(Tokenizer.load, folder)
        defaults = GenerationConfig.load(folder) if config.gateway.generation_config == "auto" else None
        index = open_index(config.cluster.redis_url, config.cluster.namespace)
        try:
            await _check_reachable(index, config.cluster.redis_url)
            gateway = Gateway(config, index, tokenizer, defaults=defaults)
            host, port = listeners[0].getsockname()[:2]
            await server.serve(
                gateway.app,
                listeners[0],
                drain_s=config.node.drain_s,
                tls=tls,
                on_ready=lambda: log.info("gateway ready on http%s://%s:%d", "s" if tls else "", host, port),
                on_drain=gateway.drain,
                on_grace_over=gateway.end_grace,
                admin=(gateway.admin_app, listeners[1]) if gateway.admin_app is not None else None,
            )
            log.info("gateway stopped")
        finally:
            await index.aclose()
    finally:
        for listener in listeners:
            listener.close()


async def _check_reachable(index: PrefixIndex, url: str) -> None:
    try:
        await index.nodes()
    except IndexUnavailable as exc:
        raise ConfigError(f"the index at {url} does not answer: {exc.message}", param="redis_url") from exc
