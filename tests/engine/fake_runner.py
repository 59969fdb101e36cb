"""A runner without a model. Each KV slot holds a digest of the whole token history up to it, so a step that reads a
wrong, stale or unwritten slot is caught where it happens, and every produced token depends on all tokens before it."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence

from kvferry.services.engine.beam import BeamSearch
from kvferry.services.engine.sampler import SampledToken
from kvferry.services.engine.schedule import Schedule

VOCAB = 50


def extend(history: bytes, token: int) -> bytes:
    return hashlib.blake2b(history + token.to_bytes(4, "little"), digest_size=8).digest()


def next_token(history: bytes, seed: int) -> int:
    digest = hashlib.blake2b(history + seed.to_bytes(8, "little"), digest_size=4).digest()
    return int.from_bytes(digest, "little") % VOCAB


def generate(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """What any correct engine must produce for this prompt."""
    history = b""
    for token in prompt:
        history = extend(history, token)
    out: list[int] = []
    for _ in range(num_tokens):
        out.append(next_token(history, seed))
        history = extend(history, out[-1])
    return out


def top_tokens(history: bytes, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` most likely next tokens after a history, with their log-probabilities."""
    rng = random.Random(history)
    found = [(token, -rng.random() * 3) for token in rng.sample(range(VOCAB), count)]
    return tuple(sorted(found, key=lambda one: -one[1]))


def beam_search(prompt: Sequence[int], search: BeamSearch, num_candidates: int) -> list[tuple[int, ...]]:
    """What any correct engine must find for this prompt, best first."""
    while True:
        tops = []
        for beam in search.running:
            history = b""
            for token in (*prompt, *beam.token_ids):
                history = extend(history, token)
            tops.append(top_tokens(history, num_candidates))
        if search.step(tops) is None:
            return [found.beam.token_ids for found in search.results()]


class FakeRunner:
    num_threads = 1

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots: list[list[bytes]] = [[b"unwritten"] * block_size for _ in range(num_blocks)]
        self.fail_next = False
        self.during: Callable[[], None] | None = None  # runs while a step computes
        self.num_tokens = 0

    def execute(self, schedule: Schedule) -> list[SampledToken]:
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("boom")
        for copy in schedule.copies:
            self.slots[copy.target] = list(self.slots[copy.source])
        if self.during is not None:
            self.during()
        sampled: list[SampledToken] = []
        for row in schedule.rows:
            seq, table = row.sequence, row.sequence.block_table
            history = b""
            for i in range(row.start):  # all that attention would read
                history = extend(history, seq.token_ids[i])
                block = table[i // self.block_size]
                found = self.slots[block][i % self.block_size]
                assert found == history, f"{seq.key}: position {i} reads {found!r} from block {block}"
            for i in range(row.start, row.start + row.num_tokens):
                history = extend(history, seq.token_ids[i])
                self.slots[table[i // self.block_size]][i % self.block_size] = history
            self.num_tokens += row.num_tokens
            if row.samples:
                assert seq.sampling is not None
                for one in (seq, *seq.branches):
                    token = next_token(history, seq.sampling.seed + 100 * one.index)
                    sampled.append(SampledToken(token, 0.0, top_tokens(history, seq.sampling.logprobs or 0)))
        return sampled

    def fill(self, block_ids: Sequence[int], tokens: Sequence[int], first_block: int) -> None:
        """What a complete transfer leaves behind: the KV of `tokens`, blocks from `first_block` on."""
        history, size = b"", self.block_size
        for i, token in enumerate(tokens):
            history = extend(history, token)
            block = i // size - first_block
            if 0 <= block < len(block_ids):
                self.slots[block_ids[block]][i % size] = history

    def spoil(self, block_ids: Sequence[int]) -> None:
        """What a failed transfer leaves behind."""
        for block_id in block_ids:
            self.slots[block_id] = [b"spoiled"] * self.block_size
