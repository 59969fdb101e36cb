"""The owner's side of hand-overs, on every node: one stream for each reader, from `start` to `release`.

A node of any role offers what it has in its cache. The end of the stream, however it comes, ends the lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc

from kvferry.common.errors import Draining, KvferryError, LeaseExpired, TransferFailed, Unavailable
from kvferry.common.fail_points import Action, copies
from kvferry.common.hashing import block_names, root_name
from kvferry.common.log import log_fields
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.engine.outputs import BlocksOutput, FailedOutput
from kvferry.services.node.context import LoadedNode, NodeContext
from kvferry.services.rpc.convert import card_from_pb
from kvferry.services.rpc.errors import detail_to_pb
from kvferry.services.transfer.protocol import Offer, OwnerSide

log = logging.getLogger("kvferry.node")

Stream = grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillReply]
Event = pb.PrefillRequest | BlocksOutput | FailedOutput | KvferryError | None
"""What happens to a run: a message of the reader, progress of the engine, an error, or None: the reader is gone."""


class OwnerRun:
    """Blocks of one prompt for one reader. Those of `offer` are there from the start, and then there are no others."""

    def __init__(self, node: NodeContext, side: OwnerSide, num_blocks: int, offer: Offer | None = None) -> None:
        self.side = side
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._node = node
        self._num_blocks = num_blocks
        self._offer = offer
        self._num_replies = 0

    async def serve(self, context: Stream) -> None:
        """Returns when the reader has released the lease or is gone; raises what ends the run otherwise."""
        accepted = pb.PrefillAccepted(
            lease_id=self.side.lease_id, instance_id=self._node.instance_id, num_blocks=self._num_blocks
        )
        await self._write(context, pb.PrefillReply(accepted=accepted))
        if self._offer is not None:
            await self._write_offer(context, self._offer)
            cached = self._num_blocks * self._node.require_loaded().card.block_size
            await self._write(context, pb.PrefillReply(computed=pb.PrefillComputed(cached_tokens=cached)))
        while (event := await self.events.get()) is not None:
            if isinstance(event, KvferryError):
                raise event
            if isinstance(event, BlocksOutput | FailedOutput):
                await self._on_output(context, event)
            elif event.HasField("renew"):
                self.side.renew()
                renewed = pb.LeaseRenewed(num_replies=self._num_replies)
                await self._write(context, pb.PrefillReply(renewed=renewed))
            elif event.HasField("release"):
                released = pb.LeaseReleased(valid=self.side.release())
                await self._write(context, pb.PrefillReply(released=released))
                return

    def end(self) -> None:
        """Gives everything back, at whatever stage."""
        self.side.end()

    async def _on_output(self, context: Stream, output: BlocksOutput | FailedOutput) -> None:
        """Progress of an engine that computes for this run."""

    async def _write_offer(self, context: Stream, offer: Offer) -> None:
        filled = pb.BlocksFilled(first=offer.first, block_ids=offer.block_ids)
        await self._write(context, pb.PrefillReply(filled=filled))

    async def _write(self, context: Stream, reply: pb.PrefillReply) -> None:
        point = "transfer.lease.released" if reply.HasField("released") else "rpc.prefill.reply"
        self._num_replies += 1
        fault = self._node.fail_points.hit(point)
        if fault is not None and fault.action is Action.CORRUPT:
            reply = _garbled(reply)
        for _ in range(await copies(fault)):
            await context.write(reply)


class BlockOwner(pb_grpc.PrefillServicer):
    """What every node serves: blocks that are in its cache. `PrefillService` adds the computing."""

    def __init__(self, context: NodeContext) -> None:
        self._node = context
        self._runs: dict[str, OwnerRun] = {}  # by lease id

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_PrefillServicer_to_server(self, server)

    @property
    def num_active(self) -> int:
        return len(self._runs)

    def on_lease_expired(self, lease_id: str) -> None:
        if (run := self._runs.get(lease_id)) is not None:
            run.events.put_nowait(LeaseExpired("the lease was not renewed in time, or its blocks were needed here"))

    async def aclose(self) -> None:
        for run in self._runs.values():
            run.events.put_nowait(Draining(f"{self._node.node_id} has shut down"))

    async def Run(self, _requests: Any, context: Stream) -> None:  # noqa: N802
        request = await context.read()
        if not isinstance(request, pb.PrefillRequest) or not request.HasField("start"):
            error = TransferFailed("the first message of Prefill.Run must be `start`")
            await context.write(pb.PrefillReply(error=detail_to_pb(error)))
            return
        start = request.start
        with log_fields(request_id=start.http_request_id or start.request_id, prompt_id=start.request_id):
            await self._run(start, context)

    async def _run(self, start: pb.PrefillStart, context: Stream) -> None:
        try:
            loaded = self._node.require_open()
            loaded.card.check_compatible(card_from_pb(start.card), "the reader")
            open_run = self._open_cached if start.cached_only else self._open_prompt
            run = open_run(loaded, start)
        except KvferryError as exc:
            await context.write(pb.PrefillReply(error=detail_to_pb(exc)))
            return
        self._runs[run.side.lease_id] = run
        reader = asyncio.create_task(_pump(context, run.events))
        try:
            await run.serve(context)
        except KvferryError as exc:
            await context.write(pb.PrefillReply(error=detail_to_pb(exc)))
        finally:
            del self._runs[run.side.lease_id]
            run.end()
            reader.cancel()

    def _open_cached(self, loaded: LoadedNode, start: pb.PrefillStart) -> OwnerRun:
        """Pins what is there, from the first block on; maybe nothing. Raises Overloaded where it is too much."""
        card, tokens = loaded.card, list(start.prompt_token_ids)
        root = root_name(card.model_fingerprint, card.numerics_id, start.cache_salt)
        block_ids = loaded.engine.pin_cached(block_names(root, tokens, card.block_size))
        try:
            side = OwnerSide(loaded.leases, start.request_id, start.first_block, for_cached=True)
            try:
                offer = side.filled(block_ids, complete=True)
            except KvferryError:
                side.end()
                raise
        finally:
            loaded.engine.unpin(block_ids)
        return OwnerRun(self._node, side, len(block_ids), offer)

    def _open_prompt(self, loaded: LoadedNode, start: pb.PrefillStart) -> OwnerRun:
        raise Unavailable(f"{self._node.node_id} computes no prompts for other nodes")


def _garbled(reply: pb.PrefillReply) -> pb.PrefillReply:
    """With another content, of the kind that its reader can tell: it believes nothing that it can check."""
    if reply.HasField("accepted"):
        return pb.PrefillReply(accepted=pb.PrefillAccepted(lease_id=reply.accepted.lease_id, instance_id="garbled"))
    if reply.HasField("renewed"):
        return pb.PrefillReply(renewed=pb.LeaseRenewed(num_replies=reply.renewed.num_replies + 1))
    return pb.PrefillReply(filled=pb.BlocksFilled(first=reply.filled.first + 2**20, block_ids=reply.filled.block_ids))


def sweep_leases(loaded: LoadedNode, on_ended: Callable[[str], None]) -> None:
    """Ends leases that have run out, and those of cached blocks while a request waits for blocks; each by its id."""
    for lease_id in loaded.leases.expire_due():
        log.warning("lease %s expired: its reader did not renew it", lease_id[:8])
        loaded.metrics.leases_expired.inc()
        on_ended(lease_id)
    if loaded.engine.leases_block_admission():
        for lease_id in loaded.leases.revoke_cached():
            log.info("lease %s revoked: a request waits for blocks", lease_id[:8])
            loaded.metrics.leases_revoked.inc()
            on_ended(lease_id)


async def _pump(context: Stream, events: asyncio.Queue[Event]) -> None:
    """Turns the reader's messages into events; the last one is None."""
    try:
        while isinstance(request := await context.read(), pb.PrefillRequest):
            events.put_nowait(request)
    finally:
        events.put_nowait(None)
