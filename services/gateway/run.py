"""One HTTP request on the nodes: submitted, followed, ended exactly once.

A `Run` is entered when the request is admitted and left exactly once, however it ends: all choices finished, an error,
or a client that went away (cancellation). Leaving cancels what is still running.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from kvferry.common.errors import DeadlineExceeded, Internal, KvferryError
from kvferry.common.log import add_log_field
from kvferry.common.requests import FinishReason, RequestOutput, RequestTimes
from kvferry.services.gateway.choice import Piece
from kvferry.services.gateway.deadline import Deadline
from kvferry.services.gateway.intake import Job
from kvferry.services.gateway.mailbox import Mailbox
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.prompt_run import PromptRun
from kvferry.services.gateway.recent import RecentRequest
from kvferry.services.gateway.responses import Usage
from kvferry.services.gateway.serving import Service


@dataclass(frozen=True, slots=True)
class _First:
    """The first token: when it came after the request, and what the node said of it."""

    seconds: float = 0.0
    times: RequestTimes = field(default_factory=RequestTimes)
    prefilled_by: str = ""


class Run:
    """One HTTP request on the nodes. Enter, call `next` until it is None, leave."""

    def __init__(self, service: Service, job: Job, traceparent: str = "") -> None:
        self.job = job
        self._span = service.tracing.start(
            "request", traceparent, job.received_at, gen_ai__request__id=job.request_id, gen_ai__request__n=job.n
        )
        add_log_field("trace_id", self._span.trace_id)
        self.mailbox = Mailbox()
        self.ended: RecentRequest | None = None  # what became of it, once it has been left
        self._service = service
        names = [f"{job.response_id}-{number}" for number in range(len(job.prompts))]
        self._prompts = {
            name: PromptRun(name, prompt, job, service, self.mailbox, self._span, decides=name == names[0])
            for name, prompt in zip(names, job.prompts, strict=True)
        }
        self._first_index = {request_id: number * job.n for number, request_id in enumerate(self._prompts)}
        self._num_open = job.num_choices
        self._first_output_at = [0.0] * job.num_choices
        self._last_output_at = [0.0] * job.num_choices
        self._first: _First | None = None
        self._error: KvferryError | None = None
        self._deadline = Deadline(self._too_late)

    @property
    def metrics(self) -> GatewayMetrics:
        return self._service.metrics

    @property
    def route(self) -> str:
        """Where the first prompt went first."""
        return next(iter(self._prompts.values())).route

    @property
    def usage(self) -> Usage:
        prompts = self._prompts.values()
        return Usage(
            prompt_tokens=sum(len(prompt.prompt.token_ids) for prompt in prompts),
            completion_tokens=sum(choice.num_tokens for prompt in prompts for choice in prompt.choices),
            cached_tokens=sum(prompt.cached_tokens for prompt in prompts),
        )

    async def __aenter__(self) -> Self:
        """Raises Draining, Overloaded, or Unavailable when no node can take it."""
        self._service.admit(self.mailbox)
        self._deadline.set(self._service.queue_timeout_s - (time.monotonic() - self.job.received_at))
        self.metrics.running.inc(self.job.num_choices)
        self.metrics.waiting.inc(self.job.num_choices)
        try:
            for prompt in self._prompts.values():
                self.metrics.prompt_accepted(len(prompt.prompt.token_ids), prompt.prompt.sampling, self.job.n)
                await prompt.submit()
        except BaseException as exc:
            self._leave(exc)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = self._leave(exc)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def next(self) -> dict[int, Piece] | None:
        """What the choices have gained since the last call, by index; None once all have finished.

        Waits for at least one output. Raises the error that ends the run, after everything that came before it.
        """
        gained: dict[int, Piece] = {}
        if self._first is not None:  # until then, the deadline set at admission holds
            self._deadline.set(self._service.queue_timeout_s)
        while self._num_open and not gained:
            if self._error is not None:
                raise self._error
            try:
                for output in await self.mailbox.take():
                    self._take(output, gained)
            except KvferryError as exc:
                self._error = exc
        self._deadline.set(None)
        return gained or None

    def _too_late(self) -> None:
        what = "first" if self._first is None else "next"
        limit_s = self._service.queue_timeout_s
        self.mailbox.fail(DeadlineExceeded(f"the {what} token did not come within {limit_s:g} s"))

    def _take(self, output: RequestOutput, gained: dict[int, Piece]) -> None:
        prompt = self._prompts[output.request_id]
        if output.attempt != prompt.attempt:
            return
        if output.error_code:
            prompt.lost(output)
            return
        choice = prompt.choices[output.index]
        if choice.finish_reason is not None:
            return  # a stop string ended it; the node had gone on
        if not output.token_ids and output.finish_reason is None:
            return
        if output.finish_reason is FinishReason.ERROR:
            raise Internal("the decode node ended the request with an error that it did not name")
        index = self._first_index[output.request_id] + output.index
        if not prompt.has_output:
            self.metrics.prompt_computed(len(prompt.prompt.token_ids), output)
        prompt.note(output)
        if self._first is None:
            self._first = first = _First(time.monotonic() - self.job.received_at, output.times, output.prefilled_by)
            self.metrics.first_token_came(first.seconds, output.times)
            self._service.recent.first_token(first.seconds)
            self._span.set(gen_ai__latency__time_to_first_token=first.seconds)
        before = choice.num_tokens
        piece = choice.push(output)
        if prompt.prompt.shown is not None and not before:
            piece = Piece.join((prompt.prompt.shown.opening(prompt.logprobs), piece))
        self._measure(index, choice.num_tokens - before)
        if choice.finish_reason is not None:
            self._num_open -= 1
            self.metrics.finished[choice.finish_reason].inc()
            self.metrics.tokens.flush()
            self.metrics.running.dec()
            self.metrics.choice_finished(
                choice.num_tokens, self._last_output_at[index] - self._first_output_at[index], prompt.times
            )
            prompt.choice_ended(output.index, by_node=output.finish_reason is not None)
        gained[index] = Piece.join((gained[index], piece)) if index in gained else piece

    def _measure(self, index: int, num_tokens: int) -> None:
        now, gap_s = time.monotonic(), None
        if last := self._last_output_at[index]:
            gap_s = now - last
        else:
            self._first_output_at[index] = now
            self.metrics.waiting.dec()
        self._last_output_at[index] = now
        self.metrics.tokens.note(num_tokens, gap_s)
        self._service.recent.tokens(num_tokens, gap_s)

    def _leave(self, exc: BaseException | None) -> list[asyncio.Task[None]]:
        """Cancels what is still running and closes all accounts. The tasks that this cancelled."""
        self._service.release(self.mailbox)
        self._deadline.close()
        left = [prompt.leave() for prompt in self._prompts.values()]
        reason = FinishReason.ERROR if isinstance(exc, Exception) else FinishReason.ABORT
        self.metrics.finished[reason].inc(self._num_open)
        self.metrics.running.dec(self._num_open)
        self.metrics.waiting.dec(self._first_output_at.count(0.0))
        self.metrics.e2e.observe(time.monotonic() - self.job.received_at)
        usage = self.usage
        self._span.set(
            gen_ai__usage__prompt_tokens=usage.prompt_tokens, gen_ai__usage__completion_tokens=usage.completion_tokens
        )
        self._span.end(error=exc)
        self.ended = self._recent(usage, exc)
        self._service.recent.ended(self.ended)
        return [task for task in left if task is not None]

    def _recent(self, usage: Usage, exc: BaseException | None) -> RecentRequest:
        prompts = list(self._prompts.values())
        first = self._first or _First()
        names = {node.instance_id: node.node_id for node in self._service.table.nodes}
        return RecentRequest(
            request_id=self.job.request_id,
            kind="chat" if self.job.response_id.startswith("chatcmpl-") else "completion",
            ended_at=time.time(),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            decode=prompts[0].node_id,
            prefill=names.get(first.prefilled_by, first.prefilled_by),
            num_attempts=1 + max(prompt.attempt for prompt in prompts),
            times=first.times,
            first_token_s=first.seconds if self._first is not None else None,
            total_s=time.monotonic() - self.job.received_at,
            ended=self._ending(exc),
            is_error=isinstance(exc, Exception),
        )

    def _ending(self, exc: BaseException | None) -> str:
        if isinstance(exc, Exception):
            return exc.code if isinstance(exc, KvferryError) else Internal.code
        if self._num_open:
            return FinishReason.ABORT
        reasons = {choice.finish_reason for prompt in self._prompts.values() for choice in prompt.choices}
        return "+".join(sorted(reason.value for reason in reasons if reason is not None))
