"""The life of an engine node: listen, load, register, serve, drain, leave. Prefill and decode nodes share all of it.

The port is open from the first moment (alive); health says SERVING only once the model is loaded and the index knows
the node (ready). A lost index is retried for ever, and the node goes on serving those that know it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeVar

import grpc
import uvloop

from kvferry.common.config import Config
from kvferry.common.errors import ConfigError, KvferryError
from kvferry.common.fail_points import FailPoints
from kvferry.common.log import setup_logging
from kvferry.common.nodes import NodeLoad, NodeRecord, Role
from kvferry.common.stop_signals import stop_signals
from kvferry.common.tracing import open_tracing
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.engine.loop import EngineLoop
from kvferry.services.engine.outputs import StepReport
from kvferry.services.index.faulty import with_faults
from kvferry.services.index.open import open_index
from kvferry.services.node.address import advertised_host, default_node_id
from kvferry.services.node.context import LoadedNode, NodeContext, NodeService
from kvferry.services.node.engine_factory import BuiltEngine, build_engine
from kvferry.services.node.membership import Membership
from kvferry.services.node.metrics import NodeMetrics, cache_config_info, engine_info
from kvferry.services.node.metrics_server import serve_metrics
from kvferry.services.node.owner import sweep_leases
from kvferry.services.rpc.aio import Server, dialer
from kvferry.services.rpc.errors import to_status
from kvferry.services.rpc.tls import Tls
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.puller import Puller
from kvferry.services.transfer.server import BlocksServicer

log = logging.getLogger("kvferry.node")

LEASE_CHECK_S = 0.25
PROGRESS_CHECK_S = 0.5
_T = TypeVar("_T")
DRAIN_CHECK_S = 0.05


def run_node(config: Config, role: Role, make_service: Callable[[NodeContext], NodeService]) -> int:
    """Runs one node until SIGTERM or SIGINT and returns its exit code. Raises StartupError for the CLI to print."""
    setup_logging(config.cluster.log_level, config.cluster.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(config, role, make_service))


async def _run(config: Config, role: Role, make_service: Callable[[NodeContext], NodeService]) -> int:
    return await NodeRuntime(config, role, make_service).run()


class NodeRuntime(pb_grpc.NodeServicer):
    def __init__(self, config: Config, role: Role, make_service: Callable[[NodeContext], NodeService]) -> None:
        if config.cluster.redis_url is None:
            raise ConfigError("redis_url is not set: pass --redis-url, or use `kvferry up`, which brings a Redis along")
        node_id = config.node.node_id or default_node_id(role, config.node)
        self.config = config
        self._tls = Tls.of(config.cluster)
        fail_points = FailPoints(config.cluster.fail_points or "", config.cluster.fail_points_seed)
        self.context = NodeContext(config, role, node_id, secrets.token_hex(8), fail_points=fail_points)
        self.context.tracing = open_tracing(config.cluster.otlp_traces_endpoint, f"kvferry-{role}")
        self.service = make_service(self.context)
        self.blocks = BlocksServicer(self.context.instance_id, fail_points)
        index = with_faults(open_index(config.cluster.redis_url, config.cluster.namespace), fail_points)
        self.membership = Membership(index, config.node.heartbeat_s, config.node.node_ttl_s)
        self.metrics_address = ""
        self._host = ""  # that peers know us by
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._failure: BaseException | None = None

    async def run(self) -> int:
        """Returns 0 after a drain, 1 when the node had to end by itself."""
        node = self.config.node
        served = dict.fromkeys((self.service.service_name, "Prefill", "Blocks", "Node"))
        names = tuple(f"kvferry.v1.{name}" for name in served)
        server = Server(self._add_servicers, names, self._tls)
        async with AsyncExitStack() as stack:
            stack.enter_context(stop_signals(self._stop.set, signal.SIGTERM, signal.SIGINT))
            stack.push_async_callback(server.stop, 0.0)
            port = await server.start(node.node_host, node.node_port)
            self._host = await asyncio.to_thread(advertised_host, node, self.config.cluster.redis_url or "")
            self.context.address = f"{self._host}:{port}"
            await self._load(stack)
            tasks = [
                asyncio.create_task(work, name=name)
                for name, work in (
                    ("renew", self.membership.renew(self.record, self._held_names)),
                    ("publish", self.membership.publish_forever(self.context.instance_id)),
                    ("leases", self._expire_leases()),
                    ("progress", self._watch_progress(server)),
                )
            ]
            for task in tasks:
                task.add_done_callback(self._background_ended)
            await _first(self.membership.registered.wait(), self._stop.wait())
            if not self._stop.is_set():
                await server.set_serving(True)
                log.info(
                    "%s ready on %s, instance %s", self.context.node_id, self.context.address, self.context.instance_id
                )
            await self._stop.wait()
            await server.set_serving(False)
            await self._drain()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.membership.leave(self.context.instance_id)
            await self.service.aclose()
            await server.stop(1.0)
            self.context.require_loaded().leases.release_all()
            await asyncio.to_thread(self.context.tracing.flush)
        if self._failure is not None:
            log.error("%s ends: %s", self.context.node_id, self._failure)
        return int(self._failure is not None)

    def record(self) -> NodeRecord:
        """This node as the cluster sees it, with its load of this instant."""
        loaded = self.context.require_loaded()
        return NodeRecord(
            instance_id=self.context.instance_id,
            node_id=self.context.node_id,
            role=self.context.role,
            address=self.context.address,
            model=self.config.served_model,
            card=loaded.card,
            max_model_len=loaded.max_model_len,
            batch_invariant=loaded.batch_invariant,
            metrics_address=self.metrics_address,
            state=self.context.state,
            load=self._node_load(),
        )

    async def Stats(self, request: pb.StatsRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.StatsReply:  # noqa: N802
        try:
            record = replace(self.record(), links=tuple(self.context.require_loaded().puller.links))
            return pb.StatsReply(record_json=record.to_json())
        except KvferryError as exc:
            await context.abort(*to_status(exc))
            raise

    # ---- inside

    def _build(self) -> BuiltEngine:
        self.context.fail_points.pause("node.load")
        return build_engine(self.config, self.context.role, self.context.instance_id, self._report_from_engine)

    def _add_servicers(self, server: grpc.aio.Server) -> None:
        self.service.add_to(server)
        pb_grpc.add_BlocksServicer_to_server(self.blocks, server)
        pb_grpc.add_NodeServicer_to_server(self, server)

    async def _load(self, stack: AsyncExitStack) -> None:
        started = time.monotonic()
        node, instance_id = self.config.node, self.context.instance_id
        built = await _in_a_thread_of_its_own(self._build)
        stack.callback(built.segment.close)
        stack.callback(self.blocks.close)
        leases = LeaseTable(
            built.engine.pin,
            built.engine.unpin,
            lease_s=node.lease_s,
            max_pinned_blocks=int(node.max_leased_cache_share * built.engine.pool.num_blocks),
        )
        self.blocks.serve(built.card, built.segment, leases, node.transports)
        metrics = NodeMetrics(self._node_load, self.context.fail_points, lambda: puller.links)
        puller = Puller(
            built.card,
            instance_id,
            built.segment,
            node.transports,
            timeout_s=node.peer_timeout_s,
            dial=dialer(self._tls),
            fail_points=self.context.fail_points,
            on_pull=metrics.note_pull,
            on_failure=metrics.note_transport_failure,
        )
        cache = cache_config_info(self.config.engine, built.card, built.engine.pool.num_blocks)
        metrics.cache_config_info.info(cache)
        metrics.engine_info.info(engine_info(built.card, built.batch_invariant))
        self.context.loaded = LoadedNode(
            engine=built.engine,
            card=built.card,
            model_config=built.model_config,
            max_model_len=built.max_model_len,
            leases=leases,
            puller=puller,
            metrics=metrics,
            grammars=built.grammars,
            batch_invariant=built.batch_invariant,
        )
        on_idle = built.core_board.idle if built.core_board else None
        self._engine_loop = engine_loop = EngineLoop(built.engine, self._fail, self.context.fail_points, on_idle)
        engine_loop.start()
        stack.push_async_callback(engine_loop.stop)
        stack.push_async_callback(puller.aclose)
        self._serve_metrics(stack, metrics)
        log.info("model loaded in %.1f s", time.monotonic() - started)

    def _serve_metrics(self, stack: AsyncExitStack, metrics: NodeMetrics) -> None:
        node = self.config.node
        port, close = serve_metrics(metrics.registry, node.node_host, node.metrics_port)
        self.metrics_address = f"{self._host}:{port}"
        stack.callback(close)

    def _node_load(self) -> NodeLoad:
        loaded = self.context.require_loaded()
        bytes_per_s = round(loaded.puller.bandwidth.slowest)
        return replace(loaded.engine.load(), num_leases=loaded.leases.num_open, pull_bytes_per_s=bytes_per_s)

    def _held_names(self) -> list[bytes]:
        return self.context.require_loaded().engine.held_names()

    def _report_from_engine(self, report: StepReport) -> None:
        self._loop.call_soon_threadsafe(self._on_report, report)

    def _on_report(self, report: StepReport) -> None:
        self.context.require_loaded().metrics.note_step(report)
        self.membership.publish(report.changes)
        self.service.on_report(report)

    async def _expire_leases(self) -> None:
        loaded = self.context.require_loaded()
        while True:
            await asyncio.sleep(LEASE_CHECK_S)
            sweep_leases(loaded, self.service.on_lease_expired)

    async def _watch_progress(self, server: Server) -> None:
        """A stalled node says so in its record and its health, and is back by itself once the step has ended."""
        while True:
            await asyncio.sleep(PROGRESS_CHECK_S)
            stalled = self._engine_loop.step_s > self.config.node.stall_timeout
            if stalled == self.context.stalled:
                continue
            self.context.stalled = stalled
            if stalled:
                log.error("stalled: one engine step runs for over %.0f s", self.config.node.stall_timeout)
            else:
                log.warning("no longer stalled")
            await server.set_alive(not stalled)
            await server.set_serving(not stalled and self.membership.registered.is_set() and not self.context.draining)

    async def _drain(self) -> None:
        self.context.draining = True
        deadline = time.monotonic() + self.config.node.drain_s * (self._failure is None)
        while self.service.num_active and time.monotonic() < deadline:  # noqa: ASYNC110 (the count falls in callbacks)
            await asyncio.sleep(DRAIN_CHECK_S)
        if left := self.service.num_active:
            log.warning(
                "%d requests still run after %.0f s of draining: they end with an error", left, self.config.node.drain_s
            )

    def _background_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._fail(exc)

    def _fail(self, exc: BaseException) -> None:
        self._failure = self._failure or exc
        self._stop.set()


async def _in_a_thread_of_its_own(work: Callable[..., _T], *args: Any) -> _T:
    """Like `asyncio.to_thread`, but the thread ends.

    One that has computed keeps its OpenMP team for life, and once all teams of a process together have more threads
    than there are cores, none of them spins any more: every step would take twice as long.
    """
    with ThreadPoolExecutor(1) as executor:
        return await asyncio.get_running_loop().run_in_executor(executor, work, *args)


async def _first(*waits: Any) -> None:
    """Waits until one of the awaitables is done and cancels the others."""
    tasks = [asyncio.ensure_future(w) for w in waits]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
