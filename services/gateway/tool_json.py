"""JSON objects in the text of a model: where one ends while it is written, and how its members stand there."""

from __future__ import annotations

import json
import math
import re
from typing import Any

WHITESPACE = " \t\r\n"
_SPACE = re.compile(f"[{WHITESPACE}]*")
_PLAIN_JSON = frozenset('{}[]:,+-.0123456789eEtrufalsn"' + WHITESPACE)


class ObjectScan:
    """Finds where the JSON object ends whose first character is the first one scanned. Looks at each once."""

    __slots__ = ("_depth", "_escaped", "_in_string", "at", "is_broken")

    def __init__(self, at: int) -> None:
        self.at = at  # the next character to look at
        self.is_broken = False  # by the one at `at`
        self._depth = 0
        self._in_string = self._escaped = False

    def ended(self, text: str) -> bool:
        """Whether the object ends in what is there, just before `at`."""
        while self.at < len(text):
            char = text[self.at]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char not in _PLAIN_JSON:
                self.is_broken = True
                return False
            elif char == '"':
                self._in_string = True
            else:
                self._depth += (char == "{") - (char == "}")
            self.at += 1
            if not self._depth:
                return True
        return False


def loads(text: str) -> Any:
    """Raises ValueError also on what only Python takes for JSON: NaN, and numbers that are infinite to it."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def members(text: str) -> dict[str, str]:
    """The values of an object that is known to be JSON, as they are written."""
    decoder = json.JSONDecoder()

    def after_space(at: int) -> int:
        space = _SPACE.match(text, at)
        assert space is not None, "it matches nothing, too"
        return space.end()

    found: dict[str, str] = {}
    at = after_space(1)
    while text[at] != "}":
        key, at = decoder.raw_decode(text, at)
        begin = after_space(after_space(at) + 1)
        _, end = decoder.raw_decode(text, begin)
        found[key] = text[begin:end]
        at = after_space(end)
        if text[at] == ",":
            at = after_space(at + 1)
    return found


def _finite(number: str) -> float:
    value = float(number)
    if not math.isfinite(value):
        raise ValueError(f"{number} is too large")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
