"""The prefill service: computes prompts, offers their blocks under a lease while it goes on computing. Never samples.

A prompt enters as a compute-only sequence and leaves block by block: each completed run of blocks is pinned under the
lease of its reader and reported. The end of the stream, however it comes, ends the lease and the computing.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from typing import Any

import grpc

from kvferry.common.config import Config
from kvferry.common.errors import BadRequest, Draining, KvferryError, LeaseExpired, TransferFailed
from kvferry.common.hashing import root_name
from kvferry.common.nodes import Role
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.engine.outputs import BlocksOutput, FailedOutput, StepReport
from kvferry.services.engine.sequence import Sequence
from kvferry.services.node.context import LoadedNode, NodeContext
from kvferry.services.node.runtime import run_node
from kvferry.services.rpc.convert import card_from_pb
from kvferry.services.rpc.errors import detail_to_pb
from kvferry.services.transfer.protocol import OwnerSide, OwnerState

log = logging.getLogger("kvferry.prefill")

Stream = grpc.aio.ServicerContext[pb.PrefillRequest, pb.PrefillReply]
Event = pb.PrefillRequest | BlocksOutput | FailedOutput | KvferryError | None
"""What happens to a run: a message of the reader, progress of the engine, an error, or None: the reader is gone."""


def main(config: Config) -> int:
    return run_node(config, Role.PREFILL, PrefillService)


class PrefillService(pb_grpc.PrefillServicer):
    service_name = "Prefill"

    def __init__(self, context: NodeContext) -> None:
        self._node = context
        self._runs: dict[str, _Run] = {}
        self._by_lease: dict[str, _Run] = {}
        self._serial = itertools.count()

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_PrefillServicer_to_server(self, server)

    @property
    def num_active(self) -> int:
        return len(self._runs)

    def on_report(self, report: StepReport) -> None:
        outputs: list[BlocksOutput | FailedOutput] = [*report.blocks, *report.failed]
        for output in outputs:
            if (run := self._runs.get(output.key)) is not None:
                run.events.put_nowait(output)

    def on_lease_expired(self, lease_id: str) -> None:
        if (run := self._by_lease.get(lease_id)) is not None:
            run.events.put_nowait(LeaseExpired(f"the lease of {run.seq.key} expired: its reader did not renew it"))

    async def aclose(self) -> None:
        for run in self._runs.values():
            run.events.put_nowait(Draining(f"{self._node.node_id} has shut down"))

    async def Run(self, _requests: Any, context: Stream) -> None:  # noqa: N802
        try:
            request = await context.read()
            if not isinstance(request, pb.PrefillRequest) or not request.HasField("start"):
                raise TransferFailed("the first message of Prefill.Run must be `start`")
            run = self._open(self._node.require_open(), request.start)
        except KvferryError as exc:
            await context.write(pb.PrefillReply(error=detail_to_pb(exc)))
            return
        reader = asyncio.create_task(_pump(context, run.events))
        try:
            await run.serve(context)
        except KvferryError as exc:
            await context.write(pb.PrefillReply(error=detail_to_pb(exc)))
        finally:
            del self._runs[run.seq.key], self._by_lease[run.side.lease_id]
            run.end()
            reader.cancel()

    def _open(self, loaded: LoadedNode, start: pb.PrefillStart) -> _Run:
        loaded.card.check_compatible(card_from_pb(start.card), "the decode node")
        size = loaded.card.block_size
        num_blocks = (len(start.prompt_token_ids) - 1) // size
        if num_blocks <= start.first_block:
            raise TransferFailed(
                f"nothing to prefill: {len(start.prompt_token_ids)} prompt tokens have {num_blocks} full blocks of "
                f"{size} before the last one, the reader holds {start.first_block}"
            )
        if max(start.prompt_token_ids) >= loaded.model_config.vocab_size:
            raise BadRequest(f"token id {max(start.prompt_token_ids)} is outside the vocabulary", param="prompt")
        tokens = list(start.prompt_token_ids[: num_blocks * size])
        seq = Sequence(
            key=f"{start.request_id}#{next(self._serial)}",
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            root=root_name(loaded.card.model_fingerprint, loaded.card.numerics_id, start.cache_salt),
            block_size=size,
            sampling=None,
            priority=start.priority if self._node.config.engine.scheduling_policy == "priority" else 0,
        )
        loaded.engine.submit(seq)
        run = _Run(loaded, self._node, seq, OwnerSide(loaded.leases, start.request_id, start.first_block))
        self._runs[seq.key] = self._by_lease[run.side.lease_id] = run
        return run


class _Run:
    """One prompt being computed for one reader."""

    def __init__(self, loaded: LoadedNode, node: NodeContext, seq: Sequence, side: OwnerSide) -> None:
        self.seq = seq
        self.side = side
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loaded = loaded
        self._node = node
        self._num_replies = 0

    async def serve(self, context: Stream) -> None:
        """Returns when the reader has released the lease or is gone; raises what ends the run otherwise."""
        accepted = pb.PrefillAccepted(
            lease_id=self.side.lease_id,
            instance_id=self._node.instance_id,
            num_blocks=len(self.seq.token_ids) // self.seq.block_size,
        )
        await self._write(context, pb.PrefillReply(accepted=accepted))
        while (event := await self.events.get()) is not None:
            if isinstance(event, KvferryError):
                raise event
            if isinstance(event, FailedOutput):
                raise event.error
            if isinstance(event, BlocksOutput):
                await self._offer(context, event)
            elif event.HasField("renew"):
                self.side.renew()
                renewed = pb.LeaseRenewed(num_replies=self._num_replies)
                await self._write(context, pb.PrefillReply(renewed=renewed))
            elif event.HasField("release"):
                released = pb.LeaseReleased(valid=self.side.release())
                await self._write(context, pb.PrefillReply(released=released))
                return

    def end(self) -> None:
        """Gives everything back, at whatever stage. The engine frees blocks of a running step right after it."""
        done = self.side.state in (OwnerState.COMPUTED, OwnerState.RELEASED)
        self.side.end()
        self._loaded.engine.close(self.seq.key)
        self._loaded.metrics.requests.labels("stop" if done else "abort").inc()

    async def _offer(self, context: Stream, blocks: BlocksOutput) -> None:
        if (offer := self.side.filled(blocks.block_ids, complete=blocks.complete)) is not None:
            filled = pb.BlocksFilled(first=offer.first, block_ids=offer.block_ids)
            await self._write(context, pb.PrefillReply(filled=filled))
        if blocks.complete:
            self._loaded.engine.close(self.seq.key)
            await self._write(context, pb.PrefillReply(computed=self._computed(blocks)))

    async def _write(self, context: Stream, reply: pb.PrefillReply) -> None:
        point = "transfer.lease.released" if reply.HasField("released") else "rpc.prefill.reply"
        self._num_replies += 1
        for _ in range(await self._node.fail_points.copies(point)):
            await context.write(reply)

    def _computed(self, blocks: BlocksOutput) -> pb.PrefillComputed:
        computed = len(self.seq.token_ids) - blocks.cached_tokens
        sources = self._loaded.metrics.prompt_tokens
        sources.labels("local_compute").inc(computed)
        sources.labels("local_cache_hit").inc(blocks.cached_tokens)
        return pb.PrefillComputed(
            cached_tokens=blocks.cached_tokens,
            computed_tokens=computed,
            queue_s=blocks.admitted_s - blocks.arrival_s,
            prefill_s=time.monotonic() - blocks.admitted_s,
        )


async def _pump(context: Stream, events: asyncio.Queue[Event]) -> None:
    """Turns the reader's messages into events; the last one is None."""
    try:
        while isinstance(request := await context.read(), pb.PrefillRequest):
            events.put_nowait(request)
    finally:
        events.put_nowait(None)
