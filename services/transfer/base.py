"""How blocks cross from the node that filled them (owner) to the node that will use them (reader).

A block is *pulled* by its reader under a lease of its owner. It knows nothing of tokens, prompts or names: block ids
of two pools, bytes, and leases. One hand-over, seen from both sides. Capitals are the states of `protocol.py`, small
letters those of a block on its way; the arrows say who takes the step, and messages of the wire stand in «»:

   OwnerSide, its lease                                    ReaderSide, its blocks in account *incoming*

   allocated   for the whole prompt ◄──── «start» ──────── allocated   for the whole prompt
       │                                                   ASKED
   COMPUTING ───────────────────────── «accepted» ───────► PULLING
       │ a chunk is computed                                   │
     filled                                                    │
       │ LeaseTable.extend pins                                │
     offered ────────────────────────── «filled» ────────────► │ next in turn? else ─► DROPPED
       │                                                       │ Transport.pull copies what is offered
       │                                                     pulled
       │                                                       │ checksum right, if the transport crosses a machine?
       │                                                       │ else ─► DROPPED
   COMPUTED  all are offered ────────── «computed» ──────►  verified
       │                                                       │ all offered and copied? else ─► DROPPED
       │   ◄──────── «release» "I have copied" ────────── CONFIRMING
       │ LeaseTable.release: valid throughout?                 │
   RELEASED ───────────────────────── «released» yes ────► CONFIRMED
                                               no ───────► DROPPED
                                                            adopted    has a sequence, then a name
                                                            released   to the cache or the free list

   from COMPUTING or COMPUTED to ABORTED (pins given back, the sequence closed), whichever comes first:
       the stream breaks or is cancelled · the lease's deadline passes (expire_due) or it is revoked (revoke_cached) ·
       computing fails · the node drains
   from ASKED, PULLING or CONFIRMING to DROPPED (its blocks stay *incoming* until the last write is over):
       an error reply · the stream ends · silence · fewer replies than «renewed» tells of · a failed pull · a cancel
       and then the next candidate is asked, and after the last one the prompt is computed here, into the same blocks

- A start for cached blocks only is answered at once and takes no memory: the owner pins what it has of the prompt and
  goes through COMPUTING to COMPUTED in one move, or refuses where peers have pinned too much. «accepted» says how many
  blocks there are; the reader leaves or takes those. Nobody here ever waits for another node's memory.
- Leases of cached blocks are revoked when a request of the owner waits for blocks: to the reader like an expiry.
- «renew» may be sent at any time until «release»; it starts the lease's time anew, or comes too late and aborts.
- Only the reader writes its pool, and `Transport.pull` returns (or raises, or is cancelled) only when no more writes
  can happen. So *dropped* frees the block at once: no write can come late.
- A leased block is pinned, hence immutable: it is read without any lock of the engine.
- An owner that is gone cannot answer «release»; what was read from it is then dropped, however complete it looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc

from kvferry.services.transfer.heads import Part


@dataclass(frozen=True, slots=True)
class ShmOffer:
    """Where an owner's pool lies in shared memory. Who finds `nonce` there is on the same host."""

    path: str
    size_bytes: int
    blocks_offset: int
    nonce: bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """One running instance of a node, as its handshake described it."""

    instance_id: str
    address: str
    num_blocks: int
    offers: tuple[str, ...]  # transports, in the owner's order of preference
    shm: ShmOffer | None
    ucx_port: int | None  # on the host of `address`
    channel: grpc.aio.Channel  # open for other calls, too, as long as one holds this object
    part: Part | None = None  # of each block, when the two ranks hold different kv-heads; None: whole blocks

    def __str__(self) -> str:
        return f"node {self.instance_id} at {self.address}"


@dataclass(frozen=True, slots=True)
class PullResult:
    transport: str
    num_blocks: int
    num_bytes: int
    seconds: float


class Transport(Protocol):
    """One way to copy blocks of a peer into this node's own pool. `conformance/suite.py` checks any.

    Safe to use concurrently from one event loop. Failures are `TransferFailed`, `LeaseExpired` or `Unavailable`;
    any other exception counts as a failure of the transport, too.
    """

    @property
    def name(self) -> str: ...

    async def open(self, source: Peer) -> None:
        """Makes ready for pulls from `source`. Raises TransferFailed saying why this pair cannot. Idempotent."""

    async def pull(
        self, source: Peer, lease_id: str, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> None:
        """Copies block `src_block_ids[i]` of `source` to the own block `dst_block_ids[i]` (which are distinct).

        With `source.part` only those bytes of it, into their places; the rest of the own blocks is not touched.
        Returns, raises or is cancelled only when no more writes can happen. After an error or a cancel the
        destination blocks hold anything. Waits at most its timeout for a silent peer.
        """

    def drop(self, instance_id: str) -> None:
        """Forgets what it keeps for this instance; pulls under way end by themselves. Idempotent."""

    async def aclose(self) -> None:
        """Frees everything. A second call does nothing."""


def was_cancelled() -> bool:
    """Whether a CancelledError is meant for this task; else gRPC or a shared task raised it: an error like others."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
