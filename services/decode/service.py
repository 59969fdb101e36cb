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
from kvferry.common.nodes import Role
from kvferry.common.requests import GenerateRequest, StructuredOutput
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.decode.remote_prefill import Received, RemotePrefill, Timeouts, Wanted
from kvferry.services.decode.request import Request, validate
from kvferry.services.decode.session import GatewaySession, Stream
from kvferry.services.engine.beam_groups import make_group
from kvferry.services.engine.grammar import Matcher
from kvferry.services.engine.outputs import AdmittedOutput, StepReport, TokenOutput
from kvferry.services.engine.sequence import Sequence
from kvferry.services.node.context import LoadedNode, NodeContext
from kvferry.services.node.runtime import run_node
from kvferry.services.rpc.convert import submit_from_pb

log = logging.getLogger("kvferry.decode")

UNMEASURED_LOCAL_PREFILL_TOKENS = 64
"""What a decode node computes itself before it has measured how long that takes."""


def main(config: Config, role: Role = Role.DECODE) -> int:
    return run_node(config, role, DecodeService)


class DecodeService(pb_grpc.DecodeServicer):
    service_name = "Decode"

    def __init__(self, context: NodeContext) -> None:
        self._node = context
        self._sessions: set[GatewaySession] = set()
        self._requests: dict[tuple[int, str, int], Request] = {}  # by session number, request id, attempt
        self._by_key: dict[str, tuple[Request, int]] = {}
        self._receives: set[asyncio.Task[None]] = set()
        self._compiling: set[asyncio.Task[None]] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        pb_grpc.add_DecodeServicer_to_server(self, server)

    @property
    def num_active(self) -> int:
        return len(self._requests) + len(self._receives)

    # ---- gateway side

    async def Session(self, _requests: Any, context: Stream) -> None:  # noqa: N802
        session = GatewaySession(self._node.fail_points)
        self._sessions.add(session)
        await context.write(pb.SessionReply(welcome=pb.Welcome(instance_id=self._node.instance_id)))
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
        request = Request(spec, session, set(range(spec.n)))
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
            self._by_key |= {request.key(index): (request, index) for index in range(spec.n)}
        except KvferryError as exc:
            session.push(request.error_output(exc))

    async def _start_constrained(self, loaded: LoadedNode, request: Request, structured: StructuredOutput) -> None:
        """Compiles the grammar first, which nobody waits for but this request."""
        try:
            matcher = await asyncio.to_thread(loaded.grammars.matcher, structured)
            if request.open:
                self._start(loaded, request, matcher)
            for index in set(range(request.spec.n)) - request.open:  # cancelled meanwhile
                loaded.engine.close(request.key(index))
        except Exception as exc:
            if request.open:
                self._fail(request, exc if isinstance(exc, KvferryError) else Internal(f"compiling the grammar: {exc}"))

    def _start(self, loaded: LoadedNode, request: Request, matcher: Matcher | None = None) -> None:
        """Submits the prompt with all its choices. Raises what the engine refuses it with."""
        spec = request.spec
        seq = Sequence(
            key=request.key(0),
            token_ids=list(spec.prompt_token_ids),
            num_prompt_tokens=len(spec.prompt_token_ids),
            root=root_name(loaded.card.model_fingerprint, loaded.card.numerics_id, spec.cache_salt),
            block_size=loaded.card.block_size,
            sampling=spec.sampling,
            priority=spec.priority,
        )
        seq.matcher = matcher
        keys = tuple(request.key(index) for index in range(spec.n))
        if spec.sampling.beam is not None:
            room = loaded.max_model_len - seq.num_tokens
            max_tokens = min(spec.sampling.max_tokens, room)
            make_group(seq, spec.sampling, keys, max_tokens, loaded.engine.eos_token_ids)
        else:
            for index, key in enumerate(keys[1:], 1):
                seq.add_branch(key, index)
        if spec.prefill:
            cached = loaded.engine.num_cached_tokens(seq)
            missing_blocks = seq.num_cacheable_blocks - cached // seq.block_size
            seq.receive = missing_blocks > 0 and seq.num_tokens - cached > self._local_limit(loaded)
        loaded.engine.submit(seq)

    def _local_limit(self, loaded: LoadedNode) -> int:
        """Uncached tokens up to which a prompt is computed here: what fits into one step, unless configured."""
        node, engine = self._node.config.node, self._node.config.engine
        if node.local_prefill_max_tokens is not None:
            return node.local_prefill_max_tokens
        measured = loaded.engine.scheduler.times.prompt_tokens_within(engine.max_step_ms, decoding=False)
        return UNMEASURED_LOCAL_PREFILL_TOKENS if measured is None else max(measured, loaded.card.block_size)

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
        """Nothing here waits for a reader of this node's blocks."""

    def _on_token(self, request: Request, index: int, token: TokenOutput) -> None:
        request.session.push(request.token_output(index, token))
        metrics = self._node.require_loaded().metrics
        if (first := token.first) is not None:
            for source, count in (
                ("local_compute", first.computed_tokens),
                ("local_cache_hit", first.cached_tokens),
                ("external_kv_transfer", first.received_tokens),
            ):
                metrics.prompt_tokens.labels(source).inc(count)
        if token.finish_reason is not None:
            metrics.requests.labels(token.finish_reason.value).inc()
            self._ended(request, index)

    # ---- receiving

    def _start_receive(self, admitted: AdmittedOutput) -> None:
        if (found := self._by_key.get(admitted.key)) is None:  # cancelled in between
            self._node.require_loaded().engine.close(admitted.key)
            return
        request = found[0]
        request.receiving = task = asyncio.create_task(self._receive(request, admitted))
        self._receives.add(task)

        def ended(_: asyncio.Task[None]) -> None:
            """Also for a task that was cancelled before it began."""
            self._receives.discard(task)
            request.receiving = None
            if admitted.key not in self._by_key:
                self._node.require_loaded().engine.close(admitted.key)

        task.add_done_callback(ended)

    async def _receive(self, request: Request, admitted: AdmittedOutput) -> None:
        """Fills the admitted blocks from a prefill node, or hands the prompt to this node's own steps.

        However it ends, nothing writes into the blocks afterwards.
        """
        loaded = self._node.require_loaded()
        wanted = Wanted(
            request_id=request.spec.request_id,
            prompt_token_ids=request.spec.prompt_token_ids,
            cache_salt=request.spec.cache_salt,
            priority=request.spec.priority,
            first_block=admitted.first_block,
            block_ids=admitted.block_ids,
        )
        num_received = 0
        try:
            if await self._try_candidates(loaded, request, wanted):
                num_received = admitted.first_block + len(admitted.block_ids)
            loaded.engine.receive_ended(admitted.key, num_received)
        except BadRequest as exc:
            self._fail(request, exc)
        except Exception as exc:
            log.exception("receiving the prompt of %s failed", request.spec.request_id)
            self._fail(request, Internal(f"receiving the prompt failed: {type(exc).__name__}: {exc}"))

    async def _try_candidates(self, loaded: LoadedNode, request: Request, wanted: Wanted) -> bool:
        """True when one candidate delivered everything. Raises BadRequest when one refuses the prompt itself."""
        node = self._node.config.node
        timeouts = Timeouts(total_s=node.prefill_timeout_s, silence_s=node.peer_timeout_s, renew_s=node.lease_renew_s)
        remote = RemotePrefill(loaded.puller, loaded.card, timeouts, self._node.fail_points)
        for candidate in request.spec.prefill:
            try:
                request.received = await remote.receive_blocks(candidate, wanted)
            except BadRequest:
                raise
            except KvferryError as exc:
                log.warning("prefill of %s on %s failed: %s", request.spec.request_id, candidate.address, exc.message)
                loaded.metrics.transfer_failures.labels(exc.code).inc()
                continue
            request.prefilled_by = candidate.instance_id
            _count_pulls(loaded, request.received)
            return True
        loaded.metrics.local_fallbacks.labels("all_candidates_failed").inc()
        return False

    # ---- endings

    def _cancel(self, request: Request, indexes: list[int]) -> None:
        """Stops choices that nobody waits for any more. No event follows."""
        loaded, begun = self._node.require_loaded(), time.monotonic()
        for index in indexes:
            if index in request.open:
                self._stop_choice(loaded, request, index)
                loaded.metrics.requests.labels("abort").inc()
        loaded.metrics.cancel_to_free.observe(time.monotonic() - begun)

    def _fail(self, request: Request, error: KvferryError) -> None:
        """Ends the whole request with one error event."""
        loaded = self._node.require_loaded()
        request.session.push(request.error_output(error))
        loaded.metrics.requests.labels("error").inc()
        for index in sorted(request.open):
            self._stop_choice(loaded, request, index)

    def _stop_choice(self, loaded: LoadedNode, request: Request, index: int) -> None:
        """A prompt that is being received is closed by its receive, once no copy is in flight."""
        self._ended(request, index)
        task = request.receiving
        if task is None or index or request.open:
            loaded.engine.close(request.key(index))
        if task is not None and not request.open and task is not asyncio.current_task():
            task.cancel()

    def _ended(self, request: Request, index: int) -> None:
        request.open.discard(index)
        self._by_key.pop(request.key(index), None)
        if not request.open:
            self._requests.pop((request.session.number, request.spec.request_id, request.spec.attempt), None)

    async def aclose(self) -> None:
        for request in list(self._requests.values()):
            self._fail(request, Draining(f"{self._node.node_id} has shut down"))
        for session in self._sessions:
            session.close()
        await asyncio.gather(*self._receives, *self._compiling, return_exceptions=True)


def _count_pulls(loaded: LoadedNode, received: Received) -> None:
    for pull in received.pulls:
        loaded.metrics.transfer_bytes.labels(pull.transport).inc(pull.num_bytes)
        loaded.metrics.transfer_blocks.labels(pull.transport).inc(pull.num_blocks)
        loaded.metrics.transfer_seconds.labels(pull.transport).observe(pull.seconds)
