"""The prefix index: which nodes live, how loaded they are, and which of them holds which block.

Everything it says is a hint (DESIGN promise 5): a wrong answer costs time, never correctness. It never sees a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from kvferry.common.nodes import NodeRecord

MAX_EXPECTED = 16
"""Prompts that are remembered as on their way of those with the same first block: those that stay longest."""


class Matches(NamedTuple):
    """Live instance id -> how many *leading* names; instances with none are left out. `coming` are those that somebody
    expects it to hold soon, whether it holds some of them already or not."""

    held: dict[str, int]
    coming: dict[str, int]


class Nodes(NamedTuple):
    """Live nodes, ordered by node id. `memory` is another one than before where the store has forgotten any of them: it
    was emptied, or is back with an old copy. Those that left or fell silent do not change it."""

    records: list[NodeRecord]
    memory: bytes


class PrefixIndex(Protocol):
    """Implementations: `MemoryIndex` (tests, one process) and `RedisIndex`. `tests/index/conformance.py` checks any.

    Every method is safe to call concurrently and raises `IndexUnavailable` when the store does not answer in time.
    """

    async def announce(self, record: NodeRecord, ttl_s: float) -> bool:
        """Registers the node or renews it with a fresh load; it is gone `ttl_s` seconds after the last call.

        True when the store does not know the instance (its first call, or it was gone), or has missed some of its
        updates, or lost some (a flush): it then knows no block of it, and the caller stores all its blocks again.

        Announcing a new instance of the same `node_id` removes the older instance at once. Only a different
        `instance_id` counts as new; an older instance that announces again after that is refused with `Unavailable`.
        """
        ...

    async def withdraw(self, instance_id: str) -> None:
        """Removes the node and makes everything it stored unreachable. Idempotent."""

    async def nodes(self) -> Nodes: ...

    async def store(self, instance_id: str, names: Sequence[bytes]) -> None:
        """The node now holds these blocks. Idempotent. Instances that this object has not announced are ignored.

        One client speaks for an instance. Updates are applied in the order of its calls, whenever they arrive, and each
        at most once. One that raised IndexUnavailable may have been applied in part, or be so later, though never after
        a later one: the caller gives it again. What announce answers tells of updates that got lost without an error.
        """

    async def remove(self, instance_id: str, names: Sequence[bytes]) -> None:
        """The node dropped these blocks. Idempotent; names it never stored are skipped."""

    async def expect(self, instance_id: str, names: Sequence[bytes], ttl_s: float) -> None:
        """A prompt with these names has been sent to the instance, which will hold them soon. Forgotten after `ttl_s`;
        when the same is said again, at the later end.

        From any caller, of any instance; nothing is told of those that do not live. Of prompts with the same first
        name `MAX_EXPECTED` are remembered.
        """

    async def match(self, names: Sequence[bytes]) -> Matches:
        """One round trip, whatever `len(names)`. A node's holdings are closed under prefix.

        What is coming may be told up to a 64th of the expected prompt too short, and is exact for all of it.
        """
        ...

    async def aclose(self) -> None:
        """Closes connections. A second call does nothing."""
