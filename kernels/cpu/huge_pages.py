"""Memory for weights in huge pages, where the kernel gives them to those who ask. Knows only tensors.

A decode step reads all weights once, at the speed of memory: in pages of 4 kB every page is looked up anew, and the
hardware's read-ahead ends at each of them. `transparent_hugepage/enabled` is `madvise` on many machines, so malloc's
memory has no others.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

_CHUNK_BYTES = 64 * 2**20
"""Weights share mappings of this size, or else each would end in a huge page of which it needs a part."""
_ALIGNMENT = 64


class _Chunks:
    """Hands out parts of mappings. A mapping is given back when the last tensor in it is gone."""

    def __init__(self) -> None:
        self._mapping = mmap.mmap(-1, mmap.PAGESIZE)
        self._used = len(self._mapping)

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int]:
        """A mapping, and where in it the part begins; zeros."""
        if self._used + num_bytes > len(self._mapping):
            self._mapping, self._used = mmap.mmap(-1, max(num_bytes, _CHUNK_BYTES), flags=_FLAGS), 0
            with contextlib.suppress(AttributeError, OSError):  # no Linux, or a kernel without huge pages
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        start, self._used = self._used, self._used + num_bytes + -num_bytes % _ALIGNMENT
        return self._mapping, start


_FLAGS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
_chunks = _Chunks()


def zeros(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Not for two threads at once."""
    count = math.prod(shape)
    if count == 0:
        return torch.zeros(*shape, dtype=dtype)
    mapping, start = _chunks.take(count * dtype.itemsize)
    return torch.frombuffer(mapping, dtype=dtype, count=count, offset=start).view(*shape)
