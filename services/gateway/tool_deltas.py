"""Tool calls as OpenAI's clients read them: in a whole message, and as the deltas of a stream.

A choice ends with `tool_calls` exactly when it has made a call.
"""

from __future__ import annotations

import secrets
from typing import Any

from kvferry.services.gateway.choice import Piece
from kvferry.services.gateway.tool_parsers import ToolCall, ToolCallParser

TOOL_CALLS = "tool_calls"


class CallDeltas:
    """The deltas of one choice."""

    def __init__(self, parser: ToolCallParser) -> None:
        self._parser = parser
        self._num_calls = 0

    def push(self, piece: Piece) -> list[dict[str, Any]]:
        """A call is two deltas: its id and name, then its arguments."""
        parts = self._parser.push(piece.text)
        if piece.finish_reason is not None:
            parts += self._parser.flush()
        deltas: list[dict[str, Any]] = []
        for part in parts:
            if isinstance(part, ToolCall):
                index, self._num_calls = self._num_calls, self._num_calls + 1
                head = {"index": index, "id": _call_id(), "type": "function"}
                deltas.append({"tool_calls": [head | {"function": {"name": part.name, "arguments": ""}}]})
                deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]})
            else:
                deltas.append({"content": part})
        return deltas

    def finish_reason(self, piece: Piece) -> str | None:
        return TOOL_CALLS if self._num_calls else piece.finish_reason


def message_of(parser: ToolCallParser, piece: Piece) -> tuple[dict[str, Any], str | None]:
    """The message of a whole choice, but for its role, and its finish reason."""
    parts = parser.push(piece.text) + parser.flush()
    content = "".join(part for part in parts if isinstance(part, str))
    calls = [
        {"id": _call_id(), "type": "function", "function": {"name": part.name, "arguments": part.arguments}}
        for part in parts
        if isinstance(part, ToolCall)
    ]
    if not calls:
        return {"content": content}, piece.finish_reason
    return {"content": content or None, "tool_calls": calls}, TOOL_CALLS


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
