"""How long a prompt and its completion may be: what the client asked for against the model's context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.common.errors import BadRequest, ContextTooLong
from kvferry.common.requests import StructuredOutput
from kvferry.services.gateway.openai import Generation


@dataclass(frozen=True, slots=True)
class Terms:
    """What the prompts of one request have in common. `param`: the field that they come from."""

    limit: int
    default_max_tokens: int
    bad_words: tuple[tuple[int, ...], ...]
    param: str
    structured: StructuredOutput | None


def truncated(body: Generation, ids: Sequence[int], limit: int) -> Sequence[int]:
    """The last `truncate_prompt_tokens` of the prompt; -1: as many as leave room for the completion."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return ids
    if keep > limit:
        raise BadRequest(
            f"truncate_prompt_tokens: must be -1 or from 1 to {limit}, the model's context length; got {keep}",
            param="truncate_prompt_tokens",
        )
    return ids[-max(limit - (body.token_limit or 1), 1) :] if keep == -1 else ids[-keep:]


def max_tokens_of(body: Generation, num_tokens: int, terms: Terms, cap: int | None) -> int:
    """Checks lengths. What the client asked for must fit; our own default is cut to what is left."""
    limit, param = terms.limit, terms.param
    if not num_tokens:
        raise BadRequest(f"{param}: the prompt has no tokens", param=param)
    room, asked = limit - num_tokens, body.token_limit
    if room < 1 or (asked or 0) > room:
        completion = f" and {asked} of completion" if asked is not None else ""
        raise ContextTooLong(
            f"this model's maximum context length is {limit} tokens; the request has {num_tokens} tokens of prompt"
            f"{completion}: shorten the {param} or the completion",
            param=param if room < 1 else "max_tokens",
        )
    max_tokens = min(terms.default_max_tokens, room) if asked is None else max(asked, 1)
    max_tokens = max_tokens if cap is None else min(max_tokens, cap)
    if body.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens must not exceed max_tokens, {max_tokens}; got {body.min_tokens}", param="min_tokens"
        )
    return max_tokens
