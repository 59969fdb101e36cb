"""What clients get back: OpenAI's response objects, whole and as server-sent events (chats: `chat_writer.py`).

One writer per request. The parts of an event that never change are encoded once; per token only the text is.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from kvferry.common.requests import TokenLogprobs
from kvferry.services.gateway.choice import Piece, TokenEntry
from kvferry.services.gateway.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
LOWEST_LOGPROB = -9999.0  # JSON has no minus infinity


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Writer(Protocol):
    """Both endpoints' writers. Indexes are those of choices over all prompts."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        """The whole response as one JSON object."""

    def opening(self, num_choices: int) -> bytes:
        """Events before the first text."""

    def event(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        """What one choice has gained, or b"" when that is nothing a client could see."""

    def usage_event(self, usage: Usage) -> bytes:
        """The last event where the client asked for usage: no choices."""


class BaseWriter:
    """What both endpoints' writers have in common."""

    object_whole: str
    object_chunk: str

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        include_usage: bool = False,
        prompt_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """`prompt_ids`: each choice's prompt, where the client wants token ids."""
        self._prompt_ids = prompt_ids
        self._head: dict[str, Any] = {
            "id": response_id,
            "object": self.object_whole,
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = tokenizer
        self._chunk_head = self._head | {"object": self.object_chunk}
        self._null_usage = {"usage": None} if include_usage else {}
        self._prefix = b"data: " + orjson.dumps(self._chunk_head)[:-1] + b',"choices":[{"index":'
        self._suffix = b',"logprobs":null,"finish_reason":null}]'
        self._suffix += b',"usage":null}\n\n' if include_usage else b"}\n\n"

    def usage_event(self, usage: Usage) -> bytes:
        return _event(self._chunk_head | {"choices": [], "usage": usage.to_dict()})

    def _chunk(
        self,
        index: int,
        content: Mapping[str, Any],
        piece: Piece,
        logprobs: Any,
        usage: Usage | None,
        *,
        finish_reason: str | None = None,
    ) -> bytes:
        """`finish_reason` goes before the piece's own."""
        finish_reason = finish_reason or piece.finish_reason
        choice = {"index": index, **content, "logprobs": logprobs, "finish_reason": finish_reason, **self._ids(piece)}
        if finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        tail = self._null_usage if usage is None else {"usage": usage.to_dict()}
        return _event(self._chunk_head | {"choices": [choice]} | tail)

    def _ids(self, piece: Piece) -> dict[str, Any]:
        return {} if self._prompt_ids is None else {"token_ids": piece.token_ids}

    def _prompt_logprobs(self, entries: Sequence[TokenEntry]) -> list[dict[str, Any] | None] | None:
        """vLLM's field: for each token of the prompt its own log-probability and the best ones, by token id."""
        return [None if e.logprobs is None else self._ranked(e.token_id, e.logprobs) for e in entries] or None

    def _ranked(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, Any]:
        ranked = [(token_id, logprobs.logprob, logprobs.rank)]
        ranked += [(other, logprob, rank) for rank, (other, logprob) in enumerate(logprobs.top, 1) if other != token_id]
        return {
            str(token_id): {
                "logprob": max(logprob, LOWEST_LOGPROB),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in ranked
        }


class CompletionWriter(BaseWriter):
    object_whole = "text_completion"
    object_chunk = "text_completion"

    def __init__(
        self,
        response_id: str,
        model: str,
        tokenizer: Tokenizer,
        *,
        include_usage: bool = False,
        prompt_ids: Sequence[Sequence[int]] | None = None,
    ) -> None:
        super().__init__(response_id, model, tokenizer, include_usage=include_usage, prompt_ids=prompt_ids)
        self._begun: set[int] = set()  # choices whose prompt's ids have been told

    def whole(self, choices: Sequence[Piece], usage: Usage) -> bytes:
        shown = [
            {
                "index": index,
                "text": piece.text,
                "logprobs": self._logprobs(piece.entries),
                "finish_reason": piece.finish_reason,
                "stop_reason": piece.stop_reason,
                **self._ids_of(index, piece),
                "prompt_logprobs": self._prompt_logprobs(piece.prompt),
            }
            for index, piece in enumerate(choices)
        ]
        return orjson.dumps(self._head | {"choices": shown, "usage": usage.to_dict(), "system_fingerprint": None})

    def opening(self, num_choices: int) -> bytes:
        return b""

    def event(self, index: int, piece: Piece, usage: Usage | None) -> bytes:
        if piece.finish_reason is None and not piece.entries and usage is None and self._prompt_ids is None:
            if not piece.text:
                return b""
            return b'%b%d,"text":%b%b' % (self._prefix, index, orjson.dumps(piece.text), self._suffix)
        shown = {"text": piece.text} | ({} if index in self._begun else self._ids_of(index, piece))
        self._begun.add(index)
        return self._chunk(index, shown, piece, self._logprobs(piece.entries), usage)

    def _ids_of(self, index: int, piece: Piece) -> dict[str, Any]:
        if self._prompt_ids is None:
            return {}
        return {"prompt_token_ids": self._prompt_ids[index]} | self._ids(piece)

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any] | None:
        if not entries:
            return None
        return {
            "tokens": [self._token(entry.token_id) for entry in entries],
            "token_logprobs": [e.logprobs and max(e.logprobs.logprob, LOWEST_LOGPROB) for e in entries],
            "top_logprobs": [e.logprobs and self._top(e.token_id, e.logprobs) for e in entries],
            "text_offset": [entry.offset for entry in entries],
        }

    def _top(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        """The k best and the token itself. Two ids with one text keep an entry each."""
        top: dict[str, float] = {}
        known = {candidate for candidate, _ in logprobs.top}
        for candidate, logprob in (*logprobs.top, *(((token_id, logprobs.logprob),) if token_id not in known else ())):
            name = self._token(candidate)
            top[name if name not in top else f"token_id:{candidate}"] = max(logprob, LOWEST_LOGPROB)
        return top

    def _token(self, token_id: int) -> str:
        """The token's text; OpenAI's `bytes:\\xe2\\x80` where it is not whole characters."""
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def error_event(body: bytes) -> bytes:
    """An error once the response has begun. What follows is DONE, as in vLLM."""
    return b"data: " + body + b"\n\n"


def _event(data: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
