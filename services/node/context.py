"""What a node's service works with, and what the runtime expects of a service. Nothing here reaches for globals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import grpc

from kvferry.common.config import Config
from kvferry.common.errors import Draining, Unavailable
from kvferry.common.fail_points import FailPoints
from kvferry.common.nodes import LayoutCard, NodeState, Role
from kvferry.common.tracing import Tracing
from kvferry.services.engine.engine import Engine
from kvferry.services.engine.grammar import Grammars
from kvferry.services.engine.model_config import ModelConfig
from kvferry.services.engine.outputs import StepReport
from kvferry.services.node.metrics import NodeMetrics
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.puller import Puller


@dataclass(frozen=True, slots=True)
class LoadedNode:
    """What exists only once the model is loaded."""

    engine: Engine
    card: LayoutCard
    model_config: ModelConfig
    max_model_len: int
    leases: LeaseTable
    puller: Puller
    metrics: NodeMetrics
    grammars: Grammars
    batch_invariant: bool


@dataclass(slots=True)
class NodeContext:
    config: Config
    role: Role
    node_id: str
    instance_id: str
    address: str = ""  # that peers reach this node by, once it listens
    draining: bool = False
    stalled: bool = False
    tracing: Tracing = field(default_factory=Tracing)
    fail_points: FailPoints = field(default_factory=FailPoints)
    loaded: LoadedNode | None = None

    @property
    def state(self) -> NodeState:
        if self.draining:
            return NodeState.DRAINING
        return NodeState.STALLED if self.stalled else NodeState.READY

    def require_loaded(self) -> LoadedNode:
        """Raises Unavailable while the model loads."""
        if self.loaded is None:
            raise Unavailable(f"{self.node_id} is still loading its model")
        return self.loaded

    def require_open(self) -> LoadedNode:
        """Raises Unavailable while the model loads, Draining when no new work is taken."""
        if self.draining:
            raise Draining(f"{self.node_id} is draining and takes no new requests")
        return self.require_loaded()


class NodeService(Protocol):
    """How work enters and leaves a node: `PrefillService`, `DecodeService`. Everything runs in the event loop."""

    service_name: str

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the gRPC servicer."""

    def on_report(self, report: StepReport) -> None:
        """Takes what one engine step produced."""

    def on_lease_expired(self, lease_id: str) -> None:
        """A lease given by this node ran out; its blocks are unpinned already."""

    @property
    def num_active(self) -> int:
        """Requests that a drain must wait for."""

    async def aclose(self) -> None:
        """Ends what still runs: each request gets its one terminal event. The server's grace period lets them out."""
