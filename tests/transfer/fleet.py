"""Some prefill and some decode nodes on one virtual wire, and chats whose turns they are asked for."""

from __future__ import annotations

import random

from kvferry.common.nodes import Role
from kvferry.common.requests import GenerateRequest, Holder, RequestOutput, SamplingParams
from kvferry.services.rpc.convert import output_from_pb
from tests.engine.fake_runner import generate
from tests.transfer.sim import BLOCK, SimNode
from tests.transfer.virtual import VirtualLoop
from tests.transfer.wire import Wire

NUM_OUTPUT = 6


class Fleet:
    """Prefill nodes p0, p1, … and decode nodes d0, d1, …, whose messages and steps go on when the test says so."""

    def __init__(
        self, num_prefill: int, num_decode: int, num_blocks: int, transport: str = "shm", share: float = 0.5
    ) -> None:
        self.loop, self.wire = VirtualLoop(), Wire()

        def node(role: Role, name: str) -> SimNode:
            return SimNode(role, self.loop, self.wire, num_blocks, (transport,), name, share)

        self.p = [node(Role.PREFILL, f"p{i}") for i in range(num_prefill)]
        self.d = [node(Role.DECODE, f"d{i}") for i in range(num_decode)]
        self.got: dict[str, list[int]] = {}
        self.first: dict[str, RequestOutput] = {}
        self.ended: dict[str, str] = {}

    @property
    def nodes(self) -> list[SimNode]:
        return [*self.p, *self.d]

    def submit(
        self,
        name: str,
        prompt: list[int],
        node: SimNode,
        *,
        by: SimNode | None = None,
        holders: tuple[Holder, ...] = (),
        salt: str = "",
    ) -> None:
        plan = (by.candidate,) if by else ()
        params = SamplingParams(max_tokens=NUM_OUTPUT)
        spec = GenerateRequest(name, tuple(prompt), params, prefill=plan, holders=holders, cache_salt=salt)
        node.call(node.service._submit, node.session, spec)

    def go_on(self, rounds: int = 1, *, copy: bool = True, step: bool = True, deliver: bool = True) -> None:
        for _ in range(rounds):
            for found in self.wire.lanes() if deliver else ():
                self.d[0].call(self.wire.deliver, *found)
            for node in self.nodes:
                if node.instance not in self.wire.dead:
                    self._go_on(node, copy, step)

    def _go_on(self, node: SimNode, copy: bool, step: bool) -> None:
        if copy:
            node.copy()
        if step:
            node.step()
        node.sweep()
        node.check()
        outputs, node.session._pending = node.session._pending, []
        for output in map(output_from_pb, outputs):
            assert output.request_id not in self.ended, f"{output.request_id} went on after its end"
            self.first.setdefault(output.request_id, output)
            self.got.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finish_reason is not None:
                self.ended[output.request_id] = output.finish_reason.value

    def answer(self, name: str, prompt: list[int], node: SimNode, **how: object) -> RequestOutput:
        """The whole answer, which is right; its first output, which says where the prompt came from."""
        self.submit(name, prompt, node, **how)  # type: ignore[arg-type]
        return self.finish(name, prompt)

    def finish(self, name: str, prompt: list[int]) -> RequestOutput:
        for _ in range(60):
            self.go_on()
            if name in self.ended:
                break
        assert self.got[name] == generate(prompt, NUM_OUTPUT)
        return self.first[name]

    def check_clean(self) -> None:
        for node in self.nodes:
            if node.instance not in self.wire.dead:
                accounts = node.engine.load().accounts
                assert accounts.available == node.pool.num_blocks, f"{node.instance}: {accounts}"
                assert node.leases.num_open == node.service.num_active == 0

    def close(self) -> None:
        for node in self.nodes:
            node.die(half_open=True)
        self.loop.close()


def chat(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(50), k=length)


def next_turn(prompt: list[int], seed: int, length: int) -> list[int]:
    return [*prompt, *generate(prompt, NUM_OUTPUT), *chat(seed, length)]


def num_held(prompt: list[int]) -> int:
    """Full blocks that a node has of a chat after its turn: the very last token has no KV."""
    return (len(prompt) + NUM_OUTPUT - 1) // BLOCK
