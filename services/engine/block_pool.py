"""The account of KV blocks: who owns each, which have names, which may be evicted. No tensors, no policy.

Every block is in exactly one account (DESIGN promise 2). Which one follows from four facts about it, in this order:

    incoming   a peer's bytes are being copied into it; not readable, not freeable
    sequence   at least one sequence uses it
    lease      only peers' leases pin it
    cached     unused, but full and named: a prefix hit may take it up, an allocation may evict it
    free       none of these

Not thread-safe: the engine's mutex guards it.
"""

from __future__ import annotations

import enum
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.common.nodes import BlockAccounts


class Account(enum.IntEnum):
    FREE = 0
    CACHED = 1
    SEQUENCE = 2
    LEASE = 3
    INCOMING = 4


class NoFreeBlocks(Exception):
    """Raised by `allocate` when it would need more blocks than are free or evictable. Nothing was taken."""


@dataclass(slots=True)
class _Block:
    num_sequences: int = 0
    num_pins: int = 0
    incoming: bool = False
    name: bytes | None = None
    account: Account = Account.FREE

    def due_account(self) -> Account:
        if self.incoming:
            return Account.INCOMING
        if self.num_sequences:
            return Account.SEQUENCE
        if self.num_pins:
            return Account.LEASE
        return Account.FREE if self.name is None else Account.CACHED


@dataclass(frozen=True, slots=True)
class NameChanges:
    """What the index must hear: names that this pool now holds and no longer holds, net of what cancelled out."""

    stored: list[bytes]
    removed: list[bytes]


class BlockPool:
    def __init__(self, num_blocks: int, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self._blocks = [_Block() for _ in range(num_blocks)]
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._by_name: dict[bytes, int] = {}
        self._counts = [num_blocks, 0, 0, 0, 0]
        self._changed: dict[bytes, bool] = {}
        self.num_shared = 0  # blocks that more than one sequence uses

    # ---- reading

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could take now."""
        return self._counts[Account.FREE] + self._counts[Account.CACHED]

    def accounts(self) -> BlockAccounts:
        free, cached, sequence, lease, incoming = self._counts
        return BlockAccounts(free=free, cached=cached, sequence=sequence, lease=lease, incoming=incoming)

    def is_shared(self, block_id: int) -> bool:
        return self._blocks[block_id].num_sequences > 1

    def lookup(self, names: Sequence[bytes]) -> list[int]:
        """Ids of the longest leading run of `names` that this pool holds. Takes nothing."""
        ids: list[int] = []
        for name in names:
            if (block_id := self._by_name.get(name)) is None:
                break
            ids.append(block_id)
        return ids

    def holds(self, name: bytes) -> bool:
        return name in self._by_name

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these are in the cached account, so that acquiring them lowers `num_available`."""
        return sum(self._blocks[i].account is Account.CACHED for i in block_ids)

    # ---- sequences

    def acquire(self, block_ids: Iterable[int]) -> None:
        """One more sequence uses these blocks."""
        for i in block_ids:
            self._blocks[i].num_sequences += 1
            self.num_shared += self._blocks[i].num_sequences == 2
            self._settle(i)

    def allocate(self, num_blocks: int, incoming: bool = False) -> list[int]:
        """Fresh nameless blocks for one sequence, all or none; evicts least recently used cached ones as needed."""
        if num_blocks > self.num_available:
            raise NoFreeBlocks(f"{num_blocks} blocks wanted, {self.num_available} available of {self.num_blocks}")
        ids: list[int] = []
        for _ in range(num_blocks):
            if not self._free:
                self._forget(next(iter(self._cached)))
            block_id = self._free.popleft()
            block = self._blocks[block_id]
            block.num_sequences, block.incoming = 1, incoming
            self._move(block_id, block, block.due_account())
            ids.append(block_id)
        return ids

    def release(self, block_ids: Sequence[int]) -> None:
        """One sequence stops using these blocks, given in table order: later ones will be evicted first."""
        for i in reversed(block_ids):
            block = self._blocks[i]
            assert block.num_sequences > 0, f"block {i} released more often than acquired"
            block.num_sequences -= 1
            self.num_shared -= block.num_sequences == 1
            block.incoming = False
            self._settle(i)

    def register(self, block_id: int, name: bytes) -> int:
        """Names a full block that one sequence owns. Returns the block that the sequence's table must use from now on.

        When the name is held already, that block is shared and `block_id` goes back: the bytes are the same, and a
        chain then never hangs on a parent that another block stands for.
        """
        if not self.enable_prefix_caching:
            return block_id
        if (held := self._by_name.get(name)) is not None:
            if held != block_id:
                self.acquire([held])
                self.release([block_id])
            return held
        self._blocks[block_id].name = name
        self._by_name[name] = block_id
        self._note(name, True)
        return block_id

    def arrived(self, block_ids: Iterable[int]) -> None:
        """Incoming blocks are ordinary ones of their sequence now (complete, or nothing was ever posted into them)."""
        for i in block_ids:
            self._blocks[i].incoming = False
            self._settle(i)

    # ---- leases

    def pin(self, block_ids: Sequence[int]) -> None:
        """All or none."""
        for i in block_ids:
            assert self._blocks[i].account is not Account.FREE, f"block {i} is free and cannot be leased"
        for i in block_ids:
            self._blocks[i].num_pins += 1
            self._settle(i)

    def unpin(self, block_ids: Sequence[int]) -> None:
        for i in reversed(block_ids):
            block = self._blocks[i]
            assert block.num_pins > 0, f"block {i} unpinned more often than pinned"
            block.num_pins -= 1
            self._settle(i)

    # ---- index and checks

    def take_changes(self) -> NameChanges:
        """Name changes since the last call."""
        changed, self._changed = self._changed, {}
        return NameChanges([n for n, held in changed.items() if held], [n for n, held in changed.items() if not held])

    def held_names(self) -> list[bytes]:
        """All names, parents before children."""
        return list(self._by_name)

    def check(self) -> None:
        """Recounts everything from the blocks themselves; raises AssertionError where the account does not balance."""
        counts = [0] * len(Account)
        for i, block in enumerate(self._blocks):
            assert block.account is block.due_account(), f"block {i} stands in {block.account.name}: {block}"
            assert (i in self._cached) == (block.account is Account.CACHED), f"block {i} in the wrong list: {block}"
            assert block.name is None or self._by_name[block.name] == i, f"block {i} has another's name"
            counts[block.account] += 1
        assert self.num_shared == sum(b.num_sequences > 1 for b in self._blocks), "the count of shared blocks is off"
        assert counts == self._counts, f"accounts {self._counts}, recounted {counts}"
        assert sum(counts) == self.num_blocks, f"accounts {counts} do not sum to {self.num_blocks} blocks"
        assert len(self._free) == counts[Account.FREE], "the free list disagrees with the account"

    def _settle(self, block_id: int) -> None:
        block = self._blocks[block_id]
        if (due := block.due_account()) is not block.account:
            self._move(block_id, block, due)
            if due is Account.FREE:
                self._free.append(block_id)
            elif due is Account.CACHED:
                self._cached[block_id] = None

    def _move(self, block_id: int, block: _Block, to: Account) -> None:
        if block.account is Account.CACHED:
            del self._cached[block_id]
        self._counts[block.account] -= 1
        self._counts[to] += 1
        block.account = to

    def _forget(self, block_id: int) -> None:
        """Evicts a cached block."""
        block = self._blocks[block_id]
        assert block.name is not None
        del self._by_name[block.name]
        self._note(block.name, False)
        block.name = None
        self._settle(block_id)

    def _note(self, name: bytes, held: bool) -> None:
        if self._changed.get(name, held) is not held:
            del self._changed[name]
        else:
            self._changed[name] = held
