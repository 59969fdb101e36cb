"""Log-probabilities of rows and each row's best tokens, read from a device in one copy for all rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from kvferry.common.requests import TokenLogprobs
from kvferry.services.engine.sample_rows import Ints

Floats = npt.NDArray[np.float64]
Top = tuple[tuple[int, float], ...]
"""Token ids with their log-probabilities, which fall; of equally likely ones the smaller id comes first."""

SPARE = 8
"""So many more of the best are taken than are wanted: `topk` leaves to chance which of equally likely tokens it takes.
Logits of 16 bits are often alike."""


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of one given token for each row of `logits` [n, vocab] float32, with its rank among all and the best ones."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))  # [n, 1]
    ranks = (logprobs >= chosen).sum(-1)
    each, rank, *best = to_host(chosen, ranks, *best_tokens(logprobs, num_top))
    tops = exact_tops(logprobs, best, np.full(len(logprobs), num_top))
    rows = zip(each.ravel().tolist(), tops, rank.astype(np.int64).tolist(), strict=True)
    return [TokenLogprobs(*row) for row in rows]


def best_tokens(logprobs: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and token ids of each row's best `count` and some to spare, [n, any] each."""
    found = logprobs.topk(min(count + SPARE, logprobs.shape[1]) if count > 0 else 0)
    return found.values, found.indices


def to_host(*parts: torch.Tensor) -> list[Floats]:
    """As float64, which holds token ids and float32 exactly, by one copy: a device is waited for once."""
    flat = torch.cat([part.double().view(-1) for part in parts]).cpu().numpy()
    ends = accumulate(part.numel() for part in parts)
    return [flat[end - part.numel() : end].reshape(part.shape) for end, part in zip(ends, parts, strict=True)]


def exact_tops(logprobs: torch.Tensor, best: Sequence[Floats], counts: Ints) -> Iterator[Top]:
    """Of each row the `counts` [n] best tokens. `best`: what `best_tokens` found in `logprobs` for the most of them."""
    values, token_ids = best
    if (values[:, 1:] == values[:, :-1]).any():
        order = np.lexsort((token_ids, -values), axis=-1)
        values, token_ids = np.take_along_axis(values, order, -1), np.take_along_axis(token_ids, order, -1)
    pairs = zip(token_ids.astype(np.int64).tolist(), values.tolist(), counts.tolist(), strict=True)
    for i, (ids, likely, count) in enumerate(pairs):
        if count <= 0:
            yield ()
        elif len(ids) == logprobs.shape[1] or likely[-1] < likely[count - 1]:
            yield tuple(zip(ids[:count], likely[:count], strict=True))
        else:  # more are equally likely than there are to spare
            yield _top(logprobs[i], count)


def _top(logprobs: torch.Tensor, count: int) -> Top:
    last = logprobs.topk(min(count, len(logprobs))).values[-1]
    token_ids = (logprobs >= last).nonzero().flatten()
    pairs = zip(token_ids.tolist(), logprobs[token_ids].tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])
