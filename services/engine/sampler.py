"""Draws the next token of every sequence of a step, in one vectorised pass.

A draw depends on the logits, the request's own parameters, and (seed, choice index, position): not on the batch, on
other draws or on any generator's state. So a preempted or moved sequence continues with the same text. Order of work,
as in vLLM: grammar, allowed tokens, bad words, min_tokens and logit bias, penalties, greedy choice or temperature,
min-p, top-k, top-p, draw. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvferry.common.errors import KvferryError
from kvferry.common.requests import SamplingParams, TokenLogprobs
from kvferry.kernels import ops
from kvferry.services.engine.grammar import Mask, forbid
from kvferry.services.engine.token_masks import allow_only, completing, masks_tokens

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits is sampled with.

    `position` is the index of the token being drawn, counted from the start of the prompt; `index` the choice's.
    The prompt is read only where penalties are in use, the output also for bad words and (its length) min_tokens.
    """

    params: SamplingParams
    position: int
    index: int = 0
    prompt_token_ids: Sequence[int] = ()
    output_token_ids: Sequence[int] = ()
    eos_token_ids: Sequence[int] = ()
    mask: Mask | None = None


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`logprob` is None and `top` empty unless the row asked for them; `top` falls, ties by token id.

    `error`: the row's grammar has failed, and the token means nothing.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: KvferryError | None = None


def sample(logits: torch.Tensor, rows: Sequence[SampleRow]) -> list[SampledToken]:
    """One token for each row of `logits` [n, vocab] float32, which are left as they are."""
    if len(rows) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} rows to sample")
    if not rows:
        return []
    special = [i for i, row in enumerate(rows) if _is_drawn(row) or _is_edited(row) or row.mask is not None]
    if not special:
        return _with_logprobs(logits, rows, logits.argmax(-1))
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    if plain := sorted(set(range(len(rows))).difference(special)):
        token_ids[plain] = logits[plain].argmax(-1)
    token_ids[special] = _sample_special(logits[special], [rows[i] for i in special])
    return _with_logprobs(logits, rows, token_ids)


def _is_drawn(row: SampleRow) -> bool:
    return row.params.temperature >= _GREEDY_BELOW


def _is_edited(row: SampleRow) -> bool:
    """Whether parameters change the row's logits before the greedy choice or the draw."""
    p = row.params
    neutral = p.repetition_penalty == 1 and p.presence_penalty == 0 and p.frequency_penalty == 0
    early = len(row.output_token_ids) < p.min_tokens
    return not neutral or bool(p.logit_bias) or early or masks_tokens(p)


def _sample_special(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    """Tokens [n] for a private copy of the rows' logits, which it changes."""
    _constrain_and_edit(logits, rows)
    drawn = [i for i, row in enumerate(rows) if _is_drawn(row)]
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    token_ids = logits.argmax(-1)
    if drawn:
        token_ids[drawn] = _draw(logits[drawn], [rows[i] for i in drawn])
    return token_ids


def _draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> torch.Tensor:
    params = [row.params for row in rows]
    temperature = torch.tensor([p.temperature for p in params], device=logits.device)
    probs = torch.softmax(logits / temperature.unsqueeze(-1), dim=-1)
    cut = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    if cut:
        probs[cut] = ops.filter_tokens(
            probs[cut],
            torch.tensor([params[i].top_k for i in cut], device=logits.device),
            torch.tensor([params[i].top_p for i in cut], device=logits.device, dtype=torch.float64),
            torch.tensor([params[i].min_p for i in cut], device=logits.device),
        )
    uniform = uniforms([p.seed for p in params], [row.index for row in rows], [row.position for row in rows])
    return ops.draw_tokens(probs, torch.from_numpy(uniform).to(logits.device))


def _constrain_and_edit(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Applies grammars, then everything else. Where that forbids all that a grammar allows, the grammar rules."""
    allowed: dict[int, torch.Tensor] = {}
    for i, row in enumerate(rows):
        if row.mask is not None:
            forbid(logits[i], row.mask)
            if _is_edited(row):
                allowed[i] = logits[i].clone()
    _edit(logits, rows)
    for i, kept in allowed.items():
        if logits[i].max() == -torch.inf:
            logits[i] = kept


@dataclass(slots=True)
class _Edits:
    """Entries of the logits to change, and by what: columns of one table."""

    rows: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def add(self, row: int, token: int, value: float) -> None:
        self.rows.append(row)
        self.tokens.append(token)
        self.values.append(value)

    def on(self, logits: torch.Tensor) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
        """Index and values on the logits' device, without tokens past the vocabulary."""
        device, values = logits.device, torch.tensor(self.values, dtype=torch.float32, device=logits.device)
        rows, tokens = torch.tensor(self.rows, device=device), torch.tensor(self.tokens, device=device)
        known = (tokens >= 0) & (tokens < logits.shape[1])
        return (rows[known], tokens[known]), values[known]


def _edit(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    """Applies masks, biases and penalties in place. No entry occurs twice in one table."""
    biases, repetitions, costs = _Edits(), _Edits(), _Edits()
    for i, row in enumerate(rows):
        p, output = row.params, row.output_token_ids
        if p.allowed_token_ids:
            allow_only(logits[i], p.allowed_token_ids)
        bias = dict(p.logit_bias)
        bias |= dict.fromkeys(completing(p.bad_words, output), -torch.inf)
        if len(output) < p.min_tokens:
            bias |= dict.fromkeys((*row.eos_token_ids, *p.stop_token_ids), -torch.inf)
        for token, value in bias.items():
            biases.add(i, token, value)
        if p.repetition_penalty != 1:
            for token in {*row.prompt_token_ids, *output}:
                repetitions.add(i, token, p.repetition_penalty)
        if p.presence_penalty or p.frequency_penalty:
            for token, count in Counter(output).items():
                costs.add(i, token, p.presence_penalty + p.frequency_penalty * count)
    if biases.rows:
        where, values = biases.on(logits)
        logits[where] += values
    if repetitions.rows:
        where, values = repetitions.on(logits)
        old = logits[where]
        logits[where] = torch.where(old > 0, old / values, old * values)
    if costs.rows:
        where, values = costs.on(logits)
        logits[where] -= values


def _with_logprobs(logits: torch.Tensor, rows: Sequence[SampleRow], token_ids: torch.Tensor) -> list[SampledToken]:
    ids: list[int] = token_ids.tolist()
    wanting = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    if not wanting:
        return [SampledToken(token_id) for token_id in ids]
    logprobs = torch.log_softmax(logits if len(wanting) == len(rows) else logits[wanting], dim=-1)
    chosen: list[float] = logprobs.gather(1, token_ids[wanting].unsqueeze(1)).squeeze(1).tolist()
    sampled = [SampledToken(token_id) for token_id in ids]
    for i, logprob, row_logprobs in zip(wanting, chosen, logprobs, strict=True):
        sampled[i] = SampledToken(ids[i], logprob, _top(row_logprobs, rows[i].params.logprobs or 0))
    return sampled


def token_logprobs(logits: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Of one given token for each row of `logits` [n, vocab] float32, with its rank among all and the best ones."""
    logprobs = torch.log_softmax(logits, dim=-1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logits.device).unsqueeze(1))  # [n, 1]
    ranks: list[int] = (logprobs >= chosen).sum(-1).tolist()
    each = zip(chosen.squeeze(1).tolist(), logprobs, ranks, strict=True)
    return [TokenLogprobs(logprob, _top(row, num_top), rank) for logprob, row, rank in each]


def _top(logprobs: torch.Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` best tokens. `topk` alone would leave to chance which of equally likely tokens come first."""
    if count <= 0:
        return ()
    last = logprobs.topk(min(count, len(logprobs))).values[-1]
    token_ids = (logprobs >= last).nonzero().flatten()
    pairs = zip(token_ids.tolist(), logprobs[token_ids].tolist(), strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0]))[:count])


def uniforms(seeds: Sequence[int], indices: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice index, position)."""
    mask = 2**64 - 1
    keys = np.array([seed & mask for seed in seeds], np.uint64)
    words = philox4x32(np.array([[p, i, 0, 0] for p, i in zip(positions, indices, strict=True)], np.uint64), keys)
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    return (high * 2.0**26 + low) / 2.0**53


def philox4x32(counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10: `counters` [n, 4] of 32-bit words and `keys` [n] of 64 bits -> [n, 4] random 32-bit words.

    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1, c2, c3 = counters.T
    k0, k1 = keys & low, keys >> shift
    for _ in range(10):
        left, right = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (right >> shift) ^ c1 ^ k0, right & low, (left >> shift) ^ c3 ^ k1, left & low
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low, (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack((c0, c1, c2, c3), axis=1)
