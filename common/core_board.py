"""Cores that nodes of one machine lend each other: each has its share, and the others' while these compute nothing.

All of them map one small file. A node's row says how many cores it counts as its own and until when it computes; nobody
else writes there. The row is claimed by a lock that the system takes back when the process ends, however it ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from pathlib import Path

from kvferry.common.errors import ConfigError

_ROWS, _FIELDS = 64, 8
_SHARE, _COMPUTES_UNTIL = 0, 1
_ROW_BYTES = 8 * _FIELDS
"""A cache line."""
_SILENT_NS = 2_000_000_000
"""Who has said nothing for so long computes nothing: it was stopped, or has died."""
_LINGER_NS = 50_000_000
"""So long after its last step a node keeps its cores: under load the next one is near, and threads that come and go
between steps cost more than they bring."""


class CoreBoard:
    """One node's view. `share` and `num_cores` as given: of `num_cores` in all, `share` are this node's own.

    `begin` and `idle` are for one thread. Raises ConfigError where the file cannot be used.
    """

    def __init__(self, path: Path, share: int, num_cores: int) -> None:
        self._num_cores, self._own_share = num_cores, share
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise ConfigError(f"core_board {path}: {exc.strerror}", param="core_board") from exc
        self._row = _claim(self._file, path)
        os.truncate(self._file, _ROWS * _ROW_BYTES)
        self._map = mmap.mmap(self._file, _ROWS * _ROW_BYTES)
        self._words = memoryview(self._map).cast("q")
        self._own = self._row * _FIELDS
        self._computes = False
        self._words[self._own + _COMPUTES_UNTIL] = 0
        self._words[self._own + _SHARE] = share

    def begin(self) -> int:
        """Says that this node computes -> how many threads it may have now. To be asked every few milliseconds."""
        now = time.monotonic_ns()  # the same clock in all processes of a machine
        words, own = self._words, self._own
        self._computes = True
        words[own + _COMPUTES_UNTIL] = now + _SILENT_NS
        taken = sum(
            words[row + _SHARE]
            for row in range(0, _ROWS * _FIELDS, _FIELDS)
            if row != own and words[row + _COMPUTES_UNTIL] > now
        )
        return max(self._own_share, self._num_cores - taken)

    def idle(self) -> None:
        """Says that this node computes nothing for now: others may soon have its cores."""
        if self._computes:
            self._computes = False
            self._words[self._own + _COMPUTES_UNTIL] = time.monotonic_ns() + _LINGER_NS

    def close(self) -> None:
        self._words[self._own + _COMPUTES_UNTIL] = 0
        self._words.release()
        self._map.close()
        os.close(self._file)


def _claim(file: int, path: Path) -> int:
    for row in range(_ROWS):
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, _ROW_BYTES, row * _ROW_BYTES)
        except OSError:  # another process has it
            continue
        return row
    raise ConfigError(f"core_board {path}: all of its {_ROWS} rows are taken", param="core_board")
