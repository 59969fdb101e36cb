"""One HTTP request on the nodes: submitted, followed, ended exactly once.

A `Run` is entered when the request is admitted and left exactly once, however it ends: all choices finished, an error,
or a client that went away (cancellation). Leaving cancels what is still running.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType
from typing import Self

from kvferry.common.errors import DeadlineExceeded, Internal, KvferryError
from kvferry.common.requests import FinishReason, RequestOutput
from kvferry.services.gateway.choice import Piece
from kvferry.services.gateway.deadline import Deadline
from kvferry.services.gateway.intake import Job
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.prompt_run import PromptRun
from kvferry.services.gateway.responses import Usage
from kvferry.services.gateway.serving import Service
from kvferry.services.gateway.sessions import Mailbox


class Run:
    """One HTTP request on the nodes. Enter, call `next` until it is None, leave."""

    def __init__(self, service: Service, job: Job, traceparent: str = "") -> None:
        self.job = job
        self._span = service.tracing.start(
            "request", traceparent, job.received_at, gen_ai__request__id=job.request_id, gen_ai__request__n=job.n
        )
        self.mailbox = Mailbox()
        self._service = service
        names = [f"{job.response_id}-{number}" for number in range(len(job.prompts))]
        self._prompts = {
            name: PromptRun(name, prompt, job, service, self.mailbox, self._span)
            for name, prompt in zip(names, job.prompts, strict=True)
        }
        self._first_index = {request_id: number * job.n for number, request_id in enumerate(self._prompts)}
        self._num_open = job.num_choices
        self._last_output_at = [0.0] * job.num_choices
        self._got_first = False
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
        try:
            for prompt in self._prompts.values():
                self.metrics.prompt_tokens.inc(len(prompt.prompt.token_ids))
                self.metrics.prompt_length.observe(len(prompt.prompt.token_ids))
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
        if self._got_first:  # until then, the deadline set at admission holds
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
        what = "next" if self._got_first else "first"
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
            self.metrics.cached_tokens.inc(output.cached_tokens)
        prompt.note(output)
        if not self._got_first:
            self._got_first = True
            self.metrics.first_token_came(time.monotonic() - self.job.received_at, output.times)
            self._span.set(gen_ai__latency__time_to_first_token=time.monotonic() - self.job.received_at)
        before = choice.num_tokens
        piece = choice.push(output)
        if prompt.prompt.shown is not None and not before:
            piece = Piece.join((prompt.prompt.shown.opening(prompt.logprobs), piece))
        self._measure(index, choice.num_tokens - before)
        if choice.finish_reason is not None:
            self._num_open -= 1
            self.metrics.finished[choice.finish_reason].inc()
            self.metrics.running.dec()
            prompt.choice_ended(output.index, by_node=output.finish_reason is not None)
        gained[index] = Piece.join((gained[index], piece)) if index in gained else piece

    def _measure(self, index: int, num_tokens: int) -> None:
        now = time.monotonic()
        if last := self._last_output_at[index]:
            self.metrics.inter_token.observe(now - last)
        self._last_output_at[index] = now
        self.metrics.generation_tokens.inc(num_tokens)

    def _leave(self, exc: BaseException | None) -> list[asyncio.Task[None]]:
        """Cancels what is still running and closes all accounts. The tasks that this cancelled."""
        self._service.release(self.mailbox)
        self._deadline.close()
        left = [prompt.leave() for prompt in self._prompts.values()]
        reason = FinishReason.ERROR if isinstance(exc, Exception) else FinishReason.ABORT
        self.metrics.finished[reason].inc(self._num_open)
        self.metrics.running.dec(self._num_open)
        self.metrics.e2e.observe(time.monotonic() - self.job.received_at)
        usage = self.usage
        self._span.set(
            gen_ai__usage__prompt_tokens=usage.prompt_tokens, gen_ai__usage__completion_tokens=usage.completion_tokens
        )
        self._span.end(error=exc)
        return [task for task in left if task is not None]
