"""From token ids to text, as they come: incremental detokenisation and stop strings. One object of each per choice.

What comes out does not depend on how the tokens arrived: pushing them one by one, in lumps, or all at once joins to
the same text. Nothing here knows of HTTP or of nodes.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class TokenBytes(Protocol):
    """What a detokeniser needs of a tokenizer."""

    def token_bytes(self, token_id: int) -> bytes: ...

    def is_special(self, token_id: int) -> bool: ...


class Detokenizer:
    """Turns one choice's tokens into text. Never emits half a character: its first bytes wait for the rest.

    Bytes that can never become a character come out as U+FFFD, as soon as that is certain.
    """

    __slots__ = ("_pending", "_skip_special", "_tokens")

    def __init__(self, tokens: TokenBytes, *, skip_special_tokens: bool = True) -> None:
        self._tokens = tokens
        self._skip_special = skip_special_tokens
        self._pending = b""

    def push(self, token_id: int) -> str:
        if self._skip_special and self._tokens.is_special(token_id):
            return ""
        raw = self._pending + self._tokens.token_bytes(token_id)
        text, used = codecs.utf_8_decode(raw, "replace", False)
        self._pending = raw[used:]
        return text

    def flush(self) -> str:
        """What an unfinished character comes to, now that nothing follows. A second call returns nothing."""
        text, _ = codecs.utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class Scanned(NamedTuple):
    """`text` may go out; `stop` is the stop string that ended it, if one did."""

    text: str
    stop: str | None = None


class StopScanner:
    """Finds the stop string that starts earliest in the text (of several at one place, the shortest).

    Text that may still turn out to be the beginning of a stop string is held back until that is decided.
    """

    __slots__ = ("_held", "_include", "_longest", "_stops")

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        self._stops = sorted(stops, key=len)
        self._longest = len(self._stops[-1])
        self._include = include_stop
        self._held = ""

    def push(self, text: str) -> Scanned:
        if not text:
            return Scanned("")
        held = self._held + text
        found = self._earliest(held)
        waiting = self._first_beginning(held)
        if found is not None and found[0] <= waiting:
            return self._stop(held, *found)
        self._held = held[waiting:]
        return Scanned(held[:waiting])

    def flush(self) -> Scanned:
        """Nothing follows: a stop string that was only begun is text, and one behind its beginning counts."""
        held, self._held = self._held, ""
        found = self._earliest(held)
        return Scanned(held) if found is None else self._stop(held, *found)

    def _stop(self, held: str, at: int, stop: str) -> Scanned:
        self._held = ""
        return Scanned(held[: at + len(stop) if self._include else at], stop)

    def _earliest(self, held: str) -> tuple[int, str] | None:
        """The first place where a whole stop string stands. `_stops` is sorted, so the shortest wins a tie."""
        best: tuple[int, str] | None = None
        for stop in self._stops:
            at = held.find(stop)
            if at >= 0 and (best is None or at < best[0]):
                best = at, stop
        return best

    def _first_beginning(self, held: str) -> int:
        """The first place from which all that is left may be the beginning of a longer stop string."""
        for at in range(max(0, len(held) - self._longest + 1), len(held)):
            tail = held[at:]
            if any(stop.startswith(tail) and len(stop) > len(tail) for stop in self._stops):
                return at
        return len(held)
