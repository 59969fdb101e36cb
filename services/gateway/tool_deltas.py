"""Tool calls as OpenAI's clients read them: in a whole message, and as the deltas of a stream.

A choice ends with `tool_calls` exactly when it has made calls and none was cut off.
"""

from __future__ import annotations

import secrets
from typing import Any

from kvferry.services.gateway.choice import Piece
from kvferry.services.gateway.tool_parsers import Arguments, ToolCall, ToolCallParser

TOOL_CALLS = "tool_calls"


class CallDeltas:
    """The deltas of one choice."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def push(self, piece: Piece) -> list[dict[str, Any]]:
        """A call is its id and name, then its arguments, in one delta or in several."""
        parts = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            parts += self._parser.flush()
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, ToolCall):
                head = {"index": self._num_calls, "id": _call_id(), "type": "function"}
                deltas.append({"tool_calls": [head | {"function": {"name": part.name, "arguments": ""}}]})
                self._num_calls += 1
                part = Arguments(part.arguments)
            if isinstance(part, Arguments):
                if part.text:
                    more = {"index": self._num_calls - 1, "function": {"arguments": part.text}}
                    deltas.append({"tool_calls": [more]})
            else:
                deltas.append({"content": part})
        return deltas

    def finish_reason(self, piece: Piece) -> str | None:
        return _finish_reason(self._parser, piece)


def message_of(parser: ToolCallParser, piece: Piece) -> tuple[dict[str, Any], str | None]:
    """The message of a whole choice, but for its role, and its finish reason."""
    parts = parser.push(piece.text) + parser.flush()
    content = "".join(part for part in parts if isinstance(part, str))
    functions: list[dict[str, str]] = []
    for part in parts:
        if isinstance(part, ToolCall):
            functions.append({"name": part.name, "arguments": part.arguments})
        elif isinstance(part, Arguments):
            functions[-1]["arguments"] += part.text
    message: dict[str, Any] = {"content": content}
    if functions:
        calls = [{"id": _call_id(), "type": "function", "function": function} for function in functions]
        message = {"content": content or None, "tool_calls": calls}
    return message, _finish_reason(parser, piece)


def _finish_reason(parser: ToolCallParser, piece: Piece) -> str | None:
    return TOOL_CALLS if parser.has_called and not parser.is_cut_off else piece.finish_reason


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
