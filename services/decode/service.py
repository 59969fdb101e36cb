"""The decode service: takes requests from gateways, gets their prompts computed (here or by a peer), streams tokens.

A prompt with few uncached tokens is computed in this node's own steps; a long one is received: blocks for all of it are
reserved first, then a prefill node computes and this node pulls. Whatever goes wrong with a peer, the next candidate is
tried, and then the prompt is computed here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import grpc

from kvferry.common.config import Config
from kvferry.common.errors import BadRequest, Draining, Internal, KvferryError
from kvferry.common.hashing import root_name
from kvferry.common.log import log_fields
from kvferry.common.nodes import Role
from kvferry.common.requests import GenerateRequest, StructuredOutput
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.decode.receive import plan_receive, receive
from kvferry.services.decode.request import Request, validate
from kvferry.services.decode.session import GatewaySession, Stream
from kvferry.services.engine.beam_groups import make_group
from kvferry.services.engine.grammar import Matcher
from kvferry.services.engine.outputs import AdmittedOutput, StepReport, TokenOutput
from kvferry.services.engine.sequence import Sequence
from kvferry.services.node.context import LoadedNode, NodeContext
from kvferry.services.node.owner import BlockOwner
from kvferry.services.node.reader import Wanted
from kvferry.services.node.runtime import run_node
from kvferry.services.rpc.convert import submit_from_pb

log = logging.getLogger("kvferry.decode")


def main(config: Config, role: Role = Role.DECODE) -> int:
    return run_node(config, role, DecodeService)


class DecodeService(pb_grpc.DecodeServicer):
    service_name = "Decode"

    def __init__(self, context: NodeContext) -> None:
        self._node = context
        self._owner = BlockOwner(context)
        self._sessions: set[GatewaySession] = set()
        self._requests: dict[tuple[int, str, int], Request] = {}  # by session number, request id, attempt
        self._by_key: dict[str, tuple[Request, int]] = {}
        self._receives: set[asyncio.Task[None]] = set()
        self._compiling: set[asyncio.Task[None]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_DecodeServicer_to_server(self, server)
        self._owner.add_to(server)

    @property
    def num_active(self) -> int:
        return len(self._requests) + len(self._receives) + self._owner.num_active

    # ---- gateway side

    async def Session(self, _requests: Any, context: Stream) -> None:  # noqa: N802
        session = GatewaySession(self._node.fail_points)
        await context.write(pb.SessionReply(welcome=pb.Welcome(instance_id=self._node.instance_id)))
        self._sessions.add(session)
        writer = asyncio.create_task(session.write_forever(context))
        try:
            reader = asyncio.create_task(self._read(session, context))
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            reader.cancel()
        finally:
            self._sessions.discard(session)
            for request in [r for r in self._requests.values() if r.session is session]:
                self._cancel(request, sorted(request.open))
            writer.cancel()

    async def _read(self, session: GatewaySession, context: Stream) -> None:
        while isinstance(message := await context.read(), pb.SessionRequest):
            if message.HasField("submit"):
                self._submit(session, submit_from_pb(message.submit))
            elif message.HasField("cancel"):
                cancel = message.cancel
                if request := self._requests.get((session.number, cancel.request_id, cancel.attempt)):
                    self._cancel(request, list(cancel.indexes) or sorted(request.open))

    def _submit(self, session: GatewaySession, spec: GenerateRequest) -> None:
        request = Request.of(spec, session)
        request.span = self._node.tracing.start(
            "decode", spec.traceparent, node=self._node.node_id, request_id=spec.request_id, attempt=spec.attempt
        )
        with log_fields(**request.log_fields):
            self._accept(session, request)

    def _accept(self, session: GatewaySession, request: Request) -> None:
        spec = request.spec
        name = (session.number, spec.request_id, spec.attempt)
        try:
            if name in self._requests:
                raise BadRequest(f"request id {spec.request_id!r} is in use", param="request_id")
            loaded = self._node.require_open()
            validate(spec, loaded)
            if spec.sampling.structured is None:
                self._start(loaded, request)
            else:
                task = asyncio.create_task(self._start_constrained(loaded, request, spec.sampling.structured))
                self._compiling.add(task)
                task.add_done_callback(self._compiling.discard)
            self._requests[name] = request
            self._by_key |= {request.key(index): (request, index) for index in request.choices}
        except KvferryError as exc:
            log.info("%s refused: %s", spec.request_id, exc.message, extra={"ended": exc.code})
            session.push(request.error_output(exc))
            request.span.end(error=exc)

    async def _start_constrained(self, loaded: LoadedNode, request: Request, structured: StructuredOutput) -> None:
        """Compiles the grammar first, which nobody waits for but this request."""
        try:
            matcher = await asyncio.to_thread(loaded.grammars.matcher, structured)
            if request.open:
                self._start(loaded, request, matcher)
            for index in request.choices.keys() - request.open:  # cancelled meanwhile
                loaded.engine.close(request.key(index), cancelled_s=request.cancelled_s)
        except Exception as exc:
            if request.open:
                self._fail(request, exc if isinstance(exc, KvferryError) else Internal(f"compiling the grammar: {exc}"))

    def _start(self, loaded: LoadedNode, request: Request, matcher: Matcher | None = None) -> None:
        """Submits the prompt with all its choices. Raises what the engine refuses it with."""
        spec, choices = request.spec, request.choices
        seq = Sequence(
            key=request.key(request.first),
            token_ids=list(request.entering_token_ids),
            num_prompt_tokens=len(spec.prompt_token_ids),
            root=root_name(loaded.card.model_fingerprint, loaded.card.numerics_id, spec.cache_salt),
            block_size=loaded.card.block_size,
            sampling=spec.sampling,
            index=request.first,
            priority=spec.priority,
        )
        seq.matcher = matcher
        if spec.sampling.beam is not None:
            room = loaded.max_model_len - seq.num_tokens
            max_tokens = min(spec.sampling.max_tokens, room)
            keys = tuple(map(request.key, choices))
            make_group(seq, spec.sampling, keys, max_tokens, loaded.engine.eos_token_ids)
        elif len(choices) > 1:
            seq.resumed_token_ids = choices[request.first]
            for index in [*choices][1:]:
                seq.add_branch(request.key(index), index, choices[index])
        plan_receive(self._node, request, seq)
        loaded.engine.submit(seq)

    # ---- engine side

    def on_report(self, report: StepReport) -> None:
        for admitted in report.admitted:
            self._start_receive(admitted)
        for token in report.tokens:
            if (found := self._by_key.get(token.key)) is not None:
                self._on_token(*found, token)
        for failed in report.failed:
            if (found := self._by_key.get(failed.key)) is not None:
                self._fail(found[0], failed.error)

    def on_lease_expired(self, lease_id: str) -> None:
        self._owner.on_lease_expired(lease_id)

    def _on_token(self, request: Request, index: int, token: TokenOutput) -> None:
        session, number = request.session, request.spec.number
        if not (request.is_token_only(token) and session.push_token(number, index, token.token_id)):
            session.push(request.token_output(index, token), number)
        metrics = self._node.require_loaded().metrics
        request.num_output_tokens += 1
        if (first := token.first) is not None:
            metrics.note_prompt(first.computed_tokens, first.cached_tokens, first.received_tokens)
            request.note_first(first)
        if token.finish_reason is not None:
            metrics.requests.labels(token.finish_reason.value).inc()
            self._ended(request, index, token.finish_reason.value)

    # ---- receiving

    def _start_receive(self, admitted: AdmittedOutput) -> None:
        if (request := self._waiting_for(admitted.key)) is None:  # cancelled in between
            self._node.require_loaded().engine.close(admitted.key)
            return
        request.receiving = task = asyncio.create_task(self._receive(request, admitted))
        self._receives.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            """Also for a task that was cancelled before it began."""
            self._receives.discard(task)
            request.receiving = None
            if admitted.key not in self._by_key:
                self._node.require_loaded().engine.close(admitted.key, cancelled_s=request.cancelled_s)

        task.add_done_callback(ended)

    def _waiting_for(self, key: str) -> Request | None:
        """Whose prompt the sequence computes, though the choice that it is itself may have been cancelled."""
        if (found := self._by_key.get(key)) is not None:
            return found[0]
        return next((request for request in self._requests.values() if request.key(request.first) == key), None)

    async def _receive(self, request: Request, admitted: AdmittedOutput) -> None:
        """Fills the admitted blocks from peers, and hands the rest of the prompt to this node's own steps.

        However it ends, nothing writes into the blocks afterwards.
        """
        loaded = self._node.require_loaded()
        wanted = Wanted(
            request_id=request.spec.request_id,
            prompt_token_ids=request.entering_token_ids,
            cache_salt=request.spec.cache_salt,
            priority=request.spec.priority,
            first_block=admitted.first_block,
            block_ids=admitted.block_ids,
            span=request.span,
            http_request_id=request.spec.http_request_id,
        )
        with log_fields(**request.log_fields):
            try:
                loaded.engine.receive_ended(admitted.key, await receive(self._node, request, wanted))
            except BadRequest as exc:
                self._fail(request, exc)
            except Exception as exc:
                log.exception("receiving the prompt of %s failed", request.spec.request_id)
                self._fail(request, Internal(f"receiving the prompt failed: {type(exc).__name__}: {exc}"))

    # ---- endings

    def _cancel(self, request: Request, indexes: list[int]) -> None:
        """Stops choices that nobody waits for any more. No event follows."""
        loaded, request.cancelled_s = self._node.require_loaded(), time.monotonic()
        for index in indexes:
            if index in request.open:
                self._stop_choice(loaded, request, index, "abort")
                loaded.metrics.requests.labels("abort").inc()

    def _fail(self, request: Request, error: KvferryError) -> None:
        """Ends the whole request with one error event."""
        loaded, request.cancelled_s = self._node.require_loaded(), 0.0
        request.session.push(request.error_output(error))
        loaded.metrics.requests.labels("error").inc()
        request.span.set(error=error.code)
        for index in sorted(request.open):
            self._stop_choice(loaded, request, index, error.code)

    def _stop_choice(self, loaded: LoadedNode, request: Request, index: int, reason: str) -> None:
        """A prompt that is being received is closed by its receive, once no copy is in flight."""
        self._ended(request, index, reason)
        task = request.receiving
        if task is None or index != request.first or request.open:
            loaded.engine.close(request.key(index), cancelled_s=request.cancelled_s)
        if task is not None and not request.open and task is not asyncio.current_task():
            task.cancel()

    def _ended(self, request: Request, index: int, reason: str) -> None:
        """`reason`: a finish reason, or an error's code."""
        request.open.discard(index)
        self._by_key.pop(request.key(index), None)
        if not request.open:
            self._requests.pop((request.session.number, request.spec.request_id, request.spec.attempt), None)
            request.span.end()
            with log_fields(**request.log_fields):
                said = (request.spec.request_id, reason, len(request.spec.prompt_token_ids), request.num_output_tokens)
                log.info("%s ended (%s): %d tokens in, %d out", *said, extra=request.summary | {"ended": reason})

    async def aclose(self) -> None:
        for request in list(self._requests.values()):
            self._fail(request, Draining(f"{self._node.node_id} has shut down"))
        for session in self._sessions:
            session.close()
        await self._owner.aclose()
        await asyncio.gather(*self._receives, *self._compiling, return_exceptions=True)
