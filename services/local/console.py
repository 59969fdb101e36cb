"""What `kvferry up` shows: its own lines, the children's with a coloured name in front, and one line that moves."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_NAME_WIDTH = 10
_CLEAR = "\r\x1b[K"


class Console:
    """Never raises when the terminal is gone: a cluster must drain all the same."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self.is_terminal = self._stream.isatty()
        self._colour = self.is_terminal and "NO_COLOR" not in os.environ
        self._names: list[str] = []
        self._status = ""

    def say(self, text: str) -> None:
        self._line("kvferry", 1, text)

    def log(self, name: str, text: str) -> None:
        if name not in self._names:
            self._names.append(name)
        self._line(name, _COLOURS[self._names.index(name) % len(_COLOURS)], text)

    def status(self, text: str) -> None:
        """The line below all others, replaced by the next one; "" removes it. Not shown where there is no terminal."""
        self._status = text
        if self.is_terminal:
            self._write(f"{_CLEAR}{text}")

    def _line(self, name: str, colour: int, text: str) -> None:
        label = f"{name:<{_NAME_WIDTH}} |"
        label = f"\x1b[{colour}m{label}\x1b[0m" if self._colour else label
        below = self._status if self.is_terminal else ""
        self._write(f"{_CLEAR if below else ''}{label} {text}\n{below}")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
