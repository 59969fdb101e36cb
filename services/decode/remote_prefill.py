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
from kvferry.services.transfer.base import Peer, PullResult, was_cancelled
from kvferry.services.transfer.puller import Puller

Call = grpc.aio.StreamStreamCall[pb.PrefillRequest, pb.PrefillReply]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks `[first_block, first_block + len(block_ids))` of a prompt, and where in this node's pool they go."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    cache_salt: str
    priority: int
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


class _Stream:
    """One Prefill.Run call: replies with a deadline each, and one writer at a time."""

    def __init__(self, call: Call, peer: Peer, silence_s: float) -> None:
        self.call = call
        self.peer = peer
        self._silence_s = silence_s
        self._writing = asyncio.Lock()

    async def send(self, request: pb.PrefillRequest) -> None:
        async with self._writing:
            await self.call.write(request)

    async def renew_every(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self.send(pb.PrefillRequest(renew=pb.RenewLease()))

    async def next(self) -> pb.PrefillReply:
        """The next reply; an error reply raises. A peer that is silent for longer than it may be counts as dead."""
        try:
            reply = await asyncio.wait_for(self.call.read(), self._silence_s)
        except TimeoutError as exc:
            raise Unavailable(f"prefill node {self.peer.address} was silent for {self._silence_s:.0f} s") from exc
        if not isinstance(reply, pb.PrefillReply):
            raise Unavailable(f"prefill node {self.peer.address} ended the stream early")
        if reply.HasField("error"):
            raise detail_from_pb(reply.error)
        return reply


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
                async with self._run(peer, wanted) as stream:
                    return await self._hand_over(stream, wanted)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"prefill on {candidate.address} took over {self._timeouts.total_s:.0f} s") from exc
        except asyncio.CancelledError as exc:
            if was_cancelled():
                raise
            raise Unavailable(f"the channel to prefill node {candidate.address} was closed") from exc
        except grpc.RpcError as exc:
            self._puller.drop(candidate.instance_id)
            raise from_rpc_error(exc, f"prefill node {candidate.address}") from exc
        except Unavailable:
            self._puller.drop(candidate.instance_id)
            raise

    @asynccontextmanager
    async def _run(self, peer: Peer, wanted: Wanted) -> AsyncIterator[_Stream]:
        """The stream, started and renewing its lease; cancelled on the way out, which frees everything over there."""
        stream = _Stream(pb_grpc.PrefillStub(peer.channel).Run(), peer, self._timeouts.silence_s)
        start = pb.PrefillStart(
            request_id=wanted.request_id,
            prompt_token_ids=wanted.prompt_token_ids,
            cache_salt=wanted.cache_salt,
            priority=wanted.priority,
            first_block=wanted.first_block,
            card=card_to_pb(self._card),
        )
        renewing = asyncio.create_task(stream.renew_every(self._timeouts.renew_s))
        try:
            await stream.send(pb.PrefillRequest(start=start))
            yield stream
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            stream.call.cancel()

    async def _hand_over(self, stream: _Stream, wanted: Wanted) -> Received:
        """Reads replies while a second task pulls what they offer, in order; the first failure of either ends both."""
        peer = stream.peer
        accepted = (await stream.next()).accepted
        if accepted.instance_id != peer.instance_id:
            raise Unavailable(f"{peer.address} is instance {accepted.instance_id!r} now, not {peer.instance_id!r}")
        offers: asyncio.Queue[pb.BlocksFilled | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read_offers(stream, offers))
        pulling = asyncio.create_task(self._pull_offers(peer, accepted.lease_id, offers, wanted))
        try:
            await asyncio.wait((reading, pulling), return_when=asyncio.FIRST_EXCEPTION)
            if pulling.done():
                await pulling
            computed, computed_s = await reading
            pulls = await pulling
        finally:
            reading.cancel()
            pulling.cancel()
            await asyncio.gather(reading, pulling, return_exceptions=True)  # no copy is in flight after this line
        await stream.send(pb.PrefillRequest(release=pb.ReleaseLease()))
        while not (reply := await stream.next()).HasField("released"):
            pass
        if not reply.released.valid:
            raise LeaseExpired(
                f"the lease at {peer.address} ended before its {len(wanted.block_ids)} blocks were copied"
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

    async def _read_offers(
        self, stream: _Stream, offers: asyncio.Queue[pb.BlocksFilled | None]
    ) -> tuple[pb.PrefillComputed, float]:
        """Queues every offer until the prompt is computed; that message, and when it came."""
        while not (reply := await stream.next()).HasField("computed"):
            if reply.HasField("filled"):
                offers.put_nowait(reply.filled)
        offers.put_nowait(None)
        return reply.computed, time.monotonic()

    async def _pull_offers(
        self, peer: Peer, lease_id: str, offers: asyncio.Queue[pb.BlocksFilled | None], wanted: Wanted
    ) -> list[PullResult]:
        pulls: list[PullResult] = []
        while (offer := await offers.get()) is not None:
            at = offer.first - wanted.first_block
            into: Sequence[int] = wanted.block_ids[max(at, 0) : at + len(offer.block_ids)]
            if at < 0 or len(into) != len(offer.block_ids):
                raise Internal(f"{peer.address} offered blocks from {offer.first} that were not asked for")
            pulls.append(await self._puller.pull(peer, lease_id, list(offer.block_ids), into))
        return pulls
