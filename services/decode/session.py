"""One gateway's session: everything that engine steps produce for it, one message per step."""

from __future__ import annotations

import asyncio
import itertools

import grpc

from kvferry.common.fail_points import FailPoints
from kvferry.common.requests import RequestOutput
from kvferry.proto import kvferry_pb2 as pb
from kvferry.services.rpc.convert import output_to_pb

Stream = grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionReply]

_serial = itertools.count()


class GatewaySession:
    """Outputs wait here while the stream is busy; they are bounded by what the running requests may produce."""

    def __init__(self, fail_points: FailPoints | None = None) -> None:
        self._fail_points = fail_points or FailPoints()
        self.number = next(_serial)
        self._pending: list[pb.Output] = []
        self._ready = asyncio.Event()
        self._closing = False

    def push(self, output: RequestOutput) -> None:
        self._pending.append(output_to_pb(output))
        self._ready.set()

    def close(self) -> None:
        """The writer ends once everything pushed is out."""
        self._closing = True
        self._ready.set()

    async def write_forever(self, context: Stream) -> None:
        """Writes until `close`; returns when all is written."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self._pending:
                await self._fail_points.copies("rpc.decode.outputs")
                batch, self._pending = self._pending, []
                await context.write(pb.SessionReply(outputs=pb.StepOutputs(outputs=batch)))
            if self._closing and not self._pending:
                return
