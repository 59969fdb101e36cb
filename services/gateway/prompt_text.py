"""What a client gets back of its own prompt: `echo`, and log-probabilities of the prompt's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.common.requests import TokenLogprobs
from kvferry.services.gateway.choice import Piece, TokenEntry
from kvferry.services.gateway.text import Detokenizer, TokenBytes


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt as it is shown. Token i of it begins at `offsets[i]` characters of `text`.

    `echo`: the text and, with `logprobs`, the tokens stand before those of each choice. `prompt_logprobs`: vLLM's field
    of that name is filled.
    """

    token_ids: tuple[int, ...]
    text: str
    offsets: tuple[int, ...]
    echo: bool
    logprobs: bool
    prompt_logprobs: bool

    @property
    def num_chars(self) -> int:
        """Characters before the completion's own."""
        return len(self.text) if self.echo else 0

    def opening(self, logprobs: Sequence[TokenLogprobs]) -> Piece:
        """What precedes a choice's first piece. `logprobs` has an entry for each token but the first."""
        if not self.logprobs and not self.prompt_logprobs:
            return Piece(self.text)
        found = (None, *logprobs)
        tokens = [TokenEntry(*each) for each in zip(self.token_ids, self.offsets, found, strict=True)]
        return Piece(
            self.text if self.echo else "",
            tokens if self.echo and self.logprobs else [],
            prompt=tokens if self.prompt_logprobs else [],
        )


def align(
    tokens: TokenBytes, token_ids: Sequence[int], text: str | None, *, skip_special_tokens: bool
) -> tuple[str, tuple[int, ...]]:
    """The text of a prompt and where its tokens begin in it. `text` None: the prompt was given as token ids.

    A tokenizer adds tokens (and SentencePiece a space) before or behind the text it was given: these have no length.
    """
    detokenizer = Detokenizer(tokens, skip_special_tokens=skip_special_tokens and text is None)
    shown, offsets = "", []
    for token_id in token_ids:
        offsets.append(len(shown))
        shown += detokenizer.push(token_id)
    shown += detokenizer.flush()
    if text is None:
        return shown, tuple(offsets)
    at = max(shown.find(text), 0)  # -1: the tokenizer has changed characters; places are then approximate
    return text, tuple(min(max(offset - at, 0), len(text)) for offset in offsets)
