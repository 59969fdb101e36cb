"""A decode node without an engine, as a process of its own: the real session protocol, a token per request and step.

    python -m benchmarks.fake_decode REDIS_URL

Each answer repeats its prompt. Steps begin `--step-ms` apart, and one that is late is followed by the next at once. On
SIGTERM it prints, as JSON, when it sent each token of each request (seconds of the monotonic clock).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from kvferry.common.nodes import LayoutCard, NodeRecord, Role
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.index.open import open_index
from kvferry.services.rpc.aio import Server

INSTANCE = "fake"
CARD = LayoutCard("fake", "fake", "float32", 16, 2, 2, 8, "bench")


class Pace:
    """When steps begin."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._due_s = 0.0

    async def wait(self) -> None:
        self._due_s = max(self._due_s + self._step_s, time.monotonic() - self._step_s)
        await asyncio.sleep(self._due_s - time.monotonic())


class _Running:
    __slots__ = ("at", "left", "number", "prompt", "request_id")

    def __init__(self, submit: pb.Submit) -> None:
        self.request_id = submit.request_id
        self.number = submit.number
        self.prompt = tuple(submit.prompt_token_ids)
        self.left = submit.sampling.max_tokens
        self.at = 0

    def next(self, step: pb.StepOutputs) -> None:
        """In full like a real node's: the first token, the last one, and all for a gateway that gave no number."""
        token_id = self.prompt[self.at % len(self.prompt)]
        if self.number and self.at and self.left > 1:
            step.numbers.append(self.number)
            step.token_ids.append(token_id)
        else:
            reason = "" if self.left > 1 else "length"
            step.outputs.append(pb.Output(request_id=self.request_id, token_ids=(token_id,), finish_reason=reason))
        self.at, self.left = self.at + 1, self.left - 1


class FakeDecode(pb_grpc.DecodeServicer):
    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.sent_at: dict[str, list[float]] = {}

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionReply]:
        running: dict[str, _Running] = {}
        come = asyncio.Event()

        async def read() -> None:
            async for message in requests:
                if message.WhichOneof("message") == "submit":
                    running[message.submit.request_id] = _Running(message.submit)
                    self.sent_at[message.submit.request_id] = []
                    come.set()
                else:
                    running.pop(message.cancel.request_id, None)

        reader = asyncio.create_task(read())
        try:
            yield pb.SessionReply(welcome=pb.Welcome(instance_id=INSTANCE))
            pace = Pace(self.step_s)
            while True:
                await come.wait()
                await pace.wait()
                step = pb.StepOutputs()
                for request in running.values():
                    request.next(step)
                now = time.monotonic()
                for request_id in running:
                    self.sent_at[request_id].append(now)
                for request_id in [name for name, request in running.items() if not request.left]:
                    del running[request_id]
                if not running:
                    come.clear()
                yield pb.SessionReply(outputs=step)
        finally:
            reader.cancel()


async def run(redis_url: str, step_s: float) -> None:
    node, stopped = FakeDecode(step_s), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)

    def add(server: grpc.aio.Server) -> None:
        pb_grpc.add_DecodeServicer_to_server(node, server)

    server = Server(add, ("kvferry.v1.Decode",))
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    index = open_index(redis_url, timeout_s=10)
    await index.announce(NodeRecord(INSTANCE, "d0", Role.BOTH, address, "bench", CARD, 2**20), 3600)
    await stopped.wait()
    print(json.dumps(node.sent_at), flush=True)
    await index.aclose()
    await server.stop(0.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="benchmarks.fake_decode", description=__doc__)
    parser.add_argument("redis_url")
    parser.add_argument("--step-ms", type=float, default=10.0)
    args = parser.parse_args()
    uvloop.run(run(args.redis_url, args.step_ms / 1000))
