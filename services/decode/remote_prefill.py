"""The reader's side of one hand-over: ask a prefill node, pull its blocks as they fill, have the lease confirmed.

The blocks are this node's own, in the account *incoming*, from before the first byte until the caller has heard how it
ended. When `receive_blocks` returns or raises, nothing writes into them any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from kvferry.common.errors import DeadlineExceeded, Internal, LeaseExpired, Unavailable
from kvferry.common.nodes import LayoutCard
from kvferry.common.requests import PrefillCandidate
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.rpc.convert import card_to_pb
from kvferry.services.rpc.errors import detail_from_pb, from_rpc_error
from kvferry.services.transfer.base import Peer, PullResult
from kvferry.services.transfer.puller import Puller

Call = grpc.aio.StreamStreamCall[pb.PrefillRequest, pb.PrefillReply]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks `[first_block, first_block + len(block_ids))` of a prompt, and where in this node's pool they go."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    cache_salt: str
    first_block: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Received:
    """How a complete hand-over went. `transfer_s`: from the last chunk computed to the lease confirmed."""

    computed_tokens: int
    cached_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float
    pulls: tuple[PullResult, ...]


@dataclass(frozen=True, slots=True)
class Timeouts:
    total_s: float
    silence_s: float
    renew_s: float


class RemotePrefill:
    def __init__(self, puller: Puller, card: LayoutCard, timeouts: Timeouts) -> None:
        self._puller = puller
        self._card = card
        self._timeouts = timeouts

    async def receive_blocks(self, candidate: PrefillCandidate, wanted: Wanted) -> Received:
        """All wanted blocks, copied and confirmed. Raises a KvferryError when they are not; then none may be used."""
        try:
            async with asyncio.timeout(self._timeouts.total_s):
                peer = await self._puller.connect(candidate.address, candidate.instance_id)
                async with self._run(peer, wanted) as call:
                    return await self._hand_over(call, peer, wanted)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"prefill on {candidate.address} took over {self._timeouts.total_s:.0f} s") from exc
        except grpc.RpcError as exc:
            self._puller.drop(candidate.instance_id)
            raise from_rpc_error(exc, f"prefill node {candidate.address}") from exc

    @asynccontextmanager
    async def _run(self, peer: Peer, wanted: Wanted) -> AsyncIterator[Call]:
        """The stream, started and renewing its lease; cancelled on the way out, which frees everything over there."""
        call: Call = pb_grpc.PrefillStub(peer.channel).Run()
        renewing = asyncio.create_task(self._renew(call))
        try:
            start = pb.PrefillStart(
                request_id=wanted.request_id,
                prompt_token_ids=wanted.prompt_token_ids,
                cache_salt=wanted.cache_salt,
                first_block=wanted.first_block,
                card=card_to_pb(self._card),
            )
            await call.write(pb.PrefillRequest(start=start))
            yield call
        finally:
            renewing.cancel()
            call.cancel()

    async def _renew(self, call: Call) -> None:
        while True:
            await asyncio.sleep(self._timeouts.renew_s)
            await call.write(pb.PrefillRequest(renew=pb.RenewLease()))

    async def _hand_over(self, call: Call, peer: Peer, wanted: Wanted) -> Received:
        """Reads replies while a second task pulls what they offer, in order."""
        offers: asyncio.Queue[pb.BlocksFilled | None] = asyncio.Queue()
        accepted = (await self._next(call, peer)).accepted
        if accepted.instance_id != peer.instance_id:
            raise Unavailable(f"{peer.address} is instance {accepted.instance_id!r} now, not {peer.instance_id!r}")
        pulling = asyncio.create_task(self._pull_offers(peer, accepted.lease_id, offers, wanted))
        try:
            computed = await self._read_until_computed(call, peer, offers, pulling)
            computed_s = time.monotonic()
            pulls = await pulling
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)  # no copy is in flight after this line
        await call.write(pb.PrefillRequest(release=pb.ReleaseLease()))
        while not (reply := await self._next(call, peer)).HasField("released"):
            pass
        if not reply.released.valid:
            raise LeaseExpired(
                f"the lease at {peer.address} did not last until its {len(wanted.block_ids)} blocks were copied"
            )
        if (got := sum(p.num_blocks for p in pulls)) != len(wanted.block_ids):
            raise Internal(f"{peer.address} offered {got} of {len(wanted.block_ids)} blocks")
        return Received(
            computed_tokens=computed.computed_tokens,
            cached_tokens=computed.cached_tokens,
            queue_s=computed.queue_s,
            prefill_s=computed.prefill_s,
            transfer_s=time.monotonic() - computed_s,
            pulls=tuple(pulls),
        )

    async def _read_until_computed(
        self,
        call: Call,
        peer: Peer,
        offers: asyncio.Queue[pb.BlocksFilled | None],
        pulling: asyncio.Task[list[PullResult]],
    ) -> pb.PrefillComputed:
        """Queues every offer; ends early, raising its error, when a pull has failed."""
        while True:
            reply = await self._next(call, peer)
            if pulling.done():
                await pulling
            if reply.HasField("filled"):
                offers.put_nowait(reply.filled)
            elif reply.HasField("computed"):
                offers.put_nowait(None)
                return reply.computed

    async def _pull_offers(
        self, peer: Peer, lease_id: str, offers: asyncio.Queue[pb.BlocksFilled | None], wanted: Wanted
    ) -> list[PullResult]:
        pulls: list[PullResult] = []
        while (offer := await offers.get()) is not None:
            at = offer.first - wanted.first_block
            into: Sequence[int] = wanted.block_ids[at : at + len(offer.block_ids)]
            if at < 0 or len(into) != len(offer.block_ids):
                raise Internal(f"{peer.address} offered blocks from {offer.first} that were not asked for")
            pulls.append(await self._puller.pull(peer, lease_id, list(offer.block_ids), into))
        return pulls

    async def _next(self, call: Call, peer: Peer) -> pb.PrefillReply:
        """The next reply; an error reply raises. A peer that is silent for longer than it may be counts as dead."""
        try:
            reply = await asyncio.wait_for(call.read(), self._timeouts.silence_s)
        except TimeoutError as exc:
            self._puller.drop(peer.instance_id)
            raise Unavailable(f"prefill node {peer.address} was silent for {self._timeouts.silence_s:.0f} s") from exc
        if not isinstance(reply, pb.PrefillReply):
            raise Unavailable(f"prefill node {peer.address} ended the stream early")
        if reply.HasField("error"):
            raise detail_from_pb(reply.error)
        return reply
