"""Nodes of different tensor-parallel degrees: who may read from whom. That the right bytes cross: suite.py."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from kvferry.common.errors import LayoutMismatch, TransferFailed
from kvferry.common.nodes import LayoutCard
from kvferry.services.transfer.base import PullResult
from kvferry.services.transfer.conformance.owners import CARD, content, fill, serve
from kvferry.services.transfer.heads import part_of, stripe_of
from kvferry.services.transfer.segment import PoolSegment
from tests.transfer.test_puller import BLOCK_BYTES, NUM_BLOCKS, private_pool, puller

EIGHT_HEADS = replace(CARD, num_kv_heads=8)


@pytest.mark.parametrize(
    ("theirs", "mine", "complaint"),
    [
        ((0, 3), (0, 2), "tp_rank 0 of tp_size 3, this node 0 of 2: each tp_size must divide the 8 kv-heads"),
        ((2, 2), (0, 2), "tp_rank 2 of tp_size 2, this node 0 of 2"),
        ((1, 2), (0, 2), "tp_rank 1 of 2, this node 0 of 2: of 8 kv-heads they share none"),
        ((3, 4), (0, 2), "tp_rank 3 of 4, this node 0 of 2: of 8 kv-heads they share none"),
    ],
)
def test_degrees_that_do_not_split_the_heads_and_ranks_that_share_none_are_refused_with_both_values(
    theirs: tuple[int, int], mine: tuple[int, int], complaint: str
) -> None:
    def card(rank: tuple[int, int]) -> LayoutCard:
        return replace(EIGHT_HEADS, tp_rank=rank[0], tp_size=rank[1])

    with pytest.raises(LayoutMismatch, match=complaint):
        card(mine).check_compatible(card(theirs), "node x")


def test_a_peer_with_some_of_the_heads_is_refused_unless_the_caller_takes_the_rest_elsewhere() -> None:
    """Else a block with holes would be adopted."""
    own_pool = private_pool()
    own_pool.buffer[:] = 0xEE

    async def body() -> PullResult:
        segment = PoolSegment.anonymous(NUM_BLOCKS, BLOCK_BYTES // 2)
        fill(segment)
        half = replace(EIGHT_HEADS, tp_rank=1, tp_size=2)
        async with serve(segment, card=half) as peer_node, puller(own_pool, card=EIGHT_HEADS) as own:
            with pytest.raises(LayoutMismatch, match="holds 4 of the 8 kv-heads"):
                await own.connect(peer_node.address, peer_node.instance_id)
            peer = await own.connect(peer_node.address, peer_node.instance_id, some_heads=True)
            return await own.pull(peer, peer_node.lease([3]), [3], [0])

    result = asyncio.run(body())
    assert (result.num_blocks, result.num_bytes) == (1, BLOCK_BYTES // 2)
    num_planes = 2 * CARD.num_layers
    planes = own_pool.buffer[0].reshape(num_planes, 2, -1)
    assert (planes[:, 0] == 0xEE).all()
    np.testing.assert_array_equal(planes[:, 1].ravel(), content([3], BLOCK_BYTES // 2)[0])


@pytest.mark.parametrize(
    ("tp_size", "num_kv_heads", "heads"),
    [
        (1, 3, [[0, 1, 2]]),
        (2, 4, [[0, 1], [2, 3]]),
        (3, 3, [[0], [1], [2]]),
        (4, 2, [[0], [0], [1], [1]]),
        (3, 1, [[0], [0], [0]]),
    ],
)
def test_ranks_share_the_heads_evenly_and_above_their_number_several_hold_the_same(
    tp_size: int, num_kv_heads: int, heads: list[list[int]]
) -> None:
    cards = [replace(CARD, num_kv_heads=num_kv_heads, tp_rank=rank, tp_size=tp_size) for rank in range(tp_size)]
    assert [list(card.kv_heads) for card in cards] == heads
    whole = replace(CARD, num_kv_heads=num_kv_heads).block_bytes
    assert all(card.block_bytes * num_kv_heads == whole * len(card.kv_heads) for card in cards)


def test_ranks_with_the_same_heads_move_whole_blocks() -> None:
    one, other = (replace(EIGHT_HEADS, num_kv_heads=2, tp_rank=rank, tp_size=4) for rank in (2, 3))
    one.check_compatible(other, "node x")
    assert part_of(one, other, one.block_bytes) is None


@pytest.mark.parametrize(
    ("heads", "block_bytes", "complaint"),
    [
        (range(3, 5), 4096, "asked for kv-heads 3 to 4, this rank has 4 to 7"),
        (range(7, 9), 4096, "asked for kv-heads 7 to 8, this rank has 4 to 7"),
        (range(4, 5), 4098, "a block of 4098 B does not hold 4 planes of 4 kv-heads"),
    ],
)
def test_heads_that_a_rank_does_not_hold_are_never_read(heads: range, block_bytes: int, complaint: str) -> None:
    with pytest.raises(TransferFailed, match=complaint):
        stripe_of(replace(EIGHT_HEADS, tp_rank=1, tp_size=2), heads, block_bytes)
