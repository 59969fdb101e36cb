"""Every key name, in one place, and which keys of a cluster share a hash slot.

Blocks are spread by their names over 16 tags whose slots lie evenly over all slots, so each master of a cluster has the
same share of every chain: no prefix, however hot, makes one of them hotter than the others, a node need not know where
in a chain a block is, and when a master is away the rest of the chain still tells who holds it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot

from kvferry.common.errors import ConfigError
from kvferry.services.index.base import MAX_EXPECTED
from kvferry.services.index.scripts import EXPECT, EXPECTED, MATCH
from kvferry.services.index.wire import Command

NUM_TAGS = 16
MAX_READ, MAX_READ_PER_TAG = 128, 32
"""Blocks that a lookup reads, and those that it reads of each tag of a cluster. It needs some twenty unless many nodes
hold different lengths of a prompt; then what they hold may be understated, by a 64th of it.
"""


class Keys:
    """`tag` is what the hash slot is made of; without a cluster there is one and it does not matter."""

    def __init__(self, namespace: str, is_cluster: bool) -> None:
        if not namespace or any(c in namespace for c in "{} \n"):
            raise ConfigError(f"namespace {namespace!r}: must not be empty, and without braces and blanks")
        self.node_tag = namespace
        self.nodes = f"{{{namespace}}}:nodes"
        self.number = f"{{{namespace}}}:number"
        self.memory = f"{{{namespace}}}:memory"
        self.node_prefix = f"{{{namespace}}}:node:"
        self.past_prefix = f"{{{namespace}}}:past:"
        self._tags = _even_tags() if is_cluster else ("",)
        self._max_read = MAX_READ_PER_TAG if is_cluster else MAX_READ
        self._namespace = namespace
        self._block_prefix = {tag: f"{namespace}:b:{_braced(tag)}".encode() for tag in self._tags}

    def at(self, tag: str, number: int) -> str:
        return f"{self._namespace}:at:{_braced(tag)}{number}"

    def blocks(self, tag: str, names: Iterable[bytes]) -> list[bytes]:
        """Keys of these blocks, all of this tag."""
        prefix = self._block_prefix[tag]
        return [prefix + name for name in names]

    def match(self, tag: str, names: Sequence[bytes]) -> Command:
        prefix = self._block_prefix[tag]
        return MATCH.call([prefix + names[0]], prefix, b"".join(names), len(names[0]), self._max_read)

    def expect(self, first: bytes, member: bytes, ttl_s: float) -> tuple[str, Command]:
        """Command and its tag."""
        tag = self._tag(first)
        return tag, EXPECT.call([self._soon(tag, first)], member, max(1, round(ttl_s * 1000)), MAX_EXPECTED)

    def expected(self, first: bytes) -> tuple[str, Command]:
        tag = self._tag(first)
        return tag, EXPECTED.call([self._soon(tag, first)], MAX_EXPECTED)

    def by_tag(self, names: Sequence[bytes]) -> dict[str, Sequence[int]]:
        """Tag -> positions of its names, in order."""
        if len(self._tags) == 1:
            return {self._tags[0]: range(len(names))} if names else {}
        found: dict[str, list[int]] = {}
        for i, name in enumerate(names):
            found.setdefault(self._tag(name), []).append(i)
        return dict(found)

    def _tag(self, name: bytes) -> str:
        return self._tags[name[0] % len(self._tags)]

    def _soon(self, tag: str, first: bytes) -> bytes:
        return f"{self._namespace}:soon:{_braced(tag)}".encode() + first


def _braced(tag: str) -> str:
    return f"{{{tag}}}" if tag else ""


def _even_tags() -> tuple[str, ...]:
    """The smallest number in each sixteenth of all slots, in order of slots."""
    width, found = REDIS_CLUSTER_HASH_SLOTS // NUM_TAGS, dict[int, str]()
    for number in itertools.count():
        found.setdefault(key_slot(str(number).encode()) // width, str(number))
        if len(found) == NUM_TAGS:
            return tuple(found[i] for i in range(NUM_TAGS))
    raise AssertionError("unreachable")
