"""One prompt of a request on the nodes: what its choices have had, and the attempts to get the rest.

When an attempt is lost with its decode node, the next one goes on behind the tokens that have come: another node takes
them as output that it has produced itself, so the client's stream continues as if nothing had happened. Attempts are
numbered, and only the last one is listened to.

    attempt ends with         before any token                         after the first token
    error that is final       ends the request                         ends the request
    refusal, failure          once more at once on another node        goes on elsewhere  }  `max_resumptions` times in
    node lost                 again                    }                                     all; draining, and nodes
    node draining             again                    } `resume_timeout` seconds at most    that were never reached,
                                                         to find a node that takes it        do not count

A beam search has no tokens until it has ended, and so begins anew.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace

from kvferry.common.errors import (
    Cancelled,
    Draining,
    Internal,
    KvferryError,
    NodeLost,
    Overloaded,
    Unavailable,
    from_code,
)
from kvferry.common.nodes import LayoutCard
from kvferry.common.requests import (
    GenerateRequest,
    RequestOutput,
    RequestTimes,
    ResumedChoice,
    SamplingParams,
    TokenLogprobs,
)
from kvferry.common.tracing import Span
from kvferry.services.gateway.choice import Choice
from kvferry.services.gateway.intake import Job, PromptJob
from kvferry.services.gateway.lookup import prompt_names
from kvferry.services.gateway.mailbox import Mailbox
from kvferry.services.gateway.nodes import LedgerEntry
from kvferry.services.gateway.plan import Plan
from kvferry.services.gateway.serving import Service
from kvferry.services.gateway.sessions import Submission

log = logging.getLogger("kvferry.gateway")

MAX_REFUSALS = 2


@dataclass(frozen=True, slots=True)
class _Loss:
    """Since then no output has come, whatever was tried."""

    at_s: float
    node_id: str
    error: KvferryError


class PromptRun:
    """`submit` once, then `note` each output of the current attempt, or `lost`; `leave` at last."""

    def __init__(
        self,
        request_id: str,
        prompt: PromptJob,
        job: Job,
        service: Service,
        mailbox: Mailbox,
        span: Span,
        *,
        decides: bool = True,
    ) -> None:
        """`decides`: whether its predicted wait may have the whole request refused."""
        self.request_id = request_id
        self._span = span
        self.prompt = prompt
        first_offset = prompt.shown.num_chars if prompt.shown is not None else 0
        self.choices = [Choice(service.tokenizer, job.text, first_offset) for _ in range(job.n)]
        self.logprobs: tuple[TokenLogprobs, ...] = ()
        self.cached_tokens = 0
        self.has_output = False
        self.times = RequestTimes()  # to its first token
        self.attempt = 0
        self.route = ""
        self._tokens: list[list[int]] = [[] for _ in range(job.n)]
        self._job = job
        self._service = service
        self._mailbox = mailbox
        self._submission: Submission | None = None
        self._entry: LedgerEntry | None = None
        self._plan: Plan | None = None
        self._planned_at_s = 0.0
        self._tried: frozenset[str] = frozenset()
        self._decides = decides
        self._num_refusals = 0
        self._num_resumptions = 0
        self._loss: _Loss | None = None
        self._again: asyncio.Task[None] | None = None

    async def submit(self, patience_s: float = 0.0) -> None:
        """Sends what is still wanted to the best node. Raises Unavailable when there is none within `patience_s`, and
        Overloaded when the first token of a new request would come too late."""
        began_s, resumed = time.monotonic(), self._resumed()
        tokens = self.prompt.token_ids
        if len(resumed) == 1:
            tokens += resumed[0].token_ids
        service = self._service
        named = await prompt_names(tokens, self._job.cache_salt, service.table.cards())
        found = await service.lookup.match(named.values())
        plan = await service.plan(
            self.request_id,
            len(tokens),
            found.held,
            self._tried,
            coming=service.ledger.coming(named.values(), found.coming),
            like=self._card,
            patience_s=patience_s,
        )
        service.remember(plan, self._job)
        if self._decides and not self.attempt:
            service.check_wait(plan)
        self.route = self.route or plan.compact()
        request = GenerateRequest(
            request_id=self.request_id,
            prompt_token_ids=self.prompt.token_ids,
            sampling=self._sampling(),
            n=self._job.n,
            attempt=self.attempt,
            cache_salt=self._job.cache_salt,
            prefill=plan.prefill,
            local_by_choice=plan.is_local_by_choice,
            holders=plan.holders,
            priority=self._job.priority,
            resumed=resumed,
            traceparent=self._span.traceparent,
            http_request_id=self._job.request_id,
        )
        self._span.phase("route", began_s, time.monotonic(), node=plan.decode.node_id, attempt=self.attempt)
        self._tried |= {plan.decode.instance_id}
        self._plan, self._planned_at_s = plan, time.monotonic()
        self._entry = service.ledger.open(plan, self._job.n, named)
        self._submission = service.pool.submit(plan.decode, request, self._mailbox)
        service.lookup.expect(plan, named)

    def note(self, output: RequestOutput) -> None:
        """An output of the current attempt, for a choice that has not ended."""
        if self._loss is not None:
            self._went_on(self._loss)
            self._loss = None
        self._tokens[output.index].extend(output.token_ids)
        if self._plan is not None:
            self._service.pool.breakers.worked(self._plan.decode.instance_id)
        if self._entry is not None:
            self._entry.prompt_done()
        if not self.has_output:
            self.has_output = True
            if self._plan is not None:
                took_s = time.monotonic() - self._planned_at_s
                self._service.metrics.route_error.observe(took_s - self._plan.ttft_ms / 1e3)
            self.logprobs = output.prompt_logprobs
            self.times = output.times
        if self._submission is not None and not self._submission.request.resumed:
            self.cached_tokens = max(self.cached_tokens, output.cached_tokens)

    def choice_ended(self, index: int, *, by_node: bool) -> None:
        if self._submission is not None and not by_node:
            self._submission.cancel(index)
        if self._entry is not None and all(choice.finish_reason is not None for choice in self.choices):
            self._entry.close()

    def lost(self, output: RequestOutput) -> None:
        """The current attempt has ended with an error. Begins another in the background, or raises what to tell."""
        error = from_code(output.error_code, output.error_message, output.error_param or None)
        if isinstance(error, Cancelled):  # not by us: the client is still there
            error = Unavailable(error.message)
        if self._entry is not None:
            self._entry.close()
        self._judge(error)
        patience_s = self._patience_s(error)
        self._loss = self._loss or _Loss(time.monotonic(), self.node_id, error)
        self.attempt += 1
        self._again = asyncio.create_task(self._try_again(error, patience_s))

    def leave(self) -> asyncio.Task[None] | None:
        """Cancels what is still running. Safe to call again. The task returned is to be awaited."""
        if self._submission is not None:
            self._submission.cancel()
        if self._entry is not None:
            self._entry.close()
        if self._again is not None:
            self._again.cancel()
        return self._again

    @property
    def node_id(self) -> str:
        """The decode node of the current attempt, "" before there is one."""
        return self._plan.decode.node_id if self._plan is not None else ""

    # ---- inside

    @property
    def _card(self) -> LayoutCard | None:
        """How the tokens so far have been computed: others would compute other ones."""
        return self._plan.decode.card if self._plan is not None and self.has_output else None

    def _resumed(self) -> tuple[ResumedChoice, ...]:
        if not self.has_output:
            return ()
        numbered = enumerate(zip(self.choices, self._tokens, strict=True))
        return tuple(ResumedChoice(i, tuple(had)) for i, (choice, had) in numbered if choice.finish_reason is None)

    def _sampling(self) -> SamplingParams:
        """What came with the first token must not come twice."""
        sampling = self.prompt.sampling
        return replace(sampling, prompt_logprobs=None) if self.has_output else sampling

    def _patience_s(self, error: KvferryError) -> float:
        """How long to look for a node that goes on. Raises what to tell where nothing can, or all is used up."""
        if not error.retryable or (self.has_output and self.prompt.sampling.beam is not None):
            raise _told(error)
        if not self.has_output and not isinstance(error, NodeLost | Draining):
            self._num_refusals += 1
            if self._num_refusals >= MAX_REFUSALS:
                raise _told(error)
            return 0.0
        if self._submission is not None and self._submission.was_sent and not isinstance(error, Draining):
            most = self._service.max_resumptions
            if self._num_resumptions >= most:
                raise _told(error, f"; the request has gone on {most} times, as often as it may")
            self._num_resumptions += 1
        waited_s = time.monotonic() - self._loss.at_s if self._loss is not None else 0.0
        return max(self._service.resume_timeout_s - waited_s, 0.0)

    def _judge(self, error: KvferryError) -> None:
        """What the node's error says of the node. A lost session has told the breaker itself."""
        if self._plan is None or isinstance(error, NodeLost):
            return
        breakers, instance_id = self._service.pool.breakers, self._plan.decode.instance_id
        if isinstance(error, Internal) or (error.retryable and not isinstance(error, Overloaded | Draining)):
            breakers.failed(instance_id)
        else:
            breakers.worked(instance_id)

    async def _try_again(self, error: KvferryError, patience_s: float) -> None:
        """Submits once more, or ends the whole run."""
        try:
            await self.submit(patience_s)
        except Unavailable:
            limit_s = self._service.resume_timeout_s
            late = self.has_output or isinstance(error, NodeLost | Draining)
            self._mailbox.fail(_told(error, f"; no decode node took it over within {limit_s:g} s" if late else ""))
        except KvferryError as exc:
            self._mailbox.fail(exc)
        except Exception:
            log.exception("request %s could not be submitted again", self.request_id)
            self._mailbox.fail(Internal("internal error: the gateway's log has the details"))

    def _went_on(self, loss: _Loss) -> None:
        """The first output after a loss: counts it and says so, in one line."""
        reason = loss.error.code
        if self.has_output:
            self._service.metrics.resumes.labels(reason).inc()
        else:
            self._service.metrics.retries.inc()
        facts = {
            "prompt_id": self.request_id,
            "attempt": self.attempt,
            "from_node": loss.node_id,
            "to_node": self.node_id,
            "num_tokens": sum(map(len, self._tokens)),
            "reason": reason,
        }
        said = " ".join(f"{name}={value}" for name, value in facts.items())
        log.warning("request goes on: %s (%s)", said, loss.error.message, extra=facts)


def _told(error: KvferryError, more: str = "") -> KvferryError:
    """As the client is told of it."""
    kind = Unavailable if isinstance(error, NodeLost) else type(error)
    return kind(error.message + more, param=error.param)
