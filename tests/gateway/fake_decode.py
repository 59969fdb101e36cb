"""A decode node without an engine: real gRPC, scripted tokens, and every way of misbehaving that a test may want."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import grpc

from kvferry.common.errors import Internal, KvferryError
from kvferry.common.nodes import LayoutCard, NodeLoad, NodeRecord, NodeState, Role
from kvferry.common.requests import FinishReason, GenerateRequest, RequestOutput, RequestTimes, TokenLogprobs
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.rpc.aio import Server
from kvferry.services.rpc.convert import output_to_pb, submit_from_pb

CARD = LayoutCard(
    model_fingerprint="fake-model",
    numerics_id="fake-numerics",
    dtype="float32",
    block_size=16,
    num_layers=2,
    num_kv_heads=2,
    head_dim=8,
    version="test",
)
_instances = itertools.count()


@dataclass
class Behaviour:
    """What the node does with a submission. `tokens` says what it answers, all of it; the rest is how.

    Of a resumed choice only what follows its tokens is sent, and those must be what this node would have sent.
    """

    tokens: Callable[[GenerateRequest, int], Sequence[int]] = lambda request, index: list(
        itertools.islice(itertools.cycle(request.prompt_token_ids), request.sampling.max_tokens)
    )
    tokens_per_step: int = 1
    step_s: float = 0.0
    stop_token_id: int | None = None  # appended to every answer that is shorter than max_tokens
    error: KvferryError | None = None  # instead of any token
    error_after: int | None = None  # tokens of each choice before `error`
    hang_after: int | None = None  # tokens of each choice before silence
    drop_after: int | None = None  # tokens of each choice before the session breaks
    num_bad_attempts: int = 1000  # of each request; later ones meet no error, silence or break
    cached_tokens: int = 0
    received_tokens: int = 0
    times: RequestTimes = field(default_factory=RequestTimes)
    ignore_cancel: bool = False
    packs: bool = True  # False: like a node that knows nothing of packed tokens
    ghosts: Callable[[GenerateRequest], Sequence[RequestOutput]] = lambda request: ()  # sent before the first output


class FakeDecode(pb_grpc.DecodeServicer, pb_grpc.NodeServicer):
    """`async with FakeDecode() as node:` listens; `node.record()` is what it would announce."""

    def __init__(
        self,
        behaviour: Behaviour | None = None,
        *,
        node_id: str = "d0",
        role: Role = Role.BOTH,
        model: str = "tiny",
        max_model_len: int = 512,
    ) -> None:
        self.behaviour = behaviour or Behaviour()
        self.node_id = node_id
        self.role = role
        self.model = model
        self.max_model_len = max_model_len
        self.instance_id = f"instance-{next(_instances)}"
        self.welcome_id = self.instance_id
        self.state = NodeState.READY
        self.load = NodeLoad()
        self.card = CARD
        self.submitted: list[GenerateRequest] = []
        self.cancelled: list[tuple[str, int, tuple[int, ...]]] = []
        self.num_sessions = 0
        self.num_packed = 0  # tokens
        self.address = ""
        self._running: dict[str, asyncio.Task[None]] = {}
        self._dead_choices: set[tuple[str, int]] = set()
        self._server: Server | None = None

    async def __aenter__(self) -> Self:
        self._server = Server(self._add, ("kvferry.v1.Decode", "kvferry.v1.Node"))
        self.address = f"127.0.0.1:{await self._server.start('127.0.0.1', 0)}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0.0)
            self._server = None

    def record(self) -> NodeRecord:
        return NodeRecord(
            instance_id=self.instance_id,
            node_id=self.node_id,
            role=self.role,
            address=self.address,
            model=self.model,
            card=self.card,
            max_model_len=self.max_model_len,
            state=self.state,
            load=self.load,
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    def _add(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_DecodeServicer_to_server(self, server)
        pb_grpc.add_NodeServicer_to_server(self, server)

    # ---- the services

    async def Stats(self, request: pb.StatsRequest, context: Any) -> pb.StatsReply:  # noqa: N802
        return pb.StatsReply(record_json=self.record().to_json())

    async def Session(  # noqa: N802
        self, requests: AsyncIterator[pb.SessionRequest], context: Any
    ) -> AsyncIterator[pb.SessionReply]:
        self.num_sessions += 1
        replies: asyncio.Queue[pb.SessionReply | None] = asyncio.Queue()
        reader = asyncio.create_task(self._read(requests, replies))
        try:
            yield pb.SessionReply(welcome=pb.Welcome(instance_id=self.welcome_id))
            while (reply := await replies.get()) is not None:
                yield reply
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the fake broke the session")
        finally:
            mine = [reader, *self._running.values()]
            for task in mine:
                task.cancel()
            await asyncio.gather(*mine, return_exceptions=True)
            self._running.clear()

    async def _read(
        self, requests: AsyncIterator[pb.SessionRequest], replies: asyncio.Queue[pb.SessionReply | None]
    ) -> None:
        async for message in requests:
            if message.WhichOneof("message") == "submit":
                request = submit_from_pb(message.submit)
                self.submitted.append(request)
                task = asyncio.create_task(self._answer(request, replies, self.behaviour))
                self._running[request.request_id] = task
                task.add_done_callback(functools.partial(self._ended, request.request_id))
            else:
                self._cancel(message.cancel)

    def _ended(self, request_id: str, task: asyncio.Task[None]) -> None:
        if self._running.get(request_id) is task:
            del self._running[request_id]

    def _cancel(self, message: pb.CancelRequest) -> None:
        self.cancelled.append((message.request_id, message.attempt, tuple(message.indexes)))
        if self.behaviour.ignore_cancel:
            return
        self._dead_choices.update((message.request_id, index) for index in message.indexes)
        task = self._running.get(message.request_id)
        if task is not None and not message.indexes:
            task.cancel()

    async def _answer(
        self, request: GenerateRequest, replies: asyncio.Queue[pb.SessionReply | None], does: Behaviour
    ) -> None:
        self._send(replies, does.ghosts(request))
        if request.attempt >= does.num_bad_attempts:
            does = replace(does, error=None, hang_after=None, drop_after=None)
        if does.error is not None and does.error_after is None:
            self._send(replies, [_error(request, does.error)])
            return
        had = {choice.index: choice.token_ids for choice in request.resumed} or dict.fromkeys(range(request.n), ())
        answers = {index: self._tokens(request, index) for index in had}
        for index, tokens in answers.items():
            if tuple(tokens[: len(had[index])]) != had[index]:
                self._send(replies, [_error(request, Internal(f"choice {index} had {had[index]}, not of {tokens}"))])
                return
            del tokens[: len(had[index])]
        first, at = True, 0
        while any(at < len(tokens) for tokens in answers.values()):
            await asyncio.sleep(does.step_s)
            if does.error_after is not None and at >= does.error_after and does.error is not None:
                self._send(replies, [_error(request, does.error)])
                return
            if does.drop_after is not None and at >= does.drop_after:
                replies.put_nowait(None)
                return
            if does.hang_after is not None and at >= does.hang_after:
                await asyncio.Event().wait()
            self._send(replies, self._step(request, answers, at, first), request.number)
            first, at = False, at + does.tokens_per_step

    def _tokens(self, request: GenerateRequest, index: int) -> list[int]:
        tokens = list(self.behaviour.tokens(request, index))[: request.sampling.max_tokens]
        if self.behaviour.stop_token_id is not None and len(tokens) < request.sampling.max_tokens:
            tokens.append(self.behaviour.stop_token_id)
        return tokens

    def _step(
        self, request: GenerateRequest, answers: Mapping[int, Sequence[int]], at: int, first: bool
    ) -> list[RequestOutput]:
        outputs = []
        had = {choice.index: len(choice.token_ids) for choice in request.resumed}
        for index, tokens in answers.items():
            piece = tuple(tokens[at : at + self.behaviour.tokens_per_step])
            if not piece or (request.request_id, index) in self._dead_choices:
                continue
            is_last = at + len(piece) >= len(tokens)
            stopped = is_last and had.get(index, 0) + len(tokens) < request.sampling.max_tokens
            stopped |= is_last and piece[-1] == self.behaviour.stop_token_id
            outputs.append(
                RequestOutput(
                    request_id=request.request_id,
                    attempt=request.attempt,
                    index=index,
                    token_ids=piece,
                    logprobs=_logprobs(request, piece),
                    finish_reason=(FinishReason.STOP if stopped else FinishReason.LENGTH) if is_last else None,
                    stop_token_id=piece[-1] if stopped and piece[-1] == self.behaviour.stop_token_id else None,
                    cached_tokens=self.behaviour.cached_tokens if first else 0,
                    local_cached_tokens=self.behaviour.cached_tokens if first else 0,
                    received_tokens=self.behaviour.received_tokens if first else 0,
                    times=self.behaviour.times if first else RequestTimes(),
                    prompt_logprobs=_prompt_logprobs(request) if first and index == min(answers) else (),
                )
            )
        return outputs

    def _send(
        self, replies: asyncio.Queue[pb.SessionReply | None], outputs: Sequence[RequestOutput], number: int = 0
    ) -> None:
        """`number`: of the request, under which what is a token and nothing else is packed, like a real node's."""
        step = pb.StepOutputs()
        for output in outputs:
            bare = RequestOutput(output.request_id, output.attempt, output.index, output.token_ids)
            packs = bool(number) and self.behaviour.packs and not step.outputs
            if packs and len(output.token_ids) == 1 and output == bare:
                self.num_packed += 1
                step.numbers.append(number + output.index)
                step.token_ids.extend(output.token_ids)
            else:
                step.outputs.append(output_to_pb(output))
        if outputs:
            replies.put_nowait(pb.SessionReply(outputs=step))


def _logprobs(request: GenerateRequest, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """The produced token first at -0.5, then its successors, each 1 lower."""
    k = request.sampling.logprobs
    if k is None:
        return ()
    return tuple(TokenLogprobs(-0.5, tuple((token + step, -0.5 - step) for step in range(k))) for token in tokens)


def _prompt_logprobs(request: GenerateRequest) -> tuple[TokenLogprobs, ...]:
    k = request.sampling.prompt_logprobs
    if k is None:
        return ()
    return tuple(
        TokenLogprobs(-0.25, tuple((token + step, -0.25 - step) for step in range(k)), rank=1)
        for token in request.prompt_token_ids[1:]
    )


def _error(request: GenerateRequest, error: KvferryError) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        attempt=request.attempt,
        finish_reason=FinishReason.ERROR,
        error_code=error.code,
        error_message=error.message,
        error_param=error.param or "",
    )
