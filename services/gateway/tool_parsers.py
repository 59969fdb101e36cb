"""Tool calls in the text of a model, as they come: which part is a call, which is content. One parser per choice.

What comes out does not depend on how the text was cut. A call is told when it is whole, so that what turns out to be
none (broken JSON, a name that was not offered, an output that was cut off) is content, and nothing has to be taken
back. Nothing here knows of HTTP or of tokens.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

ToolFormat = Literal["hermes", "llama3_json"]

_BETWEEN = " \t\r\n"
_PLAIN_JSON = frozenset('{}[]:,+-.0123456789eEtrufalsn"' + _BETWEEN)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: a JSON object, as text."""

    name: str
    arguments: str


Part = str | ToolCall
"""What a parser tells: content, or a call."""


class _ObjectScan:
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


class ToolCallParser(ABC):
    """`push` pieces of the text, then `flush` once: the parts in their order, pieces of content joined."""

    keys: ClassVar[tuple[str, ...]]
    """Under which a call's arguments stand, the format's own first."""

    def __init__(self, names: Set[str]) -> None:
        """`names` of the tools that may be called."""
        self.has_called = False
        self._names = names
        self._held = ""  # text of which nothing has been told
        self._scan: _ObjectScan | None = None  # of what looks like a call at the beginning of `_held`

    def push(self, text: str) -> list[Part]:
        self._held += text
        return self._parts(final=False)

    def flush(self) -> list[Part]:
        """What is left, now that nothing follows."""
        return self._parts(final=True)

    def _parts(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        content = ""
        while self._held:
            before = len(self._held), self._scan
            part = self._look(final) if self._scan is None else self._end(self._scan, final)
            if isinstance(part, ToolCall):
                parts += [content, part] if content else [part]
                content = ""
            else:
                content += part
            if (len(self._held), self._scan) == before:
                break
        return [*parts, content] if content else parts

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken

    @abstractmethod
    def _look(self, final: bool) -> str:
        """Takes content from `_held`; sets `_scan` once a call may begin there. Neither: more text is needed."""

    @abstractmethod
    def _no_call(self, num_chars: int) -> str:
        """What looked like a call is none, seen at the character `num_chars`: the content to take."""

    def _end(self, scan: _ObjectScan, final: bool) -> Part:
        """The call, once its object has ended."""
        if scan.ended(self._held):
            self._scan = None
            call = self._call(self._held[self._held.index("{") : scan.at])
            if call is None:
                return self._no_call(scan.at)
            self.has_called = True
            self._take(scan.at)
            return call
        if scan.is_broken or final:
            self._scan = None
            return self._no_call(scan.at)
        return ""

    def _call(self, text: str) -> ToolCall | None:
        try:
            data: Any = json.loads(text, parse_constant=_refuse)
            name = data["name"]
            arguments = next(data[key] for key in self.keys if key in data)
            if isinstance(name, str) and name in self._names and isinstance(arguments, dict):
                return ToolCall(name, _dumps(arguments))
        except (ValueError, KeyError, StopIteration, RecursionError):
            pass
        return None


def _dumps(arguments: dict[str, Any]) -> str:
    """Raises ValueError on numbers that JSON does not have. Half a surrogate pair stays an escape."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text if text.isprintable() or not _has_surrogate(text) else json.dumps(arguments)


def _has_surrogate(text: str) -> bool:
    return any("\ud800" <= char <= "\udfff" for char in text)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class HermesParser(ToolCallParser):
    """Hermes and Qwen: `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, anywhere in the text, any number.

    The closing tag may be missing. White space around calls is no content.
    """

    keys = ("arguments", "parameters")
    OPEN, CLOSE = "<tool_call>", "</tool_call>"
    _closing = False  # a call has ended, and its closing tag has not been seen yet

    def _look(self, final: bool) -> str:
        if self._closing and not self._take_close(final):
            return ""
        at = self._held.find(self.OPEN)
        if at < 0:
            text = self._held.rstrip(_BETWEEN) if final else _without_beginning(self._held, self.OPEN)
            if final and (text or not self.has_called):
                return self._take(len(self._held))
            if final:
                self._held = ""
            return self._take(len(text))
        if text := self._held[:at].rstrip(_BETWEEN):
            return self._take(len(text))
        rest = self._held[at + len(self.OPEN) :].lstrip(_BETWEEN)
        if rest.startswith("{"):
            self._scan = _ObjectScan(len(self._held) - len(rest))
        elif rest or final:
            return self._take(at + len(self.OPEN))
        return ""

    def _take_close(self, final: bool) -> bool:
        """Takes the closing tag, where there is one; False while that cannot be told."""
        rest = self._held.lstrip(_BETWEEN)
        if not final and rest != self.CLOSE and self.CLOSE.startswith(rest):
            return False
        self._closing = False
        if rest.startswith(self.CLOSE):
            self._held = rest.removeprefix(self.CLOSE)
        return True

    def _no_call(self, num_chars: int) -> str:
        return self._take(num_chars)

    def _call(self, text: str) -> ToolCall | None:
        call = super()._call(text)
        self._closing = call is not None
        return call


def _without_beginning(text: str, marker: str) -> str:
    """Without white space at the end, and what may be the beginning of a marker behind it."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return text[:-size].rstrip(_BETWEEN)
    return text.rstrip(_BETWEEN)


class LlamaJsonParser(ToolCallParser):
    """Llama 3: the whole text is `{"name": …, "parameters": {…}}`, or several with `;` between them.

    Text that begins otherwise is content, as is all from the first object that is no call.
    """

    keys = ("parameters", "arguments")
    TAG = "<|python_tag|>"
    _is_content = False

    def _look(self, final: bool) -> str:
        if self._is_content:
            return self._take(len(self._held))
        rest = self._held.lstrip(_BETWEEN + ";," if self.has_called else _BETWEEN)
        rest = rest.removeprefix(self.TAG).lstrip(_BETWEEN)
        if rest.startswith("{"):
            self._scan = _ObjectScan(len(self._held) - len(rest))
        elif final and not rest and self.has_called:
            self._held = ""
        elif final or not self.TAG.startswith(rest):
            self._is_content = True
            return self._take(len(self._held))
        return ""

    def _no_call(self, num_chars: int) -> str:
        self._is_content = True
        return self._take(len(self._held))


PARSERS: dict[ToolFormat, type[ToolCallParser]] = {"hermes": HermesParser, "llama3_json": LlamaJsonParser}


def format_of_template(source: str) -> ToolFormat | None:
    """The form in which a chat template tells the model to call tools; None where it is another one, or none."""
    if "tools" not in source or "<function=" in source:
        return None
    if HermesParser.OPEN in source:
        return "hermes"
    return "llama3_json" if '"parameters": ' in source else None
