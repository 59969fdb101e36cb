"""One choice of one prompt while it is produced: its text, its log-probabilities, how it ended.

The only place where a node's tokens become what a client reads. Independent of how many tokens come in one output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.common.requests import FinishReason, RequestOutput, TokenLogprobs
from kvferry.services.gateway.text import Detokenizer, Scanned, StopScanner, TokenBytes


@dataclass(frozen=True, slots=True)
class TextParams:
    """What a request says about turning tokens into text. `only_prompt`: nothing of the completion is wanted."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    only_prompt: bool = False
    return_token_ids: bool = False


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """A token with its log-probability; its text begins at `offset` characters of the choice's text.

    `logprobs` None: the first token of a prompt, which has none.
    """

    token_id: int
    offset: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class Piece:
    """What a choice has gained since the last piece. `finish_reason` is on exactly one, the last.

    `prompt`: the prompt's own tokens with their log-probabilities, on the first piece where they were asked for.
    """

    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt: list[TokenEntry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)

    @classmethod
    def join(cls, pieces: Sequence[Piece]) -> Piece:
        """Consecutive pieces of one choice as one."""
        entries = [entry for piece in pieces for entry in piece.entries]
        prompt = [entry for piece in pieces for entry in piece.prompt]
        last = pieces[-1] if pieces else cls()
        token_ids = [token_id for piece in pieces for token_id in piece.token_ids]
        text = "".join([piece.text for piece in pieces])
        return cls(text, entries, last.finish_reason, last.stop_reason, prompt, token_ids)


class Choice:
    __slots__ = ("_detokenizer", "_num_chars", "_params", "_scanner", "finish_reason", "num_tokens")

    def __init__(self, tokens: TokenBytes, params: TextParams, first_offset: int = 0) -> None:
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self._params = params
        self._detokenizer = Detokenizer(tokens, skip_special_tokens=params.skip_special_tokens)
        self._scanner = StopScanner(params.stops, include_stop=params.include_stop) if params.stops else None
        self._num_chars = first_offset

    def push(self, output: RequestOutput) -> Piece:
        """Takes a node's output for this choice. Must not be called once `finish_reason` is set.

        A stop string that appears ends the choice although the node goes on: tokens behind it are dropped, and
        the caller tells the node. `finish_reason` STOP with the output's own still None says so.
        """
        assert self.finish_reason is None, "a finished choice got an output"
        piece = Piece()
        if self._params.only_prompt:
            self.finish_reason = piece.finish_reason = FinishReason.LENGTH
            return piece
        for at, token_id in enumerate(output.token_ids):
            self.num_tokens += 1
            if self._params.return_token_ids:
                piece.token_ids.append(token_id)
            if self._params.logprobs is not None and at < len(output.logprobs):
                piece.entries.append(TokenEntry(token_id, self._num_chars, output.logprobs[at]))
            if output.stop_token_id is None or not self._is_hidden_stop(output, at):
                text = self._detokenizer.push(token_id)
                self._num_chars += len(text)
                if self._emit(piece, text):
                    return piece
        if output.finish_reason is not None:
            self._finish(piece, output)
        return piece

    def _is_hidden_stop(self, output: RequestOutput, at: int) -> bool:
        """The token that stopped the choice is counted, but it is not text unless asked for."""
        last = at == len(output.token_ids) - 1
        return last and output.stop_token_id == output.token_ids[at] and not self._params.include_stop

    def _emit(self, piece: Piece, text: str) -> bool:
        """Adds text that may go out; True when a stop string ended the choice."""
        if self._scanner is None or self.num_tokens <= self._params.min_tokens:
            piece.text += text
            return False
        return self._take(piece, self._scanner.push(text))

    def _take(self, piece: Piece, scanned: Scanned) -> bool:
        piece.text += scanned.text
        if scanned.stop is None:
            return False
        self.finish_reason = piece.finish_reason = FinishReason.STOP
        piece.stop_reason = scanned.stop
        return True

    def _finish(self, piece: Piece, output: RequestOutput) -> None:
        if self._emit(piece, self._detokenizer.flush()):
            return
        if self._scanner is not None and self._take(piece, self._scanner.flush()):
            return
        self.finish_reason = piece.finish_reason = output.finish_reason
        if output.stop_token_id is not None and output.stop_token_id in self._params.stop_token_ids:
            piece.stop_reason = output.stop_token_id
