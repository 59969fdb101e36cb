"""The reader's side of one hand-over: ask a node, pull its blocks as it offers them, have the lease confirmed.

The blocks are this node's own, in the account *incoming*, from before the first byte until the caller has heard how it
ended. When `receive_blocks` returns or raises, nothing writes into them any more.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc

from kvferry.common.errors import BlocksGone, DeadlineExceeded, LeaseExpired, TransferFailed, Unavailable
from kvferry.common.fail_points import FailPoints
from kvferry.common.nodes import LayoutCard
from kvferry.common.requests import Holder
from kvferry.common.tracing import NO_SPAN, Span
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.rpc.convert import card_to_pb, holders_to_pb
from kvferry.services.rpc.errors import detail_from_pb, from_rpc_error
from kvferry.services.transfer.base import Peer, was_cancelled
from kvferry.services.transfer.protocol import Offer, ReaderSide
from kvferry.services.transfer.puller import Puller

Call = grpc.aio.StreamStreamCall[pb.PrefillRequest, pb.PrefillReply]


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks `[first_block, first_block + len(block_ids))` of a prompt, and where in this node's pool they go.

    `holders`: where the owner may pull what it lacks. `cached_only`: it shall not compute.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    cache_salt: str
    priority: int
    first_block: int
    block_ids: tuple[int, ...]
    holders: tuple[Holder, ...] = ()
    cached_only: bool = False
    span: Span = NO_SPAN
    http_request_id: str = ""


@dataclass(frozen=True, slots=True)
class Received:
    """How a hand-over went: its first `num_blocks` blocks are here, all that the owner had or computed.

    `transfer_s`: from the last chunk computed, its blocks offered, to the lease confirmed.
    """

    num_blocks: int
    computed_tokens: int
    queue_s: float
    prefill_s: float
    transfer_s: float

    @classmethod
    def sum(cls, parts: Sequence[Received]) -> Received:
        """Several, one after the other, as one."""
        return cls(
            num_blocks=sum(one.num_blocks for one in parts),
            computed_tokens=sum(one.computed_tokens for one in parts),
            queue_s=sum(one.queue_s for one in parts),
            prefill_s=sum(one.prefill_s for one in parts),
            transfer_s=sum(one.transfer_s for one in parts),
        )


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
        self._reading: asyncio.Task[object] | None = None

    async def send(self, request: pb.PrefillRequest, point: str) -> None:
        """`point` names this message in `common/fail_points.py`. Raises Unavailable when the stream has ended."""
        async with self._writing:
            for _ in range(await self._fail_points.copies(point)):
                try:
                    await self.call.write(request)
                except asyncio.InvalidStateError as exc:  # what gRPC says of a call that ended unread
                    raise Unavailable(f"node {self.peer.address} ended the stream early") from exc

    async def renew_every(self, interval_s: float) -> None:
        while True:
            await asyncio.sleep(interval_s)
            await self.send(pb.PrefillRequest(renew=pb.RenewLease()), "transfer.lease.renew")

    async def next(self) -> pb.PrefillReply:
        """The next reply; an error reply raises. A peer that is silent for longer than it may be counts as dead.

        What gets lost on the way would be waited for while the peer lives: each renewal tells how much was sent.
        A caller that is cancelled leaves the reply to the next one.
        """
        if self._reading is None:
            self._reading = asyncio.ensure_future(self.call.read())
        await asyncio.wait((self._reading,), timeout=self._silence_s)
        if not self._reading.done():
            raise Unavailable(f"node {self.peer.address} was silent for {self._silence_s:.0f} s")
        done, self._reading = self._reading, None
        reply = done.result()
        if not isinstance(reply, pb.PrefillReply):
            raise Unavailable(f"node {self.peer.address} ended the stream early")
        if reply.HasField("error"):
            raise detail_from_pb(reply.error)
        if reply.HasField("renewed") and reply.renewed.num_replies != self._num_replies:
            sent = reply.renewed.num_replies
            raise TransferFailed(f"node {self.peer.address} sent {sent} replies, {self._num_replies} came")
        self._num_replies += 1
        return reply

    async def watch(self) -> None:
        """Reads on when nothing but renewals is due. Ends only by raising what the peer says, or that it is silent."""
        while True:
            await self.next()

    async def ended(self) -> None:
        """After the call was cancelled."""
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)


class BlockReader:
    def __init__(self, puller: Puller, card: LayoutCard, timeouts: Timeouts, fail_points: FailPoints) -> None:
        self._puller = puller
        self._card = card
        self._timeouts = timeouts
        self._fail_points = fail_points

    async def receive_blocks(self, address: str, instance_id: str, wanted: Wanted) -> Received:
        """Wanted blocks, copied and confirmed: as many as the owner has from the first one on, at least one.

        Raises a KvferryError when they are not; then none may be used.
        """
        with wanted.span.child("receive_blocks", peer=address, blocks=len(wanted.block_ids)) as span:
            return await self._receive_blocks(address, instance_id, replace(wanted, span=span))

    async def _receive_blocks(self, address: str, instance_id: str, wanted: Wanted) -> Received:
        try:
            async with asyncio.timeout(self._timeouts.total_s):
                peer = await self._puller.connect(address, instance_id)
                async with self._run(peer, wanted) as stream:
                    return await self._hand_over(stream, wanted)
        except TimeoutError as exc:
            raise DeadlineExceeded(f"blocks of {address} took over {self._timeouts.total_s:.0f} s") from exc
        except asyncio.CancelledError as exc:
            if was_cancelled():
                raise
            raise Unavailable(f"the channel to node {address} was closed") from exc
        except grpc.RpcError as exc:
            self._puller.drop(instance_id)
            raise from_rpc_error(exc, f"node {address}") from exc
        except (BlocksGone, LeaseExpired):  # said by a peer that lives
            raise
        except Unavailable:
            self._puller.drop(instance_id)
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
            holders=holders_to_pb(wanted.holders),
            cached_only=wanted.cached_only,
            traceparent=wanted.span.traceparent,
            http_request_id=wanted.http_request_id,
        )
        renewing = asyncio.create_task(stream.renew_every(self._timeouts.renew_s))
        try:
            await stream.send(pb.PrefillRequest(start=start), "rpc.prefill.start")
            yield stream
        finally:
            stream.call.cancel()  # before anything is waited for: a second cancel may cut the waits short
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await stream.ended()

    async def _hand_over(self, stream: _Stream, wanted: Wanted) -> Received:
        """Reads replies while a second task pulls what they offer, in order; the first failure of either ends both."""
        peer, side = stream.peer, ReaderSide(wanted.first_block, wanted.block_ids)
        accepted = (await stream.next()).accepted
        if accepted.instance_id != peer.instance_id:
            raise Unavailable(f"{peer.address} is instance {accepted.instance_id!r} now, not {peer.instance_id!r}")
        side.accepted(accepted.lease_id, accepted.num_blocks)
        self._puller.prepare(wanted.block_ids)
        todo: asyncio.Queue[_Copy | None] = asyncio.Queue()
        reading = asyncio.create_task(self._read_offers(stream, side, todo))
        pulling = asyncio.create_task(self._pull_offers(peer, side, todo, wanted.span))
        tasks: list[asyncio.Task[Any]] = [reading, pulling]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if pulling.done():
                await pulling
            computed, offered_s = await reading
            if not pulling.done():
                tasks.append(watching := asyncio.create_task(stream.watch()))
                await asyncio.wait((pulling, watching), return_when=asyncio.FIRST_COMPLETED)
                if not pulling.done():
                    await watching
            await pulling
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # no copy is in flight after this line
        with wanted.span.child("confirm"):
            await self._confirm(stream, side)
        return Received(
            num_blocks=side.num_blocks,
            computed_tokens=computed.computed_tokens,
            queue_s=computed.queue_s,
            prefill_s=computed.prefill_s,
            transfer_s=time.monotonic() - offered_s,
        )

    async def _read_offers(
        self, stream: _Stream, side: ReaderSide, todo: asyncio.Queue[_Copy | None]
    ) -> tuple[pb.PrefillComputed, float]:
        """Queues every offer until the prompt is computed; that message, and when the last blocks were offered.

        Not when the message came: by then they may have been copied, in this event loop.
        """
        offered_s = time.monotonic()
        while not (reply := await stream.next()).HasField("computed"):
            if reply.HasField("filled"):
                offered_s = time.monotonic()
                offer = Offer(reply.filled.first, tuple(reply.filled.block_ids))
                todo.put_nowait(_Copy(offer.block_ids, side.offered(offer)))
        side.computed()
        todo.put_nowait(None)
        return reply.computed, offered_s

    async def _pull_offers(self, peer: Peer, side: ReaderSide, todo: asyncio.Queue[_Copy | None], span: Span) -> None:
        while (copy := await todo.get()) is not None:
            with span.child("pull", blocks=len(copy.own_ids)) as pulling:
                done = await self._puller.pull(peer, side.lease_id, copy.source_ids, copy.own_ids)
                pulling.set(transport=done.transport, bytes=done.num_bytes)
            side.copied(len(copy.own_ids))

    async def _confirm(self, stream: _Stream, side: ReaderSide) -> None:
        """Asks the owner, after the copy, whether the lease was valid throughout. Raises unless it says yes.

        It answers at once, or the question was lost: other replies do not prolong the wait.
        """
        side.confirm()
        silence_s = self._timeouts.silence_s
        try:
            async with asyncio.timeout(silence_s):
                with suppress(Unavailable):  # an owner that has ended it has said why
                    await stream.send(pb.PrefillRequest(release=pb.ReleaseLease()), "transfer.lease.release")
                while not (reply := await stream.next()).HasField("released"):
                    pass
        except TimeoutError as exc:
            raise Unavailable(f"node {stream.peer.address} confirmed nothing for {silence_s:g} s") from exc
        side.answered(reply.released.valid)
