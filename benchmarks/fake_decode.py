"""A decode node without an engine, as a process of its own: the real session protocol, a token per request and step.

    python -m benchmarks.fake_decode REDIS_URL

Each answer repeats its prompt. Steps begin `--step-ms` apart, and one that is late is followed by the next at once. On
SIGTERM it prints, as JSON, when it sent each step (seconds of the monotonic clock) and each request's first step.
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


class _Running:
    __slots__ = ("at", "left", "prompt", "request_id")

    def __init__(self, submit: pb.Submit) -> None:
        self.request_id = submit.request_id
        self.prompt = tuple(submit.prompt_token_ids)
        self.left = submit.sampling.max_tokens
        self.at = 0

    def next(self) -> pb.Output:
        token_id = self.prompt[self.at % len(self.prompt)]
        self.at, self.left = self.at + 1, self.left - 1
        reason = "" if self.left else "length"
        return pb.Output(request_id=self.request_id, token_ids=(token_id,), finish_reason=reason)


class FakeDecode(pb_grpc.DecodeServicer):
    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self.sent_at: list[float] = []
        self.first_step: dict[str, int] = {}

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionReply]:
        running: dict[str, _Running] = {}
        come = asyncio.Event()

        async def read() -> None:
            async for message in requests:
                if message.WhichOneof("message") == "submit":
                    running[message.submit.request_id] = _Running(message.submit)
                    come.set()
                else:
                    running.pop(message.cancel.request_id, None)

        reader = asyncio.create_task(read())
        try:
            yield pb.SessionReply(welcome=pb.Welcome(instance_id=INSTANCE))
            due_s = 0.0
            while True:
                await come.wait()
                due_s = max(due_s + self.step_s, time.monotonic() - self.step_s)
                await asyncio.sleep(due_s - time.monotonic())
                for request_id, request in running.items():
                    if not request.at:
                        self.first_step[request_id] = len(self.sent_at)
                outputs = [request.next() for request in running.values()]
                for request_id in [name for name, request in running.items() if not request.left]:
                    del running[request_id]
                if not running:
                    come.clear()
                self.sent_at.append(time.monotonic())
                yield pb.SessionReply(outputs=pb.StepOutputs(outputs=outputs))
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
    print(json.dumps({"sent_at": node.sent_at, "first_step": node.first_step}), flush=True)
    await index.aclose()
    await server.stop(0.0)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="benchmarks.fake_decode", description=__doc__)
    parser.add_argument("redis_url")
    parser.add_argument("--step-ms", type=float, default=10.0)
    args = parser.parse_args()
    uvloop.run(run(args.redis_url, args.step_ms / 1000))
