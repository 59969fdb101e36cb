"""One submitted request on a decode node: its choices, where its first output's facts come from, how it ends."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field, replace

from kvferry.common.errors import BadRequest, ContextTooLong, KvferryError
from kvferry.common.requests import FinishReason, GenerateRequest, Holder, RequestOutput, RequestTimes
from kvferry.common.tracing import NO_SPAN, Span
from kvferry.services.decode.session import GatewaySession
from kvferry.services.engine.outputs import FirstToken, TokenOutput
from kvferry.services.node.context import LoadedNode
from kvferry.services.node.reader import Received


@dataclass(slots=True, eq=False)
class Request:
    """`choices`: those to be produced, each with the tokens it has had from an earlier attempt; the first one's
    sequence computes the prompt for all. `open`: those that have not ended. `receiving`: the task that copies a peer's
    blocks for the first one. `holders`: whom some of them will be pulled from."""

    spec: GenerateRequest
    session: GatewaySession
    choices: dict[int, tuple[int, ...]]
    open: set[int]
    started_s: float = field(default_factory=time.monotonic)
    holders: list[Holder] = field(default_factory=list)
    received: Received | None = None
    prefilled_by: str = ""
    span: Span = NO_SPAN
    receiving: asyncio.Task[None] | None = None
    facts: FirstToken | None = None
    num_output_tokens: int = 0
    cancelled_s: float = 0.0

    @classmethod
    def of(cls, spec: GenerateRequest, session: GatewaySession) -> Request:
        choices = {choice.index: choice.token_ids for choice in sorted(spec.resumed, key=lambda choice: choice.index)}
        choices = choices or dict.fromkeys(range(spec.n), ())
        return cls(spec, session, choices, set(choices))

    @property
    def first(self) -> int:
        return next(iter(self.choices))

    @property
    def entering_token_ids(self) -> tuple[int, ...]:
        """What its first sequence starts with: the prompt, and what a choice that is alone has had already."""
        resumed = self.choices[self.first] if len(self.choices) == 1 else ()
        return (*self.spec.prompt_token_ids, *resumed)

    def key(self, index: int) -> str:
        """Name of a choice's sequence in the engine, unique over sessions and attempts."""
        return f"{self.session.number}/{self.spec.request_id}/{self.spec.attempt}/{index}"

    @property
    def log_fields(self) -> dict[str, str]:
        """What every line about it carries, on all nodes and gateways alike."""
        spec = self.spec
        request_id = spec.http_request_id or spec.request_id
        return {"request_id": request_id, "prompt_id": spec.request_id, "trace_id": self.span.trace_id}

    @property
    def summary(self) -> dict[str, str | int]:
        facts = self.facts
        return {
            "prompt_tokens": len(self.spec.prompt_token_ids),
            "generation_tokens": self.num_output_tokens,
            "computed_tokens": facts.computed_tokens if facts else 0,
            "cached_tokens": facts.cached_tokens if facts else 0,
            "received_tokens": facts.received_tokens if facts else 0,
            "prefilled_by": self.prefilled_by,
        }

    def note_first(self, first: FirstToken) -> None:
        self.facts = first
        begun = first.received_s or first.admitted_s
        self.span.phase("queue", first.arrival_s, first.admitted_s)
        self.span.phase("first_step", begun, first.token_s, computed=first.computed_tokens)

    def is_token_only(self, output: TokenOutput) -> bool:
        """There is nothing to tell of it but the token."""
        has_logprobs = output.logprobs is not None and self.spec.sampling.logprobs is not None
        return not (output.first or output.finish_reason or has_logprobs)

    def token_output(self, index: int, output: TokenOutput) -> RequestOutput:
        logprobs = (output.logprobs,) if output.logprobs is not None and self.spec.sampling.logprobs is not None else ()
        result = RequestOutput(
            request_id=self.spec.request_id,
            attempt=self.spec.attempt,
            index=index,
            token_ids=(output.token_id,),
            logprobs=logprobs,
            finish_reason=output.finish_reason,
            stop_token_id=output.stop_token_id,
        )
        return self._with_prompt_facts(result, output.first) if output.first else result

    def error_output(self, error: KvferryError) -> RequestOutput:
        """The one event that ends the whole request."""
        return RequestOutput(
            request_id=self.spec.request_id,
            attempt=self.spec.attempt,
            finish_reason=FinishReason.ERROR,
            error_code=error.code,
            error_message=error.message,
            error_param=error.param or "",
        )

    def _with_prompt_facts(self, output: RequestOutput, first: FirstToken) -> RequestOutput:
        """Adds what the first output of a choice tells: where its prompt's tokens came from and how long that took."""
        remote = self.received if first.received_tokens else None
        computed = first.computed_tokens + (remote.computed_tokens if remote else 0)
        begun = first.received_s or first.admitted_s
        times = RequestTimes(
            queue_s=first.admitted_s - first.arrival_s + (remote.queue_s if remote else 0.0),
            prefill_s=remote.prefill_s if remote else first.token_s - begun,
            transfer_s=remote.transfer_s if remote else 0.0,
            first_step_s=first.token_s - begun if remote else 0.0,
        )
        return replace(
            output,
            computed_tokens=computed,
            local_cached_tokens=first.cached_tokens,
            received_tokens=first.received_tokens,
            cached_tokens=max(len(self.spec.prompt_token_ids) - computed, 0),
            prefilled_by=self.prefilled_by if remote else "",
            times=times,
            prompt_logprobs=first.prompt_logprobs,
        )


def validate(spec: GenerateRequest, loaded: LoadedNode) -> None:
    """What must hold whoever submits it: nothing here may be left to break a step that others share."""
    tokens, limit = spec.prompt_token_ids, loaded.max_model_len
    if not tokens:
        raise BadRequest("the prompt is empty", param="prompt")
    if not all(spec.sampling.bad_words):
        raise BadRequest("a bad word has no tokens", param="bad_words")
    if spec.n < 1 or spec.sampling.max_tokens < 1:
        raise BadRequest(f"n {spec.n} and max_tokens {spec.sampling.max_tokens} must be at least 1", param="n")
    if len(tokens) >= limit:
        raise ContextTooLong(
            f"the prompt has {len(tokens)} tokens; with one to produce the limit is {limit}", param="prompt"
        )
    _validate_resumed(spec, limit)
    if spec.sampling.beam is not None and (structured := spec.sampling.structured) is not None:
        raise BadRequest(f"{structured.param}: beam search cannot follow a grammar", param=structured.param)
    vocab = loaded.model_config.vocab_size
    params = spec.sampling
    listed = (tokens, params.stop_token_ids, (t for t, _ in params.logit_bias), params.allowed_token_ids)
    named = itertools.chain(*listed, *params.bad_words, *(choice.token_ids for choice in spec.resumed))
    if (worst := max(named)) >= vocab:
        raise BadRequest(f"token id {worst} is outside the vocabulary of {vocab} tokens", param="prompt")


def _validate_resumed(spec: GenerateRequest, limit: int) -> None:
    if spec.resumed and spec.sampling.beam is not None:
        raise BadRequest("a beam search cannot be resumed", param="resumed")
    indexes = {choice.index for choice in spec.resumed}
    if len(indexes) != len(spec.resumed) or max(indexes, default=0) >= spec.n:
        raise BadRequest(
            f"resumed choices {[choice.index for choice in spec.resumed]} must be different and below n, {spec.n}",
            param="resumed",
        )
    longest = max((len(choice.token_ids) for choice in spec.resumed), default=0)
    most = min(spec.sampling.max_tokens, limit - len(spec.prompt_token_ids))
    if longest >= most:
        raise BadRequest(
            f"a resumed choice has {longest} tokens: of {most} that it may have none is left", param="resumed"
        )
