"""Draws the next token of every sequence of a step, in one vectorised pass.

A draw depends on the logits, the request's own parameters, and (seed, choice index, position): not on the batch, on
other draws or on any generator's state. So a preempted or moved sequence continues with the same text. Order of work,
as in vLLM: grammar, allowed tokens, bad words, min_tokens and logit bias, penalties, greedy choice or temperature,
min-p, top-k, top-p, draw. Log-probabilities are those of the raw logits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from kvferry.common.errors import KvferryError
from kvferry.kernels import ops
from kvferry.services.engine.grammar import forbid
from kvferry.services.engine.sample_rows import Ints, SampleRow, SampleRows
from kvferry.services.engine.token_masks import allow_only, completing
from kvferry.services.engine.top_tokens import best_tokens, exact_tops, to_host

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy: dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class SampledToken:
    """`logprob` is None and `top` empty unless the row asked for them; `top` falls, ties by token id.

    `error`: the row's grammar has failed, and the token means nothing.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: KvferryError | None = None


def sample(logits: torch.Tensor, rows: SampleRows) -> list[SampledToken]:
    """One token for each row of `logits` [n, vocab] float32, which are left as they are."""
    if len(rows) != len(logits):
        raise ValueError(f"{len(logits)} rows of logits for {len(rows)} rows to sample")
    if not len(rows):
        return []
    return _with_logprobs(logits, rows.table["num_logprobs"], _choose(logits, rows))


def _choose(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    """Tokens [n]."""
    is_drawn = rows.table["temperature"] >= _GREEDY_BELOW
    is_special = is_drawn
    if rows.edited:
        is_special = is_drawn.copy()
        is_special[list(rows.edited)] = True
    special = is_special.nonzero()[0]
    if not len(special):
        return logits.argmax(-1)
    if len(special) == len(rows):
        return _choose_special(logits.clone() if rows.edited else logits, rows, is_drawn)
    token_ids, where = logits.argmax(-1), torch.from_numpy(special).to(logits.device)
    token_ids[where] = _choose_special(logits[where], rows.take(special), is_drawn[special])
    return token_ids


def _choose_special(logits: torch.Tensor, rows: SampleRows, is_drawn: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Tokens [n] of rows that are drawn or edited. Changes the logits of those that are edited."""
    if rows.edited:
        _constrain_and_edit(logits, rows.edited)
    drawn = is_drawn.nonzero()[0]
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    token_ids = logits.argmax(-1)
    if len(drawn):
        where = torch.from_numpy(drawn).to(logits.device)
        token_ids[where] = _draw(logits[where], rows.take(drawn))
    return token_ids


def _draw(logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
    table = rows.table
    uniform = uniforms(table["seed"], table["index"], rows.positions)
    limits = np.array((table["temperature"], uniform, table["top_p"], table["min_p"], table["top_k"]))
    limits_there = torch.from_numpy(limits).to(logits.device)  # float64, which holds them all: by one copy
    temperature = limits_there[0].float()
    probs = torch.softmax(logits / temperature.unsqueeze(-1), dim=-1)
    is_cut = (table["top_k"] > 0) | (table["top_p"] < 1) | (table["min_p"] > 0)
    if is_cut.any():
        top_p, min_p, top_k = limits_there[2], limits_there[3].float(), limits_there[4].long()
        if is_cut.all():
            probs = ops.filter_tokens(probs, top_k, top_p, min_p)
        else:
            cut = torch.from_numpy(is_cut.nonzero()[0]).to(logits.device)
            probs[cut] = ops.filter_tokens(probs[cut], top_k[cut], top_p[cut], min_p[cut])
    return ops.draw_tokens(probs, limits_there[1])


def _constrain_and_edit(logits: torch.Tensor, rows: Mapping[int, SampleRow]) -> None:
    """Applies grammars, then everything else. Where that forbids all that a grammar allows, the grammar rules."""
    allowed: dict[int, torch.Tensor] = {}
    for i, row in rows.items():
        if row.mask is not None:
            forbid(logits[i], row.mask)
            if row.is_edited:
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


def _edit(logits: torch.Tensor, rows: Mapping[int, SampleRow]) -> None:
    """Applies masks, biases and penalties in place. No entry occurs twice in one table."""
    biases, repetitions, costs = _Edits(), _Edits(), _Edits()
    for i, row in rows.items():
        p, output = row.params, row.output_token_ids
        if p.allowed_token_ids:
            allow_only(logits[i], p.allowed_token_ids)
        bias = dict(p.logit_bias)
        bias |= dict.fromkeys(completing(p.bad_words, output), -torch.inf)
        if row.is_early:
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


def _with_logprobs(logits: torch.Tensor, num_logprobs: Ints, token_ids: torch.Tensor) -> list[SampledToken]:
    """`num_logprobs` [n]: how many of the best come with each token; -1: not even its own."""
    wanting = (num_logprobs >= 0).nonzero()[0]
    if not len(wanting):
        return list(map(SampledToken, token_ids.tolist()))
    wanted = token_ids
    if len(wanting) < len(token_ids):
        where = torch.from_numpy(wanting).to(logits.device)
        logits, wanted = logits[where], token_ids[where]
    logprobs, counts = torch.log_softmax(logits, dim=-1), num_logprobs[wanting]
    best = best_tokens(logprobs, int(counts.max()))
    ids, chosen, *tops = to_host(token_ids, logprobs.gather(1, wanted.unsqueeze(1)), *best)
    sampled = list(map(SampledToken, ids.astype(np.int64).tolist()))
    each = zip(wanting.tolist(), chosen.ravel().tolist(), exact_tops(logprobs, tops, counts), strict=True)
    for i, logprob, top in each:
        sampled[i] = SampledToken(sampled[i].token_id, logprob, top)
    return sampled


def uniforms(seeds: npt.NDArray[np.uint64], indices: Ints, positions: Ints) -> npt.NDArray[np.float64]:
    """One number in [0, 1) with 53 random bits for each (seed, choice index, position)."""
    counters = np.zeros((len(seeds), 4), np.uint64)
    counters[:, 0], counters[:, 1] = positions, indices
    words = philox4x32(counters, seeds)
    high, low = words[:, 0] >> np.uint64(5), words[:, 1] >> np.uint64(6)
    return (high * 2.0**26 + low) / 2.0**53


_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_KEY_STEPS = np.arange(10, dtype=np.uint64)[:, None, None] * np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)
_LOW, _HIGH = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counters: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Philox4x32-10: `counters` [n, 4] of 32-bit words and `keys` [n] of 64 bits -> [n, 4] random 32-bit words.

    Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
    """
    even, odd = counters.T[::2], counters.T[1::2]
    for round_keys in (np.array((keys & _LOW, keys >> _HIGH)) + _KEY_STEPS) & _LOW:
        products = (even * _MULTIPLIERS)[::-1]
        even, odd = (products >> _HIGH) ^ odd ^ round_keys, products & _LOW
    return np.stack((even[0], odd[0], even[1], odd[1]), axis=1)
