"""Pulls, reader's side: a link per peer instance, its transport chosen from both sides' offers, replaced on failure.

It copies; it adopts nothing. Whoever calls `pull` then asks the owner whether the lease was valid throughout.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from kvferry.common.errors import ConfigError, KvferryError, LayoutMismatch, LeaseExpired, TransferFailed, Unavailable
from kvferry.common.fail_points import FailPoints
from kvferry.common.nodes import LayoutCard, Link
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.rpc.aio import open_channel
from kvferry.services.rpc.convert import card_from_pb, card_to_pb
from kvferry.services.rpc.errors import from_rpc_error
from kvferry.services.transfer.base import Peer, PullResult, ShmOffer, Transport, was_cancelled
from kvferry.services.transfer.cost import Bandwidth
from kvferry.services.transfer.grpc import GrpcTransport
from kvferry.services.transfer.heads import part_of
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.shm import ShmTransport
from kvferry.services.transfer.ucx import UcxTransport

log = logging.getLogger("kvferry.transfer")


@dataclass(slots=True)
class _Link:
    peer: Peer
    usable: list[str]  # transports that work for this pair, best first; pulls use the first
    refused: dict[str, str] = field(default_factory=dict)  # transport -> why it is not used
    num_blocks: int = 0
    num_bytes: int = 0

    @property
    def info(self) -> Link:
        reason = "; ".join(f"{name}: {why}" for name, why in self.refused.items()) or "first choice of both sides"
        peer = self.peer
        return Link(peer.instance_id, peer.address, self.usable[0], reason, self.num_blocks, self.num_bytes)


class Puller:
    """One per node, used from one event loop.

    `transports` are those allowed here, best first. `timeout_s` is the longest silence of a peer. `on_pull` hears of
    each pull that is done, whatever becomes of its hand-over; `on_failure` of each that a transport could not do, with
    the transport and an error's code, whether or not the next one took over. The entries of `transports_by_name` may be
    wrapped by tests before the first connect.
    """

    def __init__(
        self,
        card: LayoutCard,
        instance_id: str,
        segment: PoolSegment,
        transports: Sequence[str],
        *,
        timeout_s: float = 3.0,
        fail_points: FailPoints | None = None,
        dial: Callable[[str], grpc.aio.Channel] = open_channel,
        on_pull: Callable[[PullResult], None] = lambda _: None,
        on_failure: Callable[[str, str], None] = lambda _, __: None,
    ) -> None:
        self._on_pull, self._on_failure = on_pull, on_failure
        self._card, self._instance_id = card, instance_id
        self._block_bytes, self._num_blocks = segment.block_bytes, segment.num_blocks
        self._segment = segment
        self._preparing = ThreadPoolExecutor(1, thread_name_prefix="kvferry-prefault")
        self._is_closed = False
        self._timeout_s = timeout_s
        self._dial = dial
        self.transports_by_name = {
            name: _make_transport(name, segment, timeout_s, fail_points or FailPoints()) for name in transports
        }
        self.bandwidth = Bandwidth()
        self._links: dict[str, _Link] = {}
        self._connecting: dict[tuple[str, str], asyncio.Task[_Link]] = {}

    @property
    def links(self) -> list[Link]:
        """For /cluster and metrics."""
        return [link.info for link in self._links.values()]

    async def connect(self, address: str, instance_id: str, *, some_heads: bool = False) -> Peer:
        """The peer that answers there; the first call shakes hands, later ones return at once.

        Raises LayoutMismatch that names both values, or Unavailable: nobody answers, or another instance does.
        With `some_heads` the peer may hold only some of this node's kv-heads: the rest is to be pulled from others.
        """
        peer = (await self._link(address, instance_id)).peer
        if not some_heads and peer.part is not None and len(peer.part.heads) < len(self._card.kv_heads):
            raise LayoutMismatch(
                f"{peer} holds {len(peer.part.heads)} of the {len(self._card.kv_heads)} kv-heads that this node needs",
                param="tp_size",
            )
        return peer

    async def pull(
        self, peer: Peer, lease_id: str, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> PullResult:
        """Copies block `src_block_ids[i]` of the peer to the own block `dst_block_ids[i]`.

        When it returns, raises or is cancelled, no more writes happen; except when it returns, the destination blocks
        hold anything. Raises LeaseExpired, TransferFailed or Unavailable.
        """
        if len(src_block_ids) != len(dst_block_ids) or len(set(dst_block_ids)) != len(dst_block_ids):
            raise ValueError("one distinct destination block for each source block")
        if not all(0 <= block_id < self._num_blocks for block_id in dst_block_ids):
            raise ValueError(f"destination block outside of the pool of {self._num_blocks}")
        link = await self._link(peer.address, peer.instance_id)
        if not src_block_ids:
            return PullResult(link.usable[0], 0, 0, 0.0)
        started = time.perf_counter()
        name = await self._pull(link, lease_id, src_block_ids, dst_block_ids)
        part = link.peer.part
        num_bytes = len(src_block_ids) * (part.mine.num_bytes if part else self._block_bytes)
        result = PullResult(name, len(src_block_ids), num_bytes, time.perf_counter() - started)
        self.bandwidth.note(peer.instance_id, num_bytes, result.seconds)
        link.num_blocks += result.num_blocks
        link.num_bytes += result.num_bytes
        self._on_pull(result)
        return result

    async def _pull(self, link: _Link, lease_id: str, src: Sequence[int], dst: Sequence[int]) -> str:
        """Tries the link's transports in order; returns the name of the one that did it."""
        while True:
            name = link.usable[0]
            try:
                await self.transports_by_name[name].pull(link.peer, lease_id, src, dst)
                return name
            except LeaseExpired:
                raise
            except Exception as exc:  # whatever is wrong with one transport, the next one may work
                self._on_failure(name, exc.code if isinstance(exc, KvferryError) else TransferFailed.code)
                if name == link.usable[-1]:
                    self._drop(link)
                    if isinstance(exc, KvferryError):
                        raise
                    raise TransferFailed(f"{link.peer}: {name}: {exc}") from exc
                if name in link.usable:
                    link.usable.remove(name)
                    link.refused[name] = f"failed: {exc}"
                log.warning("%s: %s failed (%s), going on with %s", link.peer, name, exc, link.usable[0])

    def prepare(self, dst_block_ids: Sequence[int]) -> None:
        """Makes the first write into these blocks as quick as later ones, while their bytes are still to come.

        Returns at once; changes no byte, so nobody need know when it is done.
        """
        if not self._is_closed:
            self._preparing.submit(self._segment.prefault, dst_block_ids)

    def drop(self, instance_id: str) -> None:
        """Forgets the peer: it is dead or replaced. Idempotent.

        Calls under way end by themselves: the channel closes when the last who holds the `Peer` lets go of it.
        """
        self.bandwidth.forget(instance_id)
        if link := self._links.get(instance_id):
            self._drop(link)

    async def aclose(self) -> None:
        """Ends everything; pulls still under way fail. A second call does nothing."""
        self._is_closed = True
        self._preparing.shutdown(wait=False)
        for connecting in list(self._connecting.values()):
            connecting.cancel()
        await asyncio.gather(*self._connecting.values(), return_exceptions=True)
        for link in list(self._links.values()):
            self._drop(link)
            await link.peer.channel.close()
        for transport in self.transports_by_name.values():
            await transport.aclose()

    async def _link(self, address: str, instance_id: str) -> _Link:
        """Cached, or made by one task for all who wait for it, so that a dead peer costs each of them one timeout."""
        if link := self._links.get(instance_id):
            return link
        key = (address, instance_id)
        task = self._connecting.get(key)
        if task is None:
            task = asyncio.create_task(self._connect(address, instance_id))
            self._connecting[key] = task
            task.add_done_callback(lambda done: self._connected(key, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as exc:
            if was_cancelled():
                raise
            raise Unavailable(f"node {instance_id} at {address}: this node is closing its links") from exc

    def _connected(self, key: tuple[str, str], task: asyncio.Task[_Link]) -> None:
        del self._connecting[key]
        if not task.cancelled():
            task.exception()  # all who waited may have left: not a warning

    async def _connect(self, address: str, instance_id: str) -> _Link:
        channel = self._dial(address)
        try:
            peer = await self._shake_hands(channel, address, instance_id)
            link = await self._choose(peer)
        except BaseException:
            await channel.close()
            raise
        for other in [other for other in self._links.values() if other.peer.address == address]:
            self._drop(other)  # replaced by the instance that answered now
        self._links[instance_id] = link
        log.info("%s: pulls over %s (%s)", peer, link.info.transport, link.info.reason)
        return link

    async def _shake_hands(self, channel: grpc.aio.Channel, address: str, instance_id: str) -> Peer:
        who = f"node {instance_id} at {address}"
        request = pb.HandshakeRequest(card=card_to_pb(self._card), instance_id=self._instance_id)
        try:
            async with asyncio.timeout(self._timeout_s):
                reply = await pb_grpc.BlocksStub(channel).Handshake(request)
        except TimeoutError as exc:
            raise Unavailable(f"{who} did not answer within {self._timeout_s:g} s") from exc
        except grpc.RpcError as exc:
            raise from_rpc_error(exc, who) from exc
        if reply.instance_id != instance_id:
            raise Unavailable(f"expected {instance_id} at {address}, found {reply.instance_id}: it was restarted")
        card = card_from_pb(reply.card)
        self._card.check_compatible(card, who)
        shm = reply.shm if reply.HasField("shm") else None
        return Peer(
            instance_id=instance_id,
            address=address,
            num_blocks=reply.num_blocks,
            offers=tuple(reply.transports),
            shm=ShmOffer(shm.path, shm.size_bytes, shm.blocks_offset, shm.nonce) if shm else None,
            ucx_port=reply.ucx_port or None,
            channel=channel,
            part=part_of(self._card, card, self._block_bytes),
        )

    async def _choose(self, peer: Peer) -> _Link:
        link = _Link(peer, usable=[])
        for name, transport in self.transports_by_name.items():
            if name not in peer.offers:
                link.refused[name] = "not offered by the peer"
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    await transport.open(peer)
                link.usable.append(name)
            except TimeoutError:
                link.refused[name] = f"not open within {self._timeout_s:g} s"
            except Exception as exc:  # whatever keeps it from opening, the next one may
                link.refused[name] = str(exc)
        if not link.usable:
            why = "; ".join(f"{name}: {reason}" for name, reason in link.refused.items())
            raise Unavailable(f"{peer}: no transport in common ({why}); it offers {', '.join(peer.offers) or 'none'}")
        return link

    def _drop(self, link: _Link) -> None:
        if self._links.get(link.peer.instance_id) is link:
            del self._links[link.peer.instance_id]
            for transport in self.transports_by_name.values():
                transport.drop(link.peer.instance_id)


def _make_transport(name: str, segment: PoolSegment, timeout_s: float, fail_points: FailPoints) -> Transport:
    if name == "shm":
        return ShmTransport(segment, fail_points)
    if name == "grpc":
        return GrpcTransport(segment, timeout_s=timeout_s)
    if name == "ucx":
        return UcxTransport(segment, timeout_s=timeout_s)
    raise ConfigError(f"transport {name!r} is not available here: use shm, ucx or grpc")
