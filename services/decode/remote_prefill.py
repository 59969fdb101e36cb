"""The reader's side of one hand-over: ask a prefill node, pull its blocks as they fill, have the lease confirmed.

The blocks are this node's own, in the account *incoming*, from before the first byte until the caller has heard how it
ended. When `receive_blocks` returns or raises, nothing writes into them any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from kvferry.common.errors import DeadlineExceeded, TransferFailed, Unavailable
from kvferry.common.fail_points import FailPoints
from kvferry.common.nodes import LayoutCard
from kvferry.common.requests import PrefillCandidate
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.rpc.convert import card_to_pb
from kvferry.services.rpc.errors import detail_from_pb, from_rpc_error
from kvferry.services.transfer.base import Peer, PullResult, was_cancelled
from kvferry.services.transfer.protocol import Offer, ReaderSide
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


@dataclass(frozen=True, slots=True)
class _Copy:
    source_ids: tuple[int, ...]
    own_ids: tuple[int, ...]


class _Stream:
    """One Prefill.Run call: replies with a deadline each, and one writer at a time."""

    def __init__(self, call: Call, peer: Peer, silence_s: float, fail_points: FailPoints) -> None:
        self.call = call
        self.peer = peer
        self._silence_s = silence_s
        self._fail_points = fail_points
        self._writing = asyncio.Lock()
        self._num_replies = 0

    async def send(self, request: pb.PrefillRequest, point: str) -> None:
        """`point` names this message in `common/fail_points.py`. Raises Unavailable when the stream has ended."""
        async with self._writing:
            for _ in range(await self._fail_points.copies(point)):
                try:
                    await self.call.write(request)
                except asyncio.InvalidStateError as exc:  # what gRPC says of a call that ended unread
                    raise Unavailable(f"prefill node {self.peer.address} ended the stream early") from exc

    async def renew_every(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self.send(pb.PrefillRequest(renew=pb.RenewLease()), "transfer.lease.renew")

    async def next(self) -> pb.PrefillReply:
        """The next reply; an error reply raises. A peer that is silent for longer than it may be counts as dead.

        What gets lost on the way would be waited for while the peer lives: each renewal tells how much was sent.
        """
        try:
            reply = await asyncio.wait_for(self.call.read(), self._silence_s)
        except TimeoutError as exc:
            raise Unavailable(f"prefill node {self.peer.address} was silent for {self._silence_s:.0f} s") from exc
        if not isinstance(reply, pb.PrefillReply):
            raise Unavailable(f"prefill node {self.peer.address} ended the stream early")
        if reply.HasField("error"):
            raise detail_from_pb(reply.error)
        if reply.HasField("renewed") and reply.renewed.num_replies != self._num_replies:
            sent = reply.renewed.num_replies
            raise TransferFailed(f"prefill node {self.peer.address} sent {sent} replies, {self._num_replies} came")
        self._num_replies += 1
        return reply


class RemotePrefill:
    def __init__(self, puller: Puller, card: LayoutCard, timeouts: Timeouts, fail_points: FailPoints) -> None:
        self._puller = puller
        self._card = card
        self._timeouts = timeouts
        self._fail_points = fail_points

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
        stream = _Stream(pb_grpc.PrefillStub(peer.channel).Run(), peer, self._timeouts.silence_s, self._fail_points)
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
            await stream.send(pb.PrefillRequest(start=start), "rpc.prefill.start")
            yield stream
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            stream.call.cancel()

    async def _hand_over(self, stream: _Stream, wanted: Wanted) -> Received:
        """Reads replies while a second task pulls what they offer, in order; the first failure of either ends both."""
        peer, side = stream.peer, ReaderSide(wanted.first_block, wanted.block_ids)
        accepted = (await stream.next()).accepted
        if accepted.instance_id != peer.instance_id:
            raise Unavailable(f"{peer.address} is instance {accepted.instance_id!r} now, not {peer.instance_id!r}")
        side.accepted(accepted.lease_id)
        todo: asyncio.Queue[_Copy | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read_offers(stream, side, todo))
        pulling = asyncio.create_task(self._pull_offers(peer, side, todo))
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
        await self._confirm(stream, side)
        return Received(
            computed_tokens=computed.computed_tokens,
            cached_tokens=computed.cached_tokens,
            queue_s=computed.queue_s,
            prefill_s=computed.prefill_s,
            transfer_s=time.monotonic() - computed_s,
            pulls=tuple(pulls),
        )

    async def _read_offers(
        self, stream: _Stream, side: ReaderSide, todo: asyncio.Queue[_Copy | None]
    ) -> tuple[pb.PrefillComputed, float]:
        """Queues every offer until the prompt is computed; that message, and when it came."""
        while not (reply := await stream.next()).HasField("computed"):
            if reply.HasField("filled"):
                offer = Offer(reply.filled.first, tuple(reply.filled.block_ids))
                todo.put_nowait(_Copy(offer.block_ids, side.offered(offer)))
        side.computed()
        todo.put_nowait(None)
        return reply.computed, time.monotonic()

    async def _pull_offers(self, peer: Peer, side: ReaderSide, todo: asyncio.Queue[_Copy | None]) -> list[PullResult]:
        pulls: list[PullResult] = []
        while (copy := await todo.get()) is not None:
            pulls.append(await self._puller.pull(peer, side.lease_id, copy.source_ids, copy.own_ids))
            side.copied(len(copy.own_ids))
        return pulls

    async def _confirm(self, stream: _Stream, side: ReaderSide) -> None:
        """Asks the owner, after the copy, whether the lease was valid throughout. Raises unless it says yes.

        It answers at once, or the question was lost: other replies do not prolong the wait.
        """
        side.confirm()
        silence_s = self._timeouts.silence_s
        try:
            async with asyncio.timeout(silence_s):
                await stream.send(pb.PrefillRequest(release=pb.ReleaseLease()), "transfer.lease.release")
                while not (reply := await stream.next()).HasField("released"):
                    pass
        except TimeoutError as exc:
            raise Unavailable(f"prefill node {stream.peer.address} confirmed nothing for {silence_s:g} s") from exc
        side.answered(reply.released.valid)
