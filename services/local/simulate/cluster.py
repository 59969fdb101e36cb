"""A cluster in simulated time: requests arrive, are routed by a policy, and run on simulated nodes.

The index and the router are the real ones. The router sees loads as the nodes' last heartbeats told them, and what it
has sent itself; blocks enter the index as they are filled. Times of steps come from measured ones (`profile.py`).

    arrival ─ policy ─▶ decode: room? ─▶ prefill: room? ─▶ queue ─▶ chunks ─▶ blocks cross ─▶ decode: first step ...
                                  └─ short, or no prefill node: own queue ─────────────────┘
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from kvferry.common.nodes import LayoutCard, NodeRecord, Role
from kvferry.services.gateway.nodes import Ledger
from kvferry.services.index.memory import MemoryIndex
from kvferry.services.local.simulate.cores import Cores
from kvferry.services.local.simulate.node import Pool, Prompt, SimNode
from kvferry.services.local.simulate.policies import Choice, Policy
from kvferry.services.local.simulate.profile import NodeProfile
from kvferry.services.local.simulate.trace import BLOCK_TOKENS, Request

HAND_OVER_S = 0.005  # measured: last chunk computed to first step begun, beside the bytes (docs/benchmarks.md)


@dataclass(frozen=True, slots=True)
class Fleet:
    """`cores`: of one machine that all nodes share (`cores.py`), prefill nodes by `prefill_weight`; None: own ones.

    `blocks_per_node` of 512 tokens; `bytes_per_s`: what a node receives. `pulls`: cached blocks move between nodes.
    """

    num_prefill: int
    num_decode: int
    num_both: int = 0
    blocks_per_node: int = 1_500
    bytes_per_s: float = 2.5e9
    heartbeat_s: float = 1.0
    pulls: bool = True
    cores: int | None = None
    prefill_weight: float = 1.0

    def __str__(self) -> str:
        return f"{self.num_prefill}+{self.num_decode}" if not self.num_both else f"{self.num_both} both"


@dataclass(slots=True)
class Served:
    """One request's way. Seconds since the start of the simulation; tokens found where it was computed, or pulled."""

    request: Request
    first_at_s: float = -1.0
    ended_at_s: float = -1.0
    cached_blocks: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first_at_s - self.request.at_s


class Simulation:
    def __init__(self, fleet: Fleet, profile: NodeProfile, policy: Policy, seed: int = 0) -> None:
        self.now_s = 0.0
        self.served: list[Served] = []
        self.index = MemoryIndex(lambda: self.now_s)
        self.ledger = Ledger(lambda: self.now_s)
        self.turns = itertools.count()
        self._fleet, self._profile, self._policy = fleet, profile, policy
        self._rng = random.Random(f"{seed}/simulation")
        self._events: list[tuple[float, int, Callable[[], Awaitable[None] | None]]] = []
        self._serial = 0
        self._seen: list[NodeRecord] = []
        self._num_left = 0
        self._cores = Cores(fleet.cores, lambda: self.now_s, self._at) if fleet.cores is not None else None
        self._changes: list[Awaitable[None]] = []
        card = LayoutCard("simulated", "", "float16", BLOCK_TOKENS, 1, 1, 1, "")
        # one head of one layer: as many bytes as a token has, whatever the model's shape
        card = replace(card, head_dim=max(profile.kv_bytes_per_token // 4, 1))
        self.nodes = {
            f"i-{name}": SimNode(
                name, role, card, profile, Pool(fleet.blocks_per_node), random.Random(f"{seed}/{name}")
            )
            for role, count in (
                (Role.PREFILL, fleet.num_prefill),
                (Role.DECODE, fleet.num_decode),
                (Role.BOTH, fleet.num_both),
            )
            for name in (f"{role.value[0]}{number:03d}" for number in range(count))
        }
        self._links = dict.fromkeys(self.nodes, 0.0)  # until when a node's link is taken

    async def run(self, requests: Sequence[Request]) -> None:
        self._num_left = len(requests)
        for node in self.nodes.values():
            await self._announce(node)
            self._at(self._rng.random() * self._fleet.heartbeat_s, partial(self._heartbeat, node))
        for request in requests:
            self._at(request.at_s + 1e-9, partial(self._arrive, request))
        self._at(0.0, self._poll)
        while self._num_left:
            self.now_s, _, event = heapq.heappop(self._events)
            if (waits := event()) is not None:
                await waits
            changes, self._changes = self._changes, []
            for change in changes:
                await change

    def _at(self, when_s: float, event: Callable[[], Awaitable[None] | None]) -> None:
        self._serial += 1
        heapq.heappush(self._events, (when_s, self._serial, event))

    # ---- what the router is told

    async def _poll(self) -> None:
        """The gateway reads the node table once a heartbeat, as the gateway's own does."""
        self._seen = (await self.index.nodes()).records
        self.ledger.note_reports(self._seen)
        self._at(self.now_s + self._fleet.heartbeat_s, self._poll)

    async def _heartbeat(self, node: SimNode) -> None:
        await self._announce(node)
        self._at(self.now_s + self._fleet.heartbeat_s, lambda: self._heartbeat(node))

    async def _announce(self, node: SimNode) -> None:
        await self.index.announce(replace(node.record, load=node.load()), 5 * self._fleet.heartbeat_s)

    def _changed(self, node: SimNode, stored: list[bytes], removed: list[bytes]) -> None:
        if removed:
            self._changes.append(self.index.remove(node.record.instance_id, removed))
        if stored:
            self._changes.append(self.index.store(node.record.instance_id, stored))

    # ---- a request's way

    async def _arrive(self, request: Request) -> None:
        matches = (await self.index.match(request.blocks)).held
        choice = self._policy(request, (self._seen, matches, self.ledger), self._rng)
        served = Served(request)
        self.served.append(served)
        holders = sorted(matches, key=lambda name: -matches[name])[:3]
        _Way(self, served, choice, holders).wait_for_decode()

    def reserve(self, node: SimNode, count: int, then: Callable[[], None]) -> None:
        """Blocks for a sequence, in the order of asking."""
        node.waiting.append((count, then))
        self.admit(node)

    def admit(self, node: SimNode) -> None:
        while node.waiting and (removed := node.pool.reserve(node.waiting[0][0])) is not None:
            self._changed(node, [], removed)
            node.waiting.popleft()[1]()

    def release(self, node: SimNode, count: int, names: tuple[bytes, ...]) -> None:
        self._changed(node, *node.pool.release(count, names))
        self.admit(node)

    def keep(self, node: SimNode, names: tuple[bytes, ...]) -> None:
        self._changed(node, *node.pool.keep(names))

    def move(self, node: SimNode, num_tokens: int, then: Callable[[], None]) -> None:
        """So many tokens' blocks come to `node`, behind what is on their way already."""
        seconds = num_tokens * self._profile.kv_bytes_per_token / self._fleet.bytes_per_s
        ends_s = self._links[node.record.instance_id] = max(self._links[node.record.instance_id], self.now_s) + seconds
        node.bytes_per_s = self._fleet.bytes_per_s
        self._at(ends_s + HAND_OVER_S, then)

    def wake(self, node: SimNode) -> None:
        if not node.is_running:
            self._step(node)

    def _step(self, node: SimNode) -> None:
        if (took_s := node.begin_step()) is None:
            return
        if self._cores is not None:
            weight = self._fleet.prefill_weight if node.record.role is Role.PREFILL else 1.0
            self._cores.compute(node.record.node_id, took_s, node.lent_speed, weight, partial(self._step_ends, node))
        else:
            self._at(self.now_s + took_s, lambda: self._step_ends(node, took_s))

    def _step_ends(self, node: SimNode, took_s: float) -> None:
        node.step_ends(took_s)
        self._step(node)

    def first(self, served: Served) -> None:
        served.first_at_s = self.now_s

    def ended(self, served: Served) -> None:
        served.ended_at_s = self.now_s
        self._num_left -= 1

    @property
    def pulls(self) -> bool:
        return self._fleet.pulls

    @property
    def bytes_per_s(self) -> float:
        return self._fleet.bytes_per_s

    @property
    def kv_bytes_per_token(self) -> int:
        return self._profile.kv_bytes_per_token


class _Way:
    """One request from node to node."""

    def __init__(self, sim: Simulation, served: Served, choice: Choice, holders: Sequence[str]) -> None:
        self._sim, self._served, self._choice, self._holders = sim, served, choice, holders
        request = served.request
        self._decode = sim.nodes[choice.decode]
        self._num_blocks = -(-(request.num_tokens + request.num_output) // BLOCK_TOKENS)
        self._prompt_blocks = -(-request.num_tokens // BLOCK_TOKENS)

    @property
    def _request(self) -> Request:
        return self._served.request

    def wait_for_decode(self) -> None:
        self._sim.reserve(self._decode, self._num_blocks, self._has_room)

    def _has_room(self) -> None:
        held = self._held(self._decode)
        queued = sum(prompt.left for prompt in self._decode.prompts)
        alone = self._request.num_tokens - held * BLOCK_TOKENS + queued <= self._decode.local_limit()
        if self._choice.prefill is None or alone:
            self._compute_on(self._decode, self._decode_computed)
        else:
            prefill = self._sim.nodes[self._choice.prefill]
            self._sim.reserve(prefill, self._prompt_blocks, lambda: self._compute_on(prefill, self._chunk_came))

    def _held(self, node: SimNode) -> int:
        """Leading blocks in its cache; the last token is always computed."""
        return min(node.pool.match(self._request.blocks), (self._request.num_tokens - 1) // BLOCK_TOKENS)

    def _compute_on(self, node: SimNode, on_chunk: Callable[[SimNode, Prompt], None]) -> None:
        """Pulls what another one holds, where that is quicker than computing it, and queues for the rest."""
        held, most = self._held(node), (self._request.num_tokens - 1) // BLOCK_TOKENS
        others = [self._decode, *(self._sim.nodes[name] for name in self._holders)]
        reachable = min(max(other.pool.match(self._request.blocks) for other in others), most)
        self._sim.keep(node, self._request.blocks[:held])

        def find() -> int:
            return self._held(node) * BLOCK_TOKENS

        def computed(_: int) -> None:
            self._served.cached_blocks = prompt.num_cached // BLOCK_TOKENS
            self._sim.keep(node, self._request.blocks[: prompt.position // BLOCK_TOKENS])
            on_chunk(node, prompt)

        def start(have: int, *, received: bool) -> None:
            prompt.position = have * BLOCK_TOKENS
            self._sent = self._held(self._decode) * BLOCK_TOKENS
            node.prompts.add(prompt, received=received)
            self._sim.wake(node)

        request = self._request
        prompt = Prompt(next(self._sim.turns), 0, request.num_tokens, computed, find, request.blocks, request.number)
        extra = (reachable - held) * BLOCK_TOKENS
        move_s = HAND_OVER_S + extra * self._sim.kv_bytes_per_token / self._sim.bytes_per_s
        rate = node.times.prefill_tokens_per_s or 1000.0
        if self._sim.pulls and extra > 0 and move_s < extra / rate:
            self._sim.move(node, extra, lambda: start(reachable, received=True))
        else:
            start(held, received=False)

    def _decode_computed(self, node: SimNode, prompt: Prompt) -> None:
        if prompt.left:
            return
        self._first()  # the step that computes the last prompt token draws the first one
        request = self._request
        if request.num_output > 1:
            self._decode.join(request.num_tokens + 1, request.num_output - 1, lambda: None, self._end)
        else:
            self._end()

    def _chunk_came(self, node: SimNode, prompt: Prompt) -> None:
        """Blocks go to the decode node while later ones are computed."""
        done = prompt.left == 0
        to_send = max(prompt.position - self._sent, 0)
        self._sent = max(self._sent, prompt.position)
        if done:
            self._sim.release(node, self._prompt_blocks, self._request.blocks)
            self._sim.move(self._decode, to_send, self._join)
        elif to_send:
            self._sim.move(self._decode, to_send, lambda: None)

    def _join(self) -> None:
        request = self._request
        self._decode.join(request.num_tokens, request.num_output, self._first, self._end)
        self._sim.wake(self._decode)

    def _first(self) -> None:
        self._choice.entry.prompt_done()
        self._sim.first(self._served)
        self._sim.keep(self._decode, self._request.blocks)

    def _end(self) -> None:
        self._choice.entry.close()
        self._sim.release(self._decode, self._num_blocks, self._request.blocks)
        self._sim.ended(self._served)
