"""Tool calls in the text of a model, as they come: which part is a call, which is content. One parser per choice.

What comes out does not depend on how the text was cut. A call that the model makes of its own accord is told when it
is whole, so that what turns out to be none (broken JSON, a name that was not offered, an output that was cut off) is
content, and nothing has to be taken back. One that a grammar holds the output to cannot turn out to be none: it is
told from its name on, its arguments as they come. Nothing here knows of HTTP or of tokens.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Set
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvferry.services.gateway.tool_json import WHITESPACE, ObjectScan, loads, members

ToolFormat = Literal["hermes", "llama3_json"]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments`: a JSON object as the model wrote it, or how it begins, where `Arguments` follow."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """More of the last call's."""

    text: str


Part = str | ToolCall | Arguments
"""What a parser tells: content, a call, or more of it."""
_HEAD = re.compile(r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class ToolCallParser(ABC):
    """`push` pieces of the text, then `flush` once: the parts in their order, pieces of content joined."""

    keys: ClassVar[tuple[str, ...]]
    """Under which a call's arguments stand, the format's own first."""

    def __init__(self, names: Set[str], *, is_held: bool = False) -> None:
        """`names` of the tools that may be called; `is_held`: a grammar keeps what begins as one from being none."""
        self.has_called = False
        self._names = names
        self._is_held = is_held
        self._inside: ObjectScan | None = None  # of arguments that are told as they come, from the beginning of `_held`
        self._ends = False  # such arguments have ended, and the brace of their call has not been seen yet
        self._held = ""  # text of which nothing has been told
        self._scan: ObjectScan | None = None  # of what looks like a call at the beginning of `_held`

    def push(self, text: str) -> list[Part]:
        self._held += text
        return self._parts(final=False)

    def flush(self) -> list[Part]:
        """What is left, now that nothing follows."""
        return self._parts(final=True)

    @property
    def is_cut_off(self) -> bool:
        """Whether the last call's arguments have not ended."""
        return self._inside is not None

    def _parts(self, *, final: bool) -> list[Part]:
        parts: list[Part] = []
        content = ""
        while self._held:
            before = self._state
            part = self._next(final)
            if isinstance(part, str):
                content += part
            else:
                parts += [content, part] if content else [part]
                content = ""
            if self._state == before:
                break
        return [*parts, content] if content else parts

    @property
    def _state(self) -> tuple[object, ...]:
        return len(self._held), self._scan, self._inside, self._ends

    def _next(self, final: bool) -> Part:
        if self._inside is not None:
            return self._more(self._inside)
        if self._ends:
            return self._take_brace()
        return self._look(final) if self._scan is None else self._end(self._scan, final)

    def _take(self, num_chars: int) -> str:
        taken, self._held = self._held[:num_chars], self._held[num_chars:]
        return taken

    @abstractmethod
    def _look(self, final: bool) -> str:
        """Takes content from `_held`; sets `_scan` once a call may begin there. Neither: more text is needed."""

    @abstractmethod
    def _no_call(self, num_chars: int) -> str:
        """What looked like a call is none, seen at the character `num_chars`: the content to take."""

    def _end(self, scan: ObjectScan, final: bool) -> Part:
        """The call, once its object has ended, or where it is held, once its arguments begin."""
        if self._is_held and (call := self._beginning()) is not None:
            return call
        if scan.ended(self._held):
            self._scan = None
            call = self._call(self._held[self._held.index("{") : scan.at])
            if call is None:
                return self._no_call(scan.at)
            self._made_call()
            self._take(scan.at)
            return call
        if scan.is_broken or final:
            self._scan = None
            return self._no_call(scan.at)
        return ""

    def _made_call(self) -> None:
        self.has_called = True

    def _call(self, text: str) -> ToolCall | None:
        try:
            data: Any = loads(text)
            name = data["name"]
            key = next(key for key in self.keys if key in data)
            if isinstance(name, str) and name in self._names and isinstance(data[key], dict):
                return ToolCall(name, members(text)[key])
        except (ValueError, KeyError, StopIteration, RecursionError):
            pass
        return None

    # ---- a call whose arguments are told as they come

    def _beginning(self) -> ToolCall | None:
        at = self._held.index("{")
        head = _HEAD.match(self._held, at)
        try:
            name: str = json.loads(head[1]) if head is not None else ""
        except ValueError:
            return None
        if head is None or name not in self._names:
            return None
        self._made_call()
        self._take(head.end())
        self._scan, self._inside = None, ObjectScan(0)
        return ToolCall(name, "")

    def _more(self, inside: ObjectScan) -> Part:
        if inside.ended(self._held) or inside.is_broken:
            self._inside, self._ends = None, True
        taken = self._take(inside.at)
        inside.at = 0
        return Arguments(taken)

    def _take_brace(self) -> str:
        rest = self._held.lstrip(WHITESPACE)
        self._ends = not rest
        self._held = rest.removeprefix("}")
        return ""


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
            text = self._held.rstrip(WHITESPACE) if final else _without_beginning(self._held, self.OPEN)
            if final and (text or not self.has_called):
                return self._take(len(self._held))
            if final:
                self._held = ""
            return self._take(len(text))
        if text := self._held[:at].rstrip(WHITESPACE):
            return self._take(len(text))
        rest = self._held[at + len(self.OPEN) :].lstrip(WHITESPACE)
        if rest.startswith("{"):
            self._scan = ObjectScan(len(self._held) - len(rest))
        elif rest or final:
            return self._take(at + len(self.OPEN))
        return ""

    def _take_close(self, final: bool) -> bool:
        """Takes the closing tag, where there is one; False while that cannot be told."""
        rest = self._held.lstrip(WHITESPACE)
        if not final and rest != self.CLOSE and self.CLOSE.startswith(rest):
            return False
        self._closing = False
        if rest.startswith(self.CLOSE):
            self._held = rest.removeprefix(self.CLOSE)
        return True

    def _no_call(self, num_chars: int) -> str:
        return self._take(num_chars)

    def _made_call(self) -> None:
        super()._made_call()
        self._closing = True


def _without_beginning(text: str, marker: str) -> str:
    """Without white space at the end, and what may be the beginning of a marker behind it."""
    for size in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:size]):
            return text[:-size].rstrip(WHITESPACE)
    return text.rstrip(WHITESPACE)


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
        rest = self._held.lstrip(WHITESPACE + ";," if self.has_called else WHITESPACE)
        rest = rest.removeprefix(self.TAG).lstrip(WHITESPACE)
        if rest.startswith("{"):
            self._scan = ObjectScan(len(self._held) - len(rest))
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
