"""Turn by turn, a chat computes its new message and nothing else, wherever in the cluster the last answer lies.

Counted to the block, over all nodes, and with the bits of a lone node.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest

from kvferry.common.hashing import block_names, root_name
from kvferry.common.requests import GenerateRequest, Holder, PrefillCandidate, SamplingParams
from kvferry.services.index.open import open_index
from tests.e2e.cluster import Answer, Cluster, DecodeClient, Node, cluster

BLOCK = 16
NUM_OUTPUT = 53
MESSAGES = (100, 75, 120, 34)
SAMPLING = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.8, seed=5, logprobs=1, ignore_eos=True)
PULL = ("--cached-pull", "always")  # a tiny model is computed faster than it is moved


@dataclass(frozen=True)
class Chat:
    """What a lone node makes of it: the prompt of each turn, and the answer."""

    requests: list[GenerateRequest]
    answers: list[Answer]

    def num_held(self, turn: int) -> int:
        """Tokens of this turn's prompt that lie in full blocks of the last turn: its very last token has no KV."""
        if not turn:
            return 0
        return (len(self.requests[turn - 1].prompt_token_ids) + NUM_OUTPUT - 1) // BLOCK * BLOCK


def talk(folder: Path, model: Path, num_turns: int = len(MESSAGES)) -> Chat:
    async def ask(node: Node) -> Chat:
        rng, chat, prompt = random.Random(3), Chat([], []), tuple[int, ...]()
        async with DecodeClient(node) as client:
            for turn, length in enumerate(MESSAGES[:num_turns]):
                prompt += tuple(rng.choices(range(3, 500), k=length))
                chat.requests.append(GenerateRequest(f"turn-{turn}", prompt, SAMPLING))
                chat.answers.append(await client.generate(chat.requests[-1]))
                prompt += tuple(chat.answers[-1].token_ids)
        return chat

    with cluster(folder, str(model)) as nodes:
        return asyncio.run(ask(nodes.start_node("both", "--no-enable-prefix-caching")))


@pytest.fixture(scope="module")
def chat(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Chat:
    return talk(tmp_path_factory.mktemp("lone"), tiny_model)


class Fleet:
    def __init__(
        self,
        nodes: Cluster,
        num_prefill: int,
        num_decode: int,
        local_limit: int,
        role: str = "decode",
        flags: tuple[str, ...] = PULL,
    ) -> None:
        limit = ("--local-prefill-max-tokens", str(local_limit))
        self.prefill = [nodes.start_node("prefill", *flags, wait=False) for _ in range(num_prefill)]
        self.decode = [nodes.start_node(role, *flags, *limit, wait=False) for _ in range(num_decode)]
        for node in self.nodes:
            nodes.wait_node(node)

    @property
    def nodes(self) -> list[Node]:
        return [*self.prefill, *self.decode]

    def num_tokens(self, source: str) -> int:
        return int(sum(node.metric("kvferry:prompt_tokens_by_source_total", source=source) for node in self.nodes))

    def check_clean(self) -> None:
        for node in self.nodes:
            load = node.record().load
            assert load.num_leases == 0, f"{node.name} still has leases"
            assert load.accounts.available == load.accounts.total, f"{node.name} still owns blocks: {load.accounts}"
            assert node.metric("kvferry:transfer_failures_total") == 0, node.tail()

    def plan(self, request: GenerateRequest, turn: int, num_held: int) -> GenerateRequest:
        """Each turn on the next nodes, which have nothing of the chat; the last answer lies where it was decoded."""
        holders = []
        if turn:
            before = self.decode[(turn - 1) % len(self.decode)].record()
            holders.append(Holder(before.instance_id, before.address, num_held // BLOCK))
        prefill: list[PrefillCandidate] = []
        if self.prefill:
            prefill.append(self.prefill[turn % len(self.prefill)].candidate())
        return replace(request, prefill=tuple(prefill), holders=tuple(holders))


@pytest.fixture
def nodes(tmp_path: Path, tiny_model: Path) -> Iterator[Cluster]:
    with cluster(tmp_path, str(tiny_model)) as made:
        yield made


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("num_prefill", "num_decode", "local_limit", "role"),
    [
        pytest.param(1, 1, 0, "decode", id="1+1, a prefill node computes the message"),
        pytest.param(2, 2, 0, "decode", id="2+2, a prefill node computes the message"),
        pytest.param(2, 2, 2 * max(MESSAGES), "decode", id="2+2, the decode node computes the message"),
        pytest.param(0, 2, 0, "both", id="two nodes that do both"),
    ],
)
def test_each_turn_computes_only_its_message(
    nodes: Cluster, chat: Chat, num_prefill: int, num_decode: int, local_limit: int, role: str
) -> None:
    fleet = Fleet(nodes, num_prefill, num_decode, local_limit, role)
    check_turns(fleet, chat)
    assert fleet.num_tokens("external_kv_transfer") > 0
    fleet.check_clean()


def check_turns(fleet: Fleet, chat: Chat) -> None:
    async def ask(turn: int) -> Answer:
        request = fleet.plan(chat.requests[turn], turn, chat.num_held(turn))
        async with DecodeClient(fleet.decode[turn % len(fleet.decode)]) as client:
            return await client.generate(request)

    for turn, (request, want) in enumerate(zip(chat.requests, chat.answers, strict=True)):
        before = fleet.num_tokens("local_compute")
        got = asyncio.run(ask(turn))
        assert got.token_ids == want.token_ids
        assert got.logprobs == want.logprobs
        assert got.first is not None
        num_held = chat.num_held(turn)
        computed = fleet.num_tokens("local_compute") - before
        assert computed == len(request.prompt_token_ids) - num_held, f"turn {turn}: more than its message was computed"
        assert got.first.cached_tokens == num_held


@pytest.mark.e2e
@pytest.mark.timeout(600)
@pytest.mark.parametrize("local_limit", [0, 2 * max(MESSAGES)])
def test_smollm2_moves_the_last_turn_by_its_own_estimate(smollm2: Path, tmp_path: Path, local_limit: int) -> None:
    """No flag says so: 53 tokens or more take a second to compute and some milliseconds to move."""
    (tmp_path / "lone").mkdir()
    chat = talk(tmp_path / "lone", smollm2, 2)
    with cluster(tmp_path, str(smollm2)) as nodes:
        fleet = Fleet(nodes, 1, 2, local_limit, flags=())
        check_turns(fleet, chat)
        puller = fleet.decode[1] if local_limit else fleet.prefill[0]
        assert puller.metric("kvferry:cached_pulls_total", outcome="moved") == 1
        fleet.check_clean()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [1, 2], ids=["1+1", "2+2"])
def test_through_the_gateway_usage_says_that_only_the_message_was_computed(
    nodes: Cluster, chat: Chat, size: int
) -> None:
    """Here the gateway says who holds what, from the index."""
    fleet = Fleet(nodes, size, size, 16)
    gateway = nodes.start_gateway()
    for turn, request in enumerate(chat.requests):
        before, num_held = fleet.num_tokens("local_compute"), chat.num_held(turn)
        asyncio.run(_index_knows(nodes, fleet, request, num_held))
        body = {"model": "test", "prompt": list(request.prompt_token_ids), "max_tokens": NUM_OUTPUT}
        body |= {"temperature": SAMPLING.temperature, "seed": SAMPLING.seed, "ignore_eos": True}
        reply = httpx.post(gateway.url + "/v1/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        usage = reply.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == num_held
        assert fleet.num_tokens("local_compute") - before == len(request.prompt_token_ids) - num_held
    fleet.check_clean()


async def _index_knows(nodes: Cluster, fleet: Fleet, request: GenerateRequest, num_held: int) -> None:
    """Waits until the last turn's blocks are published."""
    card = fleet.decode[0].record().card
    names = block_names(root_name(card.model_fingerprint, card.numerics_id, ""), request.prompt_token_ids, BLOCK)
    index = open_index(nodes.redis_url, "kvferry")
    deadline = time.monotonic() + 10
    while max((await index.match(names)).held.values(), default=0) < num_held // BLOCK:
        assert time.monotonic() < deadline, "the index never heard of the last turn's blocks"
        await asyncio.sleep(0.05)
    await index.aclose()
