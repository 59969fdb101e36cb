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
from kvferry.common.errors import BadRequest, Draining, KvferryError, LeaseExpired
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
                raise BadRequest("the first message of Prefill.Run must be `start`")
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
            del self._runs[run.seq.key], self._by_lease[run.lease_id]
            run.end()
            reader.cancel()

    def _open(self, loaded: LoadedNode, start: pb.PrefillStart) -> _Run:
        loaded.card.check_compatible(card_from_pb(start.card), "the decode node")
        size = loaded.card.block_size
        num_blocks = (len(start.prompt_token_ids) - 1) // size
        if num_blocks <= start.first_block:
            raise BadRequest(
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
        run = _Run(loaded, self._node.instance_id, seq, start.first_block)
        loaded.engine.submit(seq)
        run.lease_id = loaded.leases.open(start.request_id).lease_id
        self._runs[seq.key] = self._by_lease[run.lease_id] = run
        return run


class _Run:
    """One prompt being computed for one reader."""

    def __init__(self, loaded: LoadedNode, instance_id: str, seq: Sequence, first_block: int) -> None:
        self.seq = seq
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.lease_id = ""
        self._loaded = loaded
        self._instance_id = instance_id
        self._num_blocks = len(seq.token_ids) // seq.block_size
        self._num_pinned = 0
        self._num_reported = first_block
        self._done = False

    async def serve(self, context: Stream) -> None:
        """Returns when the reader has released the lease or is gone; raises what ends the run otherwise."""
        await context.write(
            pb.PrefillReply(
                accepted=pb.PrefillAccepted(
                    lease_id=self.lease_id, instance_id=self._instance_id, num_blocks=self._num_blocks
                )
            )
        )
        while (event := await self.events.get()) is not None:
            if isinstance(event, KvferryError):
                raise event
            if isinstance(event, FailedOutput):
                raise event.error
            if isinstance(event, BlocksOutput):
                await self._offer(context, event)
            elif event.HasField("renew"):
                self._loaded.leases.renew(self.lease_id)
                await context.write(pb.PrefillReply(renewed=pb.LeaseRenewed()))
            elif event.HasField("release"):
                valid = self._loaded.leases.release(self.lease_id)
                await context.write(pb.PrefillReply(released=pb.LeaseReleased(valid=valid)))
                return

    def end(self) -> None:
        """Gives everything back, at whatever stage. The engine frees blocks of a running step right after it."""
        self._loaded.leases.release(self.lease_id)
        self._loaded.engine.close(self.seq.key)
        self._loaded.metrics.requests.labels("stop" if self._done else "abort").inc()

    async def _offer(self, context: Stream, blocks: BlocksOutput) -> None:
        """Pins what is new under the lease, from block 0 so that no parent is evicted before its child; reports it."""
        self._loaded.leases.extend(self.lease_id, blocks.block_ids[self._num_pinned :])
        self._num_pinned = len(blocks.block_ids)
        if new := blocks.block_ids[self._num_reported :]:
            filled = pb.BlocksFilled(first=self._num_reported, block_ids=new)
            self._num_reported += len(new)
            await context.write(pb.PrefillReply(filled=filled))
        if blocks.complete:
            self._done = True
            self._loaded.engine.close(self.seq.key)
            await context.write(pb.PrefillReply(computed=self._computed(blocks)))

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
