"""One gRPC session per decode node, carrying every request between the two.

A session starts on demand, proves that the node is the instance that was meant, and lives until the stream breaks or
the node is gone. Whatever happens, each request on it gets its ending: finished outputs, or exactly one error output,
`NodeLost` where it was the session that ended. Once a session has ended, nothing that its node still sends is heard.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextvars import Context
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import grpc

from kvferry.common.errors import KvferryError, NodeLost
from kvferry.common.fail_points import FailPoints
from kvferry.common.nodes import NodeRecord
from kvferry.common.requests import FinishReason, GenerateRequest, RequestOutput
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.gateway.breaker import Breakers
from kvferry.services.gateway.mailbox import Mailbox
from kvferry.services.rpc.aio import Dial, open_channel
from kvferry.services.rpc.convert import output_from_pb, submit_to_pb
from kvferry.services.rpc.errors import from_rpc_error

log = logging.getLogger("kvferry.gateway")


class Submission:
    """One attempt of one request on one session."""

    __slots__ = ("_mailbox", "_open", "_session", "request")

    def __init__(self, session: Session, request: GenerateRequest, mailbox: Mailbox) -> None:
        self.request = request
        self._session = session
        self._mailbox = mailbox
        self._open = {choice.index for choice in request.resumed} or set(range(request.n))

    @property
    def was_sent(self) -> bool:
        """Whether the node may have seen it."""
        return self._session.was_connected

    @property
    def numbers(self) -> range:
        """What the session calls its choices."""
        return range(self.request.number, self.request.number + self.request.n)

    def deliver_token(self, number: int, token_id: int) -> None:
        """Passes on one token of the choice with this number, unless that has ended."""
        request = self.request
        self.deliver(RequestOutput(request.request_id, request.attempt, number - request.number, (token_id,)))

    def deliver(self, output: RequestOutput) -> bool:
        """Passes an output on, unless its choice has ended. True when that was the last one."""
        if output.error_code:
            self._open.clear()
            self._mailbox.put(output)
        elif output.index in self._open:
            if output.finish_reason is not None:
                self._open.discard(output.index)
            self._mailbox.put(output)
        return not self._open

    def cancel(self, index: int | None = None) -> None:
        """Ends one choice, or all that are left; nothing more of them is delivered. Safe to call at any time."""
        if index is None:
            self._open.clear()
            self._session.cancel(self, ())
        elif index in self._open:
            self._open.discard(index)
            self._session.cancel(self, (index,) if self._open else ())


class Session:
    """The stream to one instance of one decode node."""

    def __init__(self, node: NodeRecord, timeout_s: float, dial: Dial, fail_points: FailPoints | None = None) -> None:
        self.node = node
        self._dial = dial
        self._fail_points = fail_points or FailPoints()
        self.started_at = time.time()
        self.is_connected = self.was_connected = False
        self._timeout_s = timeout_s
        self._submissions: dict[str, Submission] = {}
        self._by_number: dict[int, Submission] = {}
        self._next_number = 1
        self._outbox: asyncio.Queue[pb.SessionRequest] = asyncio.Queue()
        self._error: KvferryError | None = None

    @property
    def num_requests(self) -> int:
        return len(self._submissions)

    @property
    def has_ended(self) -> bool:
        return self._error is not None

    def submit(self, request: GenerateRequest, mailbox: Mailbox) -> Submission:
        """Sends the request, now or once connected. Its outputs, or one error, arrive in the mailbox."""
        request = replace(request, number=self._next_number)
        self._next_number += request.n
        submission = Submission(self, request, mailbox)
        if self._error is not None:
            submission.deliver(_error_output(request, self._error))
            return submission
        self._submissions[request.request_id] = submission
        self._by_number |= dict.fromkeys(submission.numbers, submission)
        self._outbox.put_nowait(pb.SessionRequest(submit=submit_to_pb(request)))
        return submission

    def cancel(self, submission: Submission, indexes: Iterable[int]) -> None:
        """Tells the node that nobody waits for these choices; none named: for the whole request, which is forgotten."""
        request = submission.request
        if self._submissions.get(request.request_id) is not submission:
            return
        message = pb.CancelRequest(request_id=request.request_id, attempt=request.attempt, indexes=indexes)
        self._outbox.put_nowait(pb.SessionRequest(cancel=message))
        if not message.indexes:
            self._forget(submission)

    def _forget(self, submission: Submission) -> None:
        del self._submissions[submission.request.request_id]
        for number in submission.numbers:
            del self._by_number[number]

    async def run(self) -> KvferryError:
        """Carries requests until the stream ends or this is cancelled; returns why. Ends every request on it."""
        who = f"decode node {self.node.node_id}"
        error: KvferryError = NodeLost(f"{who}: the gateway closed the session")
        try:
            async with self._dial(self.node.address) as channel:
                error = await self._talk(pb_grpc.DecodeStub(channel).Session(), who)
        except grpc.RpcError as exc:
            error = NodeLost(from_rpc_error(exc, who).message)
        except TimeoutError:
            error = NodeLost(f"{who}: no answer within {self._timeout_s:g} s")
        except Exception as exc:  # a message that makes no sense; must not take the other sessions with it
            log.exception("session with %s broke", self.node.node_id)
            error = NodeLost(f"{who}: session broke: {exc}")
        finally:
            self._end(error)
        return error

    async def _talk(self, call: Any, who: str) -> KvferryError:
        async with asyncio.timeout(self._timeout_s):
            first = await call.read()
        if first is grpc.aio.EOF or first.WhichOneof("message") != "welcome":
            return NodeLost(f"{who}: ended the session before it began")
        if first.welcome.instance_id != self.node.instance_id:
            return NodeLost(f"{who}: is another instance now ({first.welcome.instance_id})")
        self.is_connected = self.was_connected = True
        log.info("session with %s (%s) open", self.node.node_id, self.node.instance_id)
        reader, writer = asyncio.create_task(self._read(call)), asyncio.create_task(self._write(call))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            for task in (reader, writer):
                if task.done():
                    task.result()
        finally:
            for task in (reader, writer):
                task.cancel()
            await asyncio.gather(reader, writer, return_exceptions=True)
        return NodeLost(f"{who}: ended the session")

    async def _read(self, call: Any) -> None:
        while (reply := await call.read()) is not grpc.aio.EOF:
            step = reply.outputs
            for number, token_id in zip(step.numbers, step.token_ids, strict=True):
                if (submission := self._by_number.get(number)) is not None:
                    submission.deliver_token(number, token_id)
            for output in step.outputs:
                self._dispatch(output)

    async def _write(self, call: Any) -> None:
        while True:
            message = await self._outbox.get()
            point = "rpc.session.submit" if message.HasField("submit") else "rpc.session.cancel"
            for _ in range(await self._fail_points.copies(point)):
                await call.write(message)

    def _dispatch(self, message: pb.Output) -> None:
        """Nobody waits for an unknown request, or for an older attempt of a known one: dropped."""
        submission = self._submissions.get(message.request_id)
        if submission is None or submission.request.attempt != message.attempt:
            return
        if submission.deliver(output_from_pb(message)):
            self._forget(submission)

    def close(self) -> None:
        """Ends what `run` never began to carry."""
        if not self.has_ended:
            self._end(NodeLost(f"decode node {self.node.node_id}: the gateway closed the session"))

    def _end(self, error: KvferryError) -> None:
        self._error = error
        self.is_connected = False
        submissions, self._submissions, self._by_number = list(self._submissions.values()), {}, {}
        for submission in submissions:
            submission.deliver(_error_output(submission.request, error))


class SessionPool:
    """All sessions of this gateway. An async context manager: leaving it closes them."""

    def __init__(
        self,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        dial: Dial = open_channel,
        fail_points: FailPoints | None = None,
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self.dial = dial
        self._timeout_s = timeout_s
        self._fail_points = fail_points or FailPoints()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.breakers = Breakers(clock)
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        await self._group.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        for task in self._tasks.values():
            task.cancel()
        await self._group.__aexit__(None, None, None)

    def submit(self, node: NodeRecord, request: GenerateRequest, mailbox: Mailbox) -> Submission:
        """Never fails: a node that cannot be reached is an error output in the mailbox."""
        session = self.sessions.get(node.instance_id)
        if session is None or session.has_ended:
            session = self.sessions[node.instance_id] = Session(node, self._timeout_s, self.dial, self._fail_points)
            # In a context of its own: it outlives the request that opens it, whose id its lines must not carry.
            task = self._group.create_task(self._keep(session), context=Context())
            task.add_done_callback(lambda _: self._ended(session))
            self._tasks[node.instance_id] = task
        self.breakers.sent(node.instance_id)
        return session.submit(request, mailbox)

    async def _keep(self, session: Session) -> None:
        error = await session.run()
        self.breakers.failed(session.node.instance_id, lost=True)
        log.warning("session lost: %s", error.message)

    def _ended(self, session: Session) -> None:
        """Also for a session whose task was cancelled before it began."""
        session.close()
        if self.sessions.get(session.node.instance_id) is session:
            del self.sessions[session.node.instance_id], self._tasks[session.node.instance_id]

    def failing(self) -> frozenset[str]:
        """Instances that are left alone for now."""
        return self.breakers.avoided()

    def give_up(self, stalled: Iterable[str]) -> None:
        """Ends sessions with nodes that live and get nothing done: their requests go on elsewhere."""
        for instance_id in self.sessions.keys() & set(stalled):
            if self.sessions[instance_id].num_requests:
                self.breakers.failed(instance_id, lost=True)
                self._tasks[instance_id].cancel()

    def forget_all_but(self, live: Iterable[str]) -> None:
        """Closes sessions with nodes that are gone, once nothing runs on them."""
        here = set(live)
        self.breakers.forget_all_but(here)
        for instance_id in self.sessions.keys() - here:
            if not self.sessions[instance_id].num_requests:
                self._tasks[instance_id].cancel()


def _error_output(request: GenerateRequest, error: KvferryError) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        attempt=request.attempt,
        finish_reason=FinishReason.ERROR,
        error_code=error.code,
        error_message=error.message,
        error_param=error.param or "",
    )
