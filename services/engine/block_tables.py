"""The blocks of each sequence: shared, fresh, copied, named. Plain Python over the pool; who gets them is not decided
here."""

from __future__ import annotations

from array import array
from typing import Literal, NamedTuple

from kvferry.services.engine.block_pool import BlockPool
from kvferry.services.engine.schedule import BlockCopy
from kvferry.services.engine.sequence import Sequence


class Need(NamedTuple):
    """What a sequence must reserve to start: it shares `hits`; `num_blocks` of those available now go to it."""

    hits: list[int]
    fresh: int
    num_blocks: int


class BlockTables:
    """Not thread-safe, as the pool is not."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def need(self, seq: Sequence, num_tokens: int) -> Need:
        """Of a sequence without blocks, for so many tokens of it."""
        hits = self._cached(seq)
        fresh = seq.num_blocks_for(num_tokens) - len(hits)
        return Need(hits, fresh, fresh + self._pool.num_idle(hits))

    def reserve(self, seq: Sequence, need: Need) -> None:
        """Raises NoFreeBlocks if there are fewer than it needs."""
        self._pool.acquire(need.hits)
        incoming = seq.num_cacheable_blocks - len(need.hits) if seq.receive else 0
        tail = self._pool.allocate(incoming, incoming=True)
        seq.block_table = array("q", [*need.hits, *tail, *self._pool.allocate(need.fresh - len(tail))])
        seq.num_named_blocks = len(need.hits)
        seq.num_computed_tokens = len(need.hits) * seq.block_size
        if not seq.num_preemptions:
            seq.num_cached_tokens = seq.num_computed_tokens

    def find_again(self, seq: Sequence) -> None:
        """Blocks that others have computed since it reserved its own take the place of those: the turn before this one
        of a conversation, say, in the same queue."""
        first = seq.num_computed_tokens // seq.block_size
        hits = self._cached(seq, first)
        self._pool.acquire(hits)
        self._pool.release(seq.block_table[first : first + len(hits)])
        seq.block_table[first : first + len(hits)] = array("q", hits)
        if hits:
            seq.num_named_blocks = first + len(hits)
            seq.num_computed_tokens = seq.num_named_blocks * seq.block_size
            seq.num_cached_tokens += len(hits) * seq.block_size

    def share(self, parent: Sequence, child: Sequence) -> None:
        """The child gets all blocks of the parent, and stands where it stands."""
        child.block_table = parent.block_table[: parent.num_blocks_for(parent.num_tokens)]
        self._pool.acquire(child.block_table)
        child.names = list(parent.names)
        child.num_named_blocks = parent.num_named_blocks
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_cached_tokens = parent.num_cached_tokens

    def received(self, seq: Sequence, num_blocks: int) -> list[int]:
        """The first `num_blocks` blocks of a receiving sequence hold their KV -> those that did not before."""
        self._pool.arrived(seq.block_table)
        first = seq.num_computed_tokens // seq.block_size
        if num_blocks <= first:
            return []
        seq.num_received_tokens = num_blocks * seq.block_size - seq.num_computed_tokens
        seq.num_computed_tokens += seq.num_received_tokens
        found = seq.block_table[first:num_blocks].tolist()
        self.name_full(seq)
        return found

    def lacks(self, seq: Sequence) -> Literal["", "new", "own"]:
        """What its next token needs: another block, or one of its own in place of a half-filled one that is shared."""
        if len(seq.block_table) < seq.num_blocks_for(seq.num_tokens):
            return "new"
        if seq.num_uncomputed_tokens == 0:  # a beam that waits for the others
            return ""
        at = seq.num_computed_tokens // seq.block_size
        return "own" if at >= seq.num_named_blocks and self._pool.is_shared(seq.block_table[at]) else ""

    def grow(self, seq: Sequence) -> None:
        seq.block_table.extend(self._pool.allocate(1))

    def copy_on_write(self, seq: Sequence) -> BlockCopy:
        at = seq.num_computed_tokens // seq.block_size
        old, (new,) = seq.block_table[at], self._pool.allocate(1)
        self._pool.release([old])
        seq.block_table[at] = new
        return BlockCopy(old, new)

    def give_back(self, seq: Sequence) -> None:
        self._pool.release(seq.block_table)
        seq.block_table = array("q")
        seq.num_named_blocks = seq.num_computed_tokens = 0

    def name_full(self, seq: Sequence) -> None:
        """Names the blocks that it has filled. One that is known by its name already takes the place of its own."""
        full = seq.num_computed_tokens // seq.block_size
        names = seq.name_blocks(full)
        for i in range(seq.num_named_blocks, full):
            seq.block_table[i] = self._pool.register(seq.block_table[i], names[i])
        seq.num_named_blocks = full

    def _cached(self, seq: Sequence, first: int = 0) -> list[int]:
        if not self._pool.enable_prefix_caching:
            return []
        return self._pool.lookup(seq.name_blocks(seq.num_cacheable_blocks)[first:])
