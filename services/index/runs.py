"""From packed holders of some blocks of a chain to how many leading blocks each instance holds.

A holder is a big-endian uint32: the instance's number, and in the two lowest bits the tier (0: device; the others are
free for host memory and beyond). Holders are in ascending order.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence

HOLDER_BYTES = 4
TIER_BITS = 2
MAX_DEAD = 8
"""Dead holders that a block may carry along."""


def packed(number: int) -> bytes:
    return struct.pack(">I", number << TIER_BITS)


def leading(holders: Sequence[tuple[int, bytes]], live: Iterable[int]) -> dict[int, int]:
    """Holders by position, in order -> how many leading blocks each live number holds (none: left out).

    What an instance holds is closed under prefix, so a block that is not told of counts if a later one is held.
    """
    runs: dict[int, int] = {}
    running, known = set(live), 0  # all of `running` are known to hold the first `known`
    last: bytes | None = None
    for position, value in holders:
        if value != last:
            last = value
            for number in running.difference(_numbers(value)):
                running.discard(number)
                if known:
                    runs[number] = known
            if not running:
                return runs
        known = position + 1
    return runs | dict.fromkeys(running, known) if known else runs


def crowded(holders: Iterable[tuple[int, bytes]], live: set[int]) -> list[int]:
    """Positions of blocks with many holders that are not alive."""

    def num_dead(value: bytes) -> int:
        count = len(value) // HOLDER_BYTES
        return count - len(live.intersection(_numbers(value))) if count > MAX_DEAD else 0

    return [position for position, value in holders if num_dead(value) > MAX_DEAD]


def _numbers(value: bytes) -> list[int]:
    return [word >> TIER_BITS for word in struct.unpack(f">{len(value) // HOLDER_BYTES}I", value)]
