"""One HTTP request on the nodes: submitted, followed, retried, ended exactly once.

A `Run` is entered when the request is admitted and left exactly once, however it ends: all choices finished, an error,
or a client that went away (cancellation). Leaving cancels what is still running.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from kvferry.common.errors import (
    Cancelled,
    DeadlineExceeded,
    Internal,
    KvferryError,
    Unavailable,
    from_code,
)
from kvferry.common.requests import FinishReason, GenerateRequest, RequestOutput, TokenLogprobs
from kvferry.services.gateway.choice import Choice, Piece, TextParams
from kvferry.services.gateway.deadline import Deadline
from kvferry.services.gateway.intake import Job, PromptJob
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.nodes import LedgerEntry
from kvferry.services.gateway.responses import Usage
from kvferry.services.gateway.serving import Service
from kvferry.services.gateway.sessions import Mailbox, Submission

MAX_ATTEMPTS = 2


class _Prompt:
    """One prompt of a run: its current attempt and its choices."""

    __slots__ = (
        "attempt",
        "cached_tokens",
        "choices",
        "entry",
        "has_output",
        "job",
        "logprobs",
        "matches",
        "submission",
        "tried",
    )

    def __init__(self, job: PromptJob, service: Service, text: TextParams, n: int) -> None:
        self.job = job
        first_offset = job.shown.num_chars if job.shown is not None else 0
        self.choices = [Choice(service.tokenizer, text, first_offset) for _ in range(n)]
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.attempt = 0
        self.tried: frozenset[str] = frozenset()
        self.matches: dict[str, int] = {}
        self.submission: Submission | None = None
        self.entry: LedgerEntry | None = None
        self.has_output = False
        self.cached_tokens = 0


class Run:
    """One HTTP request on the nodes. Enter, call `next` until it is None, leave."""

    def __init__(self, service: Service, job: Job) -> None:
        self.job = job
        self.mailbox = Mailbox()
        self.route = ""
        self._service = service
        self._prompts = {
            f"{job.response_id}-{number}": _Prompt(prompt, service, job.text, job.n)
            for number, prompt in enumerate(job.prompts)
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
    def usage(self) -> Usage:
        prompts = self._prompts.values()
        return Usage(
            prompt_tokens=sum(len(prompt.job.token_ids) for prompt in prompts),
            completion_tokens=sum(choice.num_tokens for prompt in prompts for choice in prompt.choices),
            cached_tokens=sum(prompt.cached_tokens for prompt in prompts),
        )

    async def __aenter__(self) -> Self:
        """Raises Draining, Overloaded, or Unavailable when no node can take it."""
        self._service.admit(self.mailbox)
        self._deadline.set(self._service.queue_timeout_s - (time.monotonic() - self.job.received_at))
        self.metrics.running.inc(self.job.num_choices)
        cards = self._service.table.cards()
        try:
            for request_id, prompt in self._prompts.items():
                self.metrics.prompt_tokens.inc(len(prompt.job.token_ids))
                self.metrics.prompt_length.observe(len(prompt.job.token_ids))
                prompt.matches = await self._service.lookup.match(prompt.job.token_ids, self.job.cache_salt, cards)
                await self._submit(request_id, prompt)
        except BaseException as exc:
            self._leave(exc)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave(exc)

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
                    await self._take(output, gained)
            except KvferryError as exc:
                self._error = exc
        self._deadline.set(None)
        return gained or None

    def _too_late(self) -> None:
        what = "next" if self._got_first else "first"
        limit_s = self._service.queue_timeout_s
        self.mailbox.fail(DeadlineExceeded(f"the {what} token did not come within {limit_s:g} s"))

    async def _take(self, output: RequestOutput, gained: dict[int, Piece]) -> None:
        prompt = self._prompts[output.request_id]
        if output.attempt != prompt.attempt:
            return
        if output.error_code:
            await self._retry_or_raise(output, prompt)
            return
        prompt.cached_tokens = max(prompt.cached_tokens, output.cached_tokens)
        choice = prompt.choices[output.index]
        if choice.finish_reason is not None:
            return  # a stop string ended it; the node had gone on
        if not output.token_ids and output.finish_reason is None:
            return
        if output.finish_reason is FinishReason.ERROR:
            raise Internal("the decode node ended the request with an error that it did not name")
        index = self._first_index[output.request_id] + output.index
        if not prompt.has_output:
            self._first_output(prompt, output)
        before = choice.num_tokens
        piece = choice.push(output)
        if prompt.job.shown is not None and not before:
            piece = Piece.join((prompt.job.shown.opening(prompt.logprobs), piece))
        self._measure(index, choice.num_tokens - before)
        if choice.finish_reason is not None:
            self._finished(prompt, output, choice.finish_reason)
        gained[index] = Piece.join((gained[index], piece)) if index in gained else piece

    def _first_output(self, prompt: _Prompt, output: RequestOutput) -> None:
        prompt.has_output = True
        prompt.logprobs = output.prompt_logprobs
        self.metrics.cached_tokens.inc(output.cached_tokens)
        if prompt.entry is not None:
            prompt.entry.prompt_done()
        if not self._got_first:
            self._got_first = True
            self.metrics.first_token_came(time.monotonic() - self.job.received_at, output.times)

    def _measure(self, index: int, num_tokens: int) -> None:
        now = time.monotonic()
        if last := self._last_output_at[index]:
            self.metrics.inter_token.observe(now - last)
        self._last_output_at[index] = now
        self.metrics.generation_tokens.inc(num_tokens)

    def _finished(self, prompt: _Prompt, output: RequestOutput, reason: FinishReason) -> None:
        self._num_open -= 1
        self.metrics.finished[reason].inc()
        self.metrics.running.dec()
        if prompt.submission is not None and output.finish_reason is None:
            prompt.submission.cancel(output.index)
        if prompt.entry is not None and all(choice.finish_reason is not None for choice in prompt.choices):
            prompt.entry.close()

    async def _retry_or_raise(self, output: RequestOutput, prompt: _Prompt) -> None:
        """A failure before any token is tried once on another node; anything else ends the run."""
        error = from_code(output.error_code, output.error_message, output.error_param or None)
        if isinstance(error, Cancelled):  # not by us: the client is still there
            error = Unavailable(error.message)
        if prompt.has_output or not error.retryable or prompt.attempt + 1 >= MAX_ATTEMPTS:
            raise error
        prompt.attempt += 1
        try:
            await self._submit(output.request_id, prompt)
        except Unavailable:
            raise error from None
        self.metrics.retries.inc()

    async def _submit(self, request_id: str, prompt: _Prompt) -> None:
        plan = await self._service.plan(request_id, len(prompt.job.token_ids), prompt.matches, prompt.tried)
        self._service.remember(plan, self.job)
        self.route = self.route or plan.compact()
        request = GenerateRequest(
            request_id=request_id,
            prompt_token_ids=prompt.job.token_ids,
            sampling=prompt.job.sampling,
            n=self.job.n,
            attempt=prompt.attempt,
            cache_salt=self.job.cache_salt,
            prefill=plan.prefill,
            priority=self.job.priority,
        )
        if prompt.entry is not None:
            prompt.entry.close()
        prompt.tried |= {plan.decode.instance_id}
        prompt.entry = self._service.ledger.open(plan, self.job.n)
        prompt.submission = self._service.pool.submit(plan.decode, request, self.mailbox)

    def _leave(self, exc: BaseException | None) -> None:
        """Cancels what is still running and closes all accounts."""
        self._service.release(self.mailbox)
        self._deadline.close()
        for prompt in self._prompts.values():
            if prompt.submission is not None:
                prompt.submission.cancel()
            if prompt.entry is not None:
                prompt.entry.close()
        reason = FinishReason.ERROR if isinstance(exc, Exception) else FinishReason.ABORT
        self.metrics.finished[reason].inc(self._num_open)
        self.metrics.running.dec(self._num_open)
        self.metrics.e2e.observe(time.monotonic() - self.job.received_at)
