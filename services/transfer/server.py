"""gRPC service `Blocks`, owner's side: the handshake, and the bytes of leased blocks. Reads the pool without locks."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import grpc
import numpy as np

from kvferry.common.errors import Internal, KvferryError, TransferFailed, Unavailable
from kvferry.common.fail_points import Action, FailPoints, copies, spoilt
from kvferry.common.nodes import LayoutCard
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.rpc.convert import card_from_pb, card_to_pb
from kvferry.services.rpc.errors import to_status
from kvferry.services.transfer.copier import Copier
from kvferry.services.transfer.grpc import block_checksum
from kvferry.services.transfer.heads import Stripe, stripe_of, view
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.ucx_owner import UcxOwner

log = logging.getLogger("kvferry.transfer")

_RUN_BYTES = 2**20

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _Served:
    card: LayoutCard
    segment: PoolSegment
    leases: LeaseTable
    offers: tuple[str, ...]


class BlocksServicer(pb_grpc.BlocksServicer):
    """Answers from the start of its server on, with Unavailable until `serve` says what there is to serve."""

    def __init__(self, instance_id: str, fail_points: FailPoints | None = None) -> None:
        self._instance_id = instance_id
        self._fail_points = fail_points or FailPoints()
        self._served: _Served | None = None
        self._copier = Copier("read")
        self._ucx: UcxOwner | None = None

    def serve(self, card: LayoutCard, segment: PoolSegment, leases: LeaseTable, transports: Sequence[str]) -> None:
        """`transports` are those allowed here, in order of preference. Raises ConfigError for `ucx` without ucxx.

        `shm` is offered only for a shared segment, `ucx` only while its listener is up.
        """
        if "ucx" in transports:
            self._ucx = _ucx_owner(self._instance_id, card, segment, leases, self._fail_points)
        missing = {name for name, has in (("shm", segment.path), ("ucx", self._ucx)) if has is None}
        offers = tuple(name for name in transports if name not in missing)
        self._served = _Served(card, segment, leases, offers)

    async def Handshake(self, request: pb.HandshakeRequest, context: Context) -> pb.HandshakeReply:  # noqa: N802
        try:
            served = self._require_served()
            served.card.check_compatible(card_from_pb(request.card), f"reader {request.instance_id}")
        except KvferryError as exc:
            await _abort(context, exc)
        segment = served.segment
        reply = pb.HandshakeReply(
            card=card_to_pb(served.card),
            instance_id=self._instance_id,
            num_blocks=segment.num_blocks,
            transports=served.offers,
        )
        if segment.path is not None and "shm" in served.offers:
            reply.shm.path = segment.path
            reply.shm.size_bytes = segment.size_bytes
            reply.shm.blocks_offset = segment.blocks_offset
            reply.shm.nonce = segment.nonce
        if self._ucx is not None:
            reply.ucx_port = self._ucx.port
        return reply

    async def Read(self, request: pb.ReadRequest, context: Context) -> AsyncIterator[pb.BlockData]:  # noqa: N802
        """The lease is checked before and after each run is read: a run that was sent is of leased blocks only."""
        try:
            served = self._require_served()
            block_ids = list(request.block_ids)
            served.leases.check(request.lease_id, block_ids)
            heads = range(request.first_kv_head, request.first_kv_head + request.num_kv_heads)
            stripe = stripe_of(served.card, heads, served.segment.block_bytes) if heads else None
            per_run = max(1, _RUN_BYTES // (stripe.num_bytes if stripe else served.segment.block_bytes))
            for start in range(0, len(block_ids), per_run):
                run = block_ids[start : start + per_run]
                served.leases.check(request.lease_id, run)
                data = await self._copier.run(partial(_read_run, served.segment, run, stripe))
                served.leases.check(request.lease_id, run)
                if self._fail_points.are_on:
                    async for message in _with_faults(self._fail_points, data):
                        yield message
                else:
                    yield data
        except KvferryError as exc:
            await _abort(context, exc)

    def close(self) -> None:
        """After its server has stopped. Idempotent."""
        self._copier.close()
        if self._ucx is not None:
            self._ucx.close()

    def _require_served(self) -> _Served:
        if self._served is None:
            raise Unavailable(f"{self._instance_id} is still loading")
        return self._served


def _ucx_owner(
    instance_id: str, card: LayoutCard, segment: PoolSegment, leases: LeaseTable, fail_points: FailPoints
) -> UcxOwner | None:
    try:
        return UcxOwner(instance_id, card, segment, leases, fail_points=fail_points)
    except TransferFailed as exc:
        log.warning("transport ucx is off: %s", exc.message)
        return None


def _read_run(
    segment: PoolSegment, block_ids: Sequence[int], stripe: Stripe | None, _stop: threading.Event
) -> pb.BlockData:
    blocks = view(segment.buffer, stripe)
    rows = [np.ascontiguousarray(blocks[block_id]) for block_id in block_ids]
    checksums = [block_checksum(row.data, block_id) for row, block_id in zip(rows, block_ids, strict=True)]
    return pb.BlockData(data=b"".join(row.data for row in rows), checksums=checksums)


async def _with_faults(fail_points: FailPoints, run: pb.BlockData) -> AsyncIterator[pb.BlockData]:
    """The run as often as it is to be sent, its bytes spoilt where that is due."""
    fault = fail_points.hit("transfer.grpc.chunk")
    if fault is not None and fault.action is Action.CORRUPT:
        run = pb.BlockData(data=spoilt(run.data), checksums=run.checksums)
    for _ in range(await copies(fault)):
        yield run


async def _abort(context: Context, error: KvferryError) -> NoReturn:
    await context.abort(*to_status(error))
    raise Internal("abort returned")
