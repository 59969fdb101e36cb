"""The prefill service: computes prompts, offers their blocks under a lease while it goes on computing. Never samples.

A prompt enters as a compute-only sequence and leaves block by block: each completed run of blocks is pinned under the
lease of its reader and reported. Leading blocks that it lacks and a peer holds are pulled first, into blocks that are
reserved for the whole prompt already. The end of the stream, however it comes, ends all of it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from kvferry.common.config import Config
from kvferry.common.errors import BadRequest, ContextTooLong, TransferFailed
from kvferry.common.hashing import root_name
from kvferry.common.log import add_log_field, log_fields
from kvferry.common.nodes import Role
from kvferry.common.requests import Holder
from kvferry.proto import kvferry_pb2 as pb
from kvferry.services.engine.outputs import AdmittedOutput, BlocksOutput, FailedOutput, StepReport
from kvferry.services.engine.sequence import Sequence
from kvferry.services.node.cached_pull import promising, pull_cached
from kvferry.services.node.context import LoadedNode, NodeContext
from kvferry.services.node.owner import BlockOwner, OwnerRun, Stream
from kvferry.services.node.reader import Wanted
from kvferry.services.node.runtime import run_node
from kvferry.services.rpc.convert import holders_from_pb
from kvferry.services.transfer.protocol import OwnerSide, OwnerState

log = logging.getLogger("kvferry.prefill")


def main(config: Config) -> int:
    return run_node(config, Role.PREFILL, PrefillService)


class PrefillService(BlockOwner):
    service_name = "Prefill"

    def __init__(self, context: NodeContext) -> None:
        super().__init__(context)
        self._by_key: dict[str, _PromptRun] = {}
        self._pulls: set[asyncio.Task[None]] = set()
        self._serial = itertools.count()

    @property
    def num_active(self) -> int:
        return super().num_active + len(self._pulls)

    def on_report(self, report: StepReport) -> None:
        for admitted in report.admitted:
            if (run := self._by_key.get(admitted.key)) is not None:
                task = run.start_pull(admitted)
                self._pulls.add(task)
                task.add_done_callback(self._pulls.discard)
        outputs: list[BlocksOutput | FailedOutput] = [*report.blocks, *report.failed]
        for output in outputs:
            if (run := self._by_key.get(output.key)) is not None:
                run.events.put_nowait(output)

    async def aclose(self) -> None:
        await super().aclose()
        await asyncio.gather(*self._pulls, return_exceptions=True)

    def _open_prompt(self, loaded: LoadedNode, start: pb.PrefillStart) -> OwnerRun:
        size, num_tokens = loaded.card.block_size, len(start.prompt_token_ids)
        if num_tokens > loaded.max_model_len:
            raise ContextTooLong(
                f"the prompt has {num_tokens} tokens; "
                f"the context of prefill node {self._node.node_id} is {loaded.max_model_len}",
                param="prompt",
            )
        num_blocks = (len(start.prompt_token_ids) - 1) // size
        if num_blocks <= start.first_block:
            raise TransferFailed(
                f"nothing to prefill: {len(start.prompt_token_ids)} prompt tokens have {num_blocks} full blocks of "
                f"{size} before the last one, the reader holds {start.first_block}"
            )
        if max(start.prompt_token_ids) >= loaded.model_config.vocab_size:
            raise BadRequest(f"token id {max(start.prompt_token_ids)} is outside the vocabulary", param="prompt")
        tokens = list(start.prompt_token_ids[: num_blocks * size])
        seq = Sequence(
            key=f"{start.request_id}#{next(self._serial)}",
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            root=root_name(loaded.card.model_fingerprint, loaded.card.numerics_id, start.cache_salt),
            block_size=size,
            sampling=None,
            priority=start.priority if self._node.config.engine.scheduling_policy == "priority" else 0,
        )
        cached = loaded.engine.num_cached_tokens(seq) // size
        holders = promising(self._node, holders_from_pb(start.holders), cached, num_blocks)
        seq.receive = bool(holders)
        loaded.engine.submit(seq)
        side = OwnerSide(loaded.leases, start.request_id, start.first_block)
        run = self._by_key[seq.key] = _PromptRun(self._node, seq, side, start, holders, self._by_key.pop)
        return run


class _PromptRun(OwnerRun):
    """One prompt being computed for one reader."""

    def __init__(
        self,
        node: NodeContext,
        seq: Sequence,
        side: OwnerSide,
        start: pb.PrefillStart,
        holders: list[Holder],
        forget: Callable[[str], object],
    ) -> None:
        super().__init__(node, side, len(seq.token_ids) // seq.block_size)
        self._loaded = node.require_loaded()
        self._seq = seq
        self._start = start
        self._holders = holders
        self._forget = forget
        self._pulling: asyncio.Task[None] | None = None
        self._has_ended = False
        self._cancelled_s = 0.0
        self._summary: dict[str, int] = {}
        self._span = node.tracing.start("prefill", start.traceparent, node=node.node_id, tokens=len(seq.token_ids))
        self._chunk_began_s = 0.0
        add_log_field("trace_id", self._span.trace_id)

    def start_pull(self, admitted: AdmittedOutput) -> asyncio.Task[None]:
        self._pulling = task = asyncio.create_task(self._pull(admitted))
        task.add_done_callback(self._pull_ended)
        return task

    def end(self) -> None:
        """Gives everything back: blocks of a running step right after it, those of a pull once nothing writes there."""
        done = self.side.state in (OwnerState.COMPUTED, OwnerState.RELEASED)
        super().end()
        self._has_ended = True
        self._cancelled_s = 0.0 if done else time.monotonic()
        self._forget(self._seq.key)
        if self._pulling is not None:
            self._pulling.cancel()
        else:
            self._loaded.engine.close(self._seq.key, cancelled_s=self._cancelled_s)
        self._loaded.metrics.requests.labels("stop" if done else "abort").inc()
        self._log_end("stop" if done else "abort")
        self._span.end()

    async def _pull(self, admitted: AdmittedOutput) -> None:
        wanted = Wanted(
            request_id=self._start.request_id,
            prompt_token_ids=tuple(self._seq.token_ids),
            cache_salt=self._start.cache_salt,
            priority=self._start.priority,
            first_block=admitted.first_block,
            block_ids=admitted.block_ids,
            span=self._span,
            http_request_id=self._start.http_request_id,
        )
        num_blocks = admitted.first_block
        start, trace_id = self._start, self._span.trace_id
        request_id = start.http_request_id or start.request_id
        with log_fields(request_id=request_id, prompt_id=start.request_id, trace_id=trace_id):
            try:
                num_blocks += sum(got.num_blocks for got in await pull_cached(self._node, wanted, self._holders))
            except Exception:
                log.exception("pulling for %s failed, computing it all", start.request_id)
        self._loaded.engine.receive_ended(admitted.key, num_blocks)

    def _log_end(self, how: str) -> None:
        facts = self._summary | {"prompt_tokens": len(self._seq.token_ids), "ended": how}
        log.info("%s ended (%s): %d tokens", self._start.request_id, how, len(self._seq.token_ids), extra=facts)

    def _pull_ended(self, _: asyncio.Task[None]) -> None:
        """Also for a task that was cancelled before it began."""
        self._pulling = None
        if self._has_ended:
            self._loaded.engine.close(self._seq.key, cancelled_s=self._cancelled_s)

    async def _on_output(self, context: Stream, output: BlocksOutput | FailedOutput) -> None:
        if isinstance(output, FailedOutput):
            raise output.error
        self._trace(output)
        if (offer := self.side.filled(output.block_ids, complete=output.complete)) is not None:
            await self._write_offer(context, offer)
        if output.complete:
            self._loaded.engine.close(self._seq.key)
            await self._write(context, pb.PrefillReply(computed=self._computed(output)))

    def _trace(self, blocks: BlocksOutput) -> None:
        if not self._chunk_began_s:
            self._span.phase("queue", blocks.arrival_s, blocks.admitted_s)
            self._chunk_began_s = blocks.admitted_s
        self._span.phase("chunk", self._chunk_began_s, blocks.computed_s, blocks=len(blocks.block_ids))
        self._chunk_began_s = blocks.computed_s

    def _computed(self, blocks: BlocksOutput) -> pb.PrefillComputed:
        computed = len(self._seq.token_ids) - blocks.cached_tokens - blocks.received_tokens
        self._loaded.metrics.note_prompt(computed, blocks.cached_tokens, blocks.received_tokens)
        self._summary = {
            "computed_tokens": computed,
            "cached_tokens": blocks.cached_tokens,
            "received_tokens": blocks.received_tokens,
        }
        return pb.PrefillComputed(
            cached_tokens=blocks.cached_tokens,
            computed_tokens=computed,
            queue_s=blocks.admitted_s - blocks.arrival_s,
            prefill_s=time.monotonic() - blocks.admitted_s,
        )
