"""What clients get back of a chat, tool calls included: OpenAI's response objects, whole and as server-sent events."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import orjson

from kvferry.services.gateway.choice import Piece, TokenEntry
from kvferry.services.gateway.responses import LOWEST_LOGPROB, BaseWriter, Usage
from kvferry.services.gateway.tokenizer import Tokenizer
from kvferry.services.gateway.tool_deltas import CallDeltas, message_of
from kvferry.services.gateway.tool_parsers import ToolCallParser


class ChatWriter(BaseWriter):
    object_whole = "chat.completion"
    object_chunk = "chat.completion.chunk"

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        include_usage: bool = False,
        prompt_ids: Sequence[Sequence[int]] | None = None,
        new_parser: Callable[[], ToolCallParser] | None = None,
    ) -> None:
        """`new_parser`: of tool calls in the text of one choice; None: all text is content."""
        super().__init__(response_id, model, tokenizer, include_usage=include_usage, prompt_ids=prompt_ids)
        self._new_parser = new_parser
        self._calls: dict[int, CallDeltas] = {}

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        shown = []
        for index, piece in enumerate(choices):
            finish_reason: str | None = piece.finish_reason
            message: dict[str, Any] = {"content": piece.text}
            if self._new_parser is not None:
                message, finish_reason = message_of(self._new_parser(), piece)
            shown.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "refusal": None, **message},
                    "logprobs": self._logprobs(piece.entries),
                    "finish_reason": finish_reason,
                    "stop_reason": piece.stop_reason,
                    **self._ids(piece),
                }
            )
        tail = {"usage": usage.to_dict(), "system_fingerprint": None, **self._prompt()}
        return orjson.dumps(
            self._head | {"choices": shown, "prompt_logprobs": self._prompt_logprobs(choices[0].prompt)} | tail
        )

    def opening(self, num_choices: int) -> bytes:
        role = {"delta": {"role": "assistant", "content": ""}}
        head = self._chunk_head
        self._chunk_head = head | self._prompt()
        events = [self._chunk(index, role, Piece(), None, None) for index in range(num_choices)]
        self._chunk_head = head
        return b"".join(events)

    def _prompt(self) -> dict[str, Any]:
        return {"prompt_token_ids": self._prompt_ids[0]} if self._prompt_ids else {}

    def event(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        if self._new_parser is not None:
            return self._event_with_calls(index, piece, usage, self._new_parser)
        if piece.finish_reason is None and not piece.entries and usage is None and self._prompt_ids is None:
            if not piece.text:
                return b""
            return b'%b%d,"delta":{"content":%b}%b' % (self._prefix, index, orjson.dumps(piece.text), self._suffix)
        delta = {"content": piece.text} if piece.text or piece.finish_reason is None else {}
        return self._chunk(index, {"delta": delta}, piece, self._logprobs(piece.entries), usage)

    def _event_with_calls(
        self, index: int, piece: Piece, usage: Usage | None, new_parser: Callable[[], ToolCallParser]
    ) -> bytes:
        """One event for each part. Log-probabilities are on the first, those of text that is held back, too."""
        if (calls := self._calls.get(index)) is None:
            calls = self._calls[index] = CallDeltas(new_parser())
        deltas = calls.push(piece)
        if (piece.entries or piece.token_ids) and not deltas:
            deltas = [{"content": ""}]
        logprobs, shown = self._logprobs(piece.entries), Piece(token_ids=piece.token_ids)
        events = []
        for delta in deltas:
            events.append(self._chunk(index, {"delta": delta}, shown, logprobs, usage))
            logprobs, shown = None, Piece()
        if (finish_reason := piece.finish_reason and calls.finish_reason(piece)) is not None:
            ending = Piece(finish_reason=piece.finish_reason, stop_reason=piece.stop_reason)
            events.append(self._chunk(index, {"delta": {}}, ending, None, usage, finish_reason=finish_reason))
        return b"".join(events)

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        if not entries:
            return None
        return {"content": [self._entry(entry) for entry in entries], "refusal": None}

    def _entry(self, entry: TokenEntry) -> dict[str, Any]:
        assert entry.logprobs is not None, "a chat has no entries of its prompt"
        top = [self._token(token_id, logprob) for token_id, logprob in entry.logprobs.top]
        return self._token(entry.token_id, entry.logprobs.logprob) | {"top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {
            "token": raw.decode("utf-8", "replace"),
            "logprob": max(logprob, LOWEST_LOGPROB),
            "bytes": list(raw),
        }
