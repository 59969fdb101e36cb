"""Which bytes of a block a reader of another tensor-parallel degree takes: those of the kv-heads that both ranks hold.

A block is [layer, k/v, kv_head, slot, head_dim], so in each of its `num_layers * 2` planes a rank's heads lie side by
side: one stretch of bytes per plane. Knows cards and byte positions; no peers, no wire.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvferry.common.errors import TransferFailed
from kvferry.common.nodes import LayoutCard
from kvferry.services.transfer.copier import Blocks


@dataclass(frozen=True, slots=True)
class Stripe:
    """Bytes [start, stop) of each plane of a block."""

    num_planes: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Of one block's stripe."""
        return self.num_planes * (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Part:
    """What of each block crosses between two ranks that hold different heads."""

    heads: range  # of the model
    theirs: Stripe  # of the owner's block
    mine: Stripe  # of the reader's
    their_block_bytes: int


def part_of(reader: LayoutCard, owner: LayoutCard, block_bytes: int) -> Part | None:
    """None when both hold the same heads: then whole blocks cross. `block_bytes` is the reader's.

    The cards are compatible. Raises TransferFailed when blocks of that size do not hold the reader's heads.
    """
    if reader.kv_heads == owner.kv_heads:
        return None
    heads = reader.shared_heads(owner)
    their_block_bytes = block_bytes // len(reader.kv_heads) * len(owner.kv_heads)
    mine = stripe_of(reader, heads, block_bytes)
    return Part(heads, stripe_of(owner, heads, their_block_bytes), mine, their_block_bytes)


def stripe_of(card: LayoutCard, heads: range, block_bytes: int) -> Stripe:
    """Where these of the model's heads lie in a block of `card`. Raises TransferFailed when some are not in it."""
    held, num_planes = card.kv_heads, card.num_layers * 2
    if not held.start <= heads.start < heads.stop <= held.stop:
        raise TransferFailed(
            f"asked for kv-heads {heads.start} to {heads.stop - 1}, this rank has {held.start} to {held.stop - 1}"
        )
    head_bytes, rest = divmod(block_bytes, num_planes * len(held))
    if rest:
        raise TransferFailed(f"a block of {block_bytes} B does not hold {num_planes} planes of {len(held)} kv-heads")
    return Stripe(num_planes, (heads.start - held.start) * head_bytes, (heads.stop - held.start) * head_bytes)


def view(blocks: Blocks, stripe: Stripe | None) -> Blocks:
    """Whole blocks as they are, or their stripes: [num_blocks, num_planes, stripe_bytes], no copy."""
    if stripe is None:
        return blocks
    return blocks.reshape(len(blocks), stripe.num_planes, -1)[:, :, stripe.start : stripe.stop]
