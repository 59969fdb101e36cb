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
        self._numbers: list[int] = []  # of choices, each with its next token in `_token_ids`
        self._token_ids: list[int] = []
        self._in_full: set[int] = set()  # requests with an output in `_pending`, which must not be overtaken
        self._ready = asyncio.Event()
        self._closing = False

    def push(self, output: RequestOutput, number: int = 0) -> None:
        """`number`: of its request, if that has one."""
        self._in_full.add(number)
        self._pending.append(output_to_pb(output))
        self._ready.set()

    def push_token(self, number: int, index: int, token_id: int) -> bool:
        """A token and nothing else, of choice `index` of the request. False: this one must be pushed in full."""
        if not number or number in self._in_full:
            return False
        self._numbers.append(number + index)
        self._token_ids.append(token_id)
        self._ready.set()
        return True

    def close(self) -> None:
        """The writer ends once everything pushed is out."""
        self._closing = True
        self._ready.set()

    async def write_forever(self, context: Stream) -> None:
        """Writes until `close`; returns when all is written."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            if self._pending or self._numbers:
                await self._fail_points.copies("rpc.decode.outputs")
                await context.write(pb.SessionReply(outputs=self._take()))
            if self._closing and not (self._pending or self._numbers):
                return

    def _take(self) -> pb.StepOutputs:
        batch = pb.StepOutputs(outputs=self._pending, numbers=self._numbers, token_ids=self._token_ids)
        self._pending, self._numbers, self._token_ids = [], [], []
        self._in_full.clear()
        return batch
