"""One bar that moves on a terminal; a few plain lines anywhere else."""

from __future__ import annotations

import sys
import time
from typing import Self, TextIO

WIDTH = 30
PLAIN_STEP = 0.25
REDRAW_S = 0.1


class Progress:
    """Shows `label` and a share in [0, 1]. A context manager: the line ends with it, whatever share was reached."""

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        self._label = label
        self._stream = stream or sys.stderr
        self._tty = self._stream.isatty()
        self._shown = -1.0
        self._drawn_at = 0.0
        self(0.0)

    def __call__(self, share: float) -> None:
        if self._tty:
            if share < 1 and time.monotonic() - self._drawn_at < REDRAW_S:
                return
            self._drawn_at = time.monotonic()
            bar = "#" * int(share * WIDTH)
            self._write(f"\r{self._label} [{bar:<{WIDTH}}] {share:4.0%}")
        elif share // PLAIN_STEP > self._shown // PLAIN_STEP:
            self._write(f"{self._label}: {share:.0%}\n")
        self._shown = share

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._tty:
            self._write("\n")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
