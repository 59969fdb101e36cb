"""A prompt on its way to a node, as Redis remembers it: at most 64 of its names, whatever its length.

    instance id, 0, number of names as a big-endian uint32, the names at `_position(0)`, `_position(1)`, ...

The names are evenly spaced, and the last one is among them: equal names at one place mean equal ones before it, so what
another prompt shares with this one is found by halving, to a 64th of this one's length.
"""

from __future__ import annotations

import bisect
import struct
from collections.abc import Collection, Iterable, Sequence

MAX_SAMPLES = 64


def packed(instance_id: str, names: Sequence[bytes]) -> bytes:
    count = len(names)
    samples = (names[_position(i, count)] for i in range(min(count, MAX_SAMPLES)))
    return b"%s\0%s%s" % (instance_id.encode(), struct.pack(">I", count), b"".join(samples))


def coming(prompts: Iterable[bytes], names: Sequence[bytes], live: Collection[str]) -> dict[str, int]:
    """Live instance -> leading names of these that it has been sent."""
    found: dict[str, int] = {}
    for prompt in prompts:
        instance, _, rest = prompt.partition(b"\0")
        name = instance.decode()
        if name in live and (shared := _num_shared(rest, names)) > found.get(name, 0):
            found[name] = shared
    return found


def _num_shared(prompt: bytes, names: Sequence[bytes]) -> int:
    count, width = struct.unpack_from(">I", prompt)[0], len(names[0])

    def differs(i: int) -> bool:
        start, at = 4 + i * width, _position(i, count)
        return at >= len(names) or prompt[start : start + width] != names[at]

    equal = bisect.bisect(range(min(count, MAX_SAMPLES)), False, key=differs)
    return _position(equal - 1, count) + 1 if equal else 0


def _position(sample: int, count: int) -> int:
    """Of `count` names."""
    return (sample + 1) * count // min(count, MAX_SAMPLES) - 1
