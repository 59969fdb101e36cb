"""A simulated node: steps of measured length, a pool with an LRU cache, a queue of prompts, running streams.

What a node does in a step is what ours do: first one token of each stream, then as many prompt tokens as its budget has
room for, shared by the engine's own rule (`engine/shares.py`). Time is that of the simulation, in seconds.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter

from kvferry.common.nodes import BlockAccounts, LayoutCard, NodeLoad, NodeRecord, Role, num_positions
from kvferry.services.engine.shares import goes_first, num_startable, share_out
from kvferry.services.engine.step_times import StepTimes
from kvferry.services.local.simulate.profile import NodeProfile
from kvferry.services.local.simulate.trace import BLOCK_TOKENS

MAX_STEP_MS = 100.0
MIN_CHUNK = 16


class Pool:
    """Blocks that sequences hold, and cached ones that give way to them, the least recently used first."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_held = 0
        self._cached: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def match(self, names: tuple[bytes, ...]) -> int:
        return next((i for i, name in enumerate(names) if name not in self._cached), len(names))

    def reserve(self, count: int) -> list[bytes] | None:
        """Names that were evicted for it, or None: there is no room, and nothing has changed."""
        if self.num_held + count > self.num_blocks:
            return None
        self.num_held += count
        return self._evict()

    def release(self, count: int, names: tuple[bytes, ...]) -> tuple[list[bytes], list[bytes]]:
        """The sequence's full blocks stay, cached: those that are new, and those evicted for them."""
        self.num_held -= count
        return self.keep(names)

    def keep(self, names: tuple[bytes, ...]) -> tuple[list[bytes], list[bytes]]:
        new = [name for name in names if name not in self._cached]
        for name in reversed(names):  # children are evicted before their parents
            self._cached[name] = None
            self._cached.move_to_end(name)
        gone = set(evicted := self._evict())
        return [name for name in new if name not in gone], evicted

    def _evict(self) -> list[bytes]:
        excess = max(self.num_held + len(self._cached) - self.num_blocks, 0)
        return [self._cached.popitem(last=False)[0] for _ in range(min(excess, len(self._cached)))]


@dataclass(slots=True)
class Prompt:
    """Tokens `[position, end)` are to be computed. `on_chunk(tokens)` after each step, also after the last.

    `turn`: order of arrival. `find`: how many tokens the node has cached, asked when it begins. `names`: of its blocks.
    `number`: of its request.
    """

    turn: int
    position: int
    end: int
    on_chunk: Callable[[int], None]
    find: Callable[[], int]
    names: tuple[bytes, ...] = ()
    number: int = 0
    num_cached: int = 0

    @property
    def left(self) -> int:
        return self.end - self.position

    @property
    def due(self) -> int:
        """Tokens to compute if it began now."""
        return self.end - max(self.position, self.find())

    def begin(self) -> None:
        """Its turn comes."""
        self.position = self.num_cached = max(self.position, self.find())


_turn = attrgetter("turn")


class PromptQueue:
    """A node's prompts, each of the three in the order of arrival. `received` ones have pulled blocks."""

    def __init__(self) -> None:
        self.running: list[Prompt] = []
        self.received: list[Prompt] = []
        self.waiting: list[Prompt] = []

    def __len__(self) -> int:
        return len(self.running) + len(self.received) + len(self.waiting)

    def __iter__(self) -> Iterator[Prompt]:
        return itertools.chain(self.running, self.received, self.waiting)

    def add(self, prompt: Prompt, *, received: bool) -> None:
        bisect.insort(self.received if received else self.waiting, prompt, key=_turn)

    def share_out(self, budget: int) -> list[tuple[Prompt, int]]:
        """Which prompt computes how many tokens of a step."""
        others = num_startable((prompt.due for prompt in (*self.received, *self.waiting[:1])), budget)
        counts = share_out([prompt.left for prompt in self.running], others, budget)
        chunks = list(zip(self.running, counts, strict=True))
        budget -= sum(counts)
        while budget > 0 and (self.received or self.waiting):
            prompt = self._next(budget)
            prompt.begin()
            bisect.insort(self.running, prompt, key=_turn)
            chunks.append((prompt, min(prompt.left, budget)))
            budget -= chunks[-1][1]
        return [(prompt, count) for prompt, count in chunks if count]

    def _next(self, budget: int) -> Prompt:
        if not self.received or not self.waiting:
            return (self.received or self.waiting).pop(0)
        received, first = self.received[0], self.waiting[0]
        is_received = goes_first(received.due, budget, first.turn < received.turn)
        return (self.received if is_received else self.waiting).pop(0)


@dataclass(slots=True)
class _Streams:
    """Those that run, by the step in which they end."""

    ends: list[tuple[int, int, _Ordered]] = field(default_factory=list)
    num_positions: int = 0


class SimNode:
    """`wake` whenever there is work: the cluster schedules `step_ends` after what it returns."""

    def __init__(
        self, node_id: str, role: Role, card: LayoutCard, profile: NodeProfile, pool: Pool, rng: random.Random
    ) -> None:
        self.record = NodeRecord(f"i-{node_id}", node_id, role, f"{node_id}:1", "simulated", card, 2**30)
        self.pool = pool
        self.prompts = PromptQueue()
        self.waiting: deque[tuple[int, Callable[[], None]]] = deque()  # for room: blocks, and what then
        self.times = StepTimes()
        self.step_ms = 0.0
        self.busy_s = 0.0
        self.gaps: list[tuple[float, int]] = []  # seconds between two tokens of how many streams
        self.bytes_per_s = 0.0
        self._profile = profile
        self._rng = rng
        self._streams = _Streams()
        self._joining: list[tuple[int, int, Callable[[], None], Callable[[], None]]] = []
        self._number = 0
        self._serial = 0
        self._chunks: list[tuple[Prompt, int]] = []
        self._rate = (0, 0, 0, 0)
        self.is_running = False
        self.lent_speed = 1.0  # of the step that runs, on two cores

    @property
    def num_streams(self) -> int:
        return len(self._streams.ends)

    def load(self) -> NodeLoad:
        """What a node's heartbeat would say of this instant."""
        accounts = BlockAccounts(
            free=self.pool.num_blocks - self.pool.num_held - self.pool.num_cached,
            cached=self.pool.num_cached,
            sequence=self.pool.num_held,
        )
        waiting = list(self._uncomputed())
        return NodeLoad(
            num_running=self.num_streams + len(self._joining) + len(self.prompts.running),
            num_waiting=len(self.waiting) + len(self.prompts) - len(self.prompts.running),
            num_waiting_tokens=sum(end - start for start, end in waiting),
            num_waiting_positions=sum(num_positions(start, end) for start, end in waiting),
            num_blocks=self.pool.num_blocks,
            accounts=accounts,
            prefill_tokens_per_s=self.times.prefill_tokens_per_s,
            prompt_token_ms=self.times.prompt_token_ms,
            prompt_position_ms=self.times.prompt_position_ms,
            prompt_depth=self.times.prompt_depth,
            step_ms=self.step_ms,
            pull_bytes_per_s=self.bytes_per_s,
        )

    def _uncomputed(self) -> Iterator[tuple[int, int]]:
        """As the scheduler tells it."""
        coming: set[bytes] = set()
        for prompt in itertools.chain(self.prompts.running, self.prompts.received):
            coming.update(prompt.names)
            yield prompt.position, prompt.end
        for prompt in self.prompts.waiting:
            shared = bisect.bisect(prompt.names, False, key=lambda name: name not in coming) * BLOCK_TOKENS
            start = min(max(prompt.end - prompt.due, shared), prompt.end - 1)
            coming.update(prompt.names)
            yield start, prompt.end

    def join(self, num_tokens: int, num_output: int, on_first: Callable[[], None], on_end: Callable[[], None]) -> None:
        """A stream whose prompt is here: its first token comes with the next step, its last `num_output - 1` later."""
        self._joining.append((num_tokens, num_output, on_first, on_end))

    def begin_step(self) -> float | None:
        """Seconds that the next step takes; None: nothing to do."""
        streams = self._streams
        sequences = self.num_streams + len(self._joining)
        self._chunks = self.prompts.share_out(self._budget(sequences))
        prompt_tokens = sum(count for _, count in self._chunks)
        seen = sum(num_positions(prompt.position, prompt.position + count) for prompt, count in self._chunks)
        self.is_running = bool(sequences or self._chunks)
        if not self.is_running:
            return None
        positions = streams.num_positions + sum(joining[0] for joining in self._joining)
        self._rate = (prompt_tokens, seen, sequences, self.num_streams)
        work = (prompt_tokens, seen, sequences, positions)
        self.lent_speed = self._profile.lent_speed(*work)
        return self._profile.expected_ms(*work) * self._noise() / 1e3

    def _noise(self) -> float:
        if not self._chunks:
            return self._profile.draw_noise(self._rng)
        first = self._chunks[0][0]
        return self._profile.noise_of(first.number, first.position)

    def step_ends(self, took_s: float) -> None:
        """Hands out tokens and chunks."""
        prompt_tokens, seen, sequences, continuing = self._rate
        self.times.note(prompt_tokens, sequences, took_s * 1e3, seen)
        self.step_ms += (0.2 if self.step_ms else 1.0) * (took_s * 1e3 - self.step_ms)
        self.busy_s += took_s
        if continuing:
            self.gaps.append((took_s, continuing))
        self._end_streams()
        chunks, self._chunks = self._chunks, []
        for prompt, count in chunks:
            prompt.position += count
            if not prompt.left:
                self.prompts.running.remove(prompt)
            prompt.on_chunk(count)

    def _end_streams(self) -> None:
        """Streams that were there before the step have one token more; those that joined have their first."""
        streams, joined = self._streams, self._joining
        self._joining = []
        self._number += 1
        streams.num_positions += self.num_streams
        while streams.ends and streams.ends[0][0] <= self._number:
            _, num_positions, ended = heapq.heappop(streams.ends)
            streams.num_positions -= num_positions
            ended()
        for num_tokens, num_output, on_first, on_end in joined:
            on_first()
            if num_output <= 1:
                on_end()
                continue
            self._serial += 1
            last = self._number + num_output - 1
            streams.num_positions += num_tokens + 1
            heapq.heappush(streams.ends, (last, num_tokens + num_output, _Ordered(on_end, self._serial)))

    def _budget(self, sequences: int) -> int:
        most = self._profile.max_num_batched_tokens
        if self.record.role is Role.PREFILL or not sequences:
            return most
        deepest = max((prompt.position for prompt in self.prompts.running), default=0)
        fit = self.times.prompt_tokens_within(MAX_STEP_MS, decoding=True, position=deepest)
        return min(most, max(fit, MIN_CHUNK)) if fit is not None else 2 * MIN_CHUNK

    def local_limit(self) -> int:
        """Uncached tokens up to which a decode node computes a prompt itself, whatever the plan says."""
        measured = self.times.prompt_tokens_within(MAX_STEP_MS, decoding=False)
        return BLOCK_TOKENS // 8 if measured is None else measured


class _Ordered:
    """A callback that a heap can compare: in the order of their making."""

    __slots__ = ("_call", "_serial")

    def __init__(self, call: Callable[[], None], serial: int) -> None:
        self._call, self._serial = call, serial

    def __lt__(self, other: _Ordered) -> bool:
        return self._serial < other._serial

    def __call__(self) -> None:
        self._call()
