"""Tokens that a request's own lists forbid: all but `allowed_token_ids`, and what would complete a bad word."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def allow_only(logits: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Bans all other tokens of one row [vocab], in place."""
    ids = torch.tensor(token_ids, device=logits.device)
    ids = ids[ids < len(logits)]
    kept = logits[ids]
    logits.fill_(-torch.inf)
    logits[ids] = kept


def completing(words: Sequence[Sequence[int]], output: Sequence[int]) -> list[int]:
    """Last tokens of the words whose other tokens the output ends with."""
    return [word[-1] for word in words if len(word) <= len(output) + 1 and _ends_with(output, word[:-1])]


def _ends_with(output: Sequence[int], tokens: Sequence[int]) -> bool:
    return not tokens or tuple(output[-len(tokens) :]) == tuple(tokens)
