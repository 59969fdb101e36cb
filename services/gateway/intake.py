"""From a well-formed request to a job for the nodes: model name, chat template, tokens, limits, seed.

Everything a request can be refused for without asking a node is found here, before anything is spent on it. Long
texts are rendered and tokenised off the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.common.config import nearest
from kvferry.common.errors import BadRequest, ContextTooLong, ModelNotFound, Unavailable
from kvferry.common.requests import SamplingParams
from kvferry.services.gateway.choice import TextParams
from kvferry.services.gateway.messages import Prompt
from kvferry.services.gateway.nodes import NodeTable
from kvferry.services.gateway.openai import (
    DEFAULT_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    Generation,
    TokenizeRequest,
)
from kvferry.services.gateway.tokenizer import Tokenizer

LONG_TEXT_CHARS = 4000  # longer ones are worth a thread


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt as the nodes will see it."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, ready for the nodes. Choice `s` of prompt `p` has index `p * n + s`."""

    response_id: str
    request_id: str
    prompts: tuple[PromptJob, ...]
    n: int
    text: TextParams
    cache_salt: str = ""
    received_at: float = field(default_factory=time.monotonic)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


class Intake:
    """Makes jobs. Methods raise BadRequest, ModelNotFound or Unavailable."""

    def __init__(self, tokenizer: Tokenizer, table: NodeTable, model: str) -> None:
        self._tokenizer = tokenizer
        self._table = table
        self._model = model

    async def completion(self, body: CompletionRequest, response_id: str, request_id: str) -> Job:
        received_at = time.monotonic()
        self._check(body)
        limit = await self._limit()
        special = body.add_special_tokens is not False
        prompts = [await self._ids(prompt, limit, add_special_tokens=special) for prompt in body.prompts]
        jobs = tuple(_prompt_job(body, ids, limit, DEFAULT_MAX_TOKENS, "prompt") for ids in prompts)
        return _job(body, jobs, response_id, request_id, received_at)

    async def chat(self, body: ChatRequest, response_id: str, request_id: str) -> Job:
        received_at = time.monotonic()
        self._check(body)
        limit = await self._limit()

        def encode() -> list[int]:
            text = self._tokenizer.render(
                body.messages,
                tools=body.tools or None,
                add_generation_prompt=body.add_generation_prompt,
                variables=body.template_variables,
            )
            self._check_chars(text, limit, "messages")
            return self._tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

        ids = await _off_loop(encode, _num_chars(body.messages))
        job = _prompt_job(body, ids, limit, limit, "messages")
        return _job(body, (job,), response_id, request_id, received_at)

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        self.check_model(body.model)
        if body.prompt is not None:
            return await self._encode(body.prompt, body.add_special_tokens is not False)
        messages = body.messages or []

        def encode() -> list[int]:
            text = self._tokenizer.render(
                messages, add_generation_prompt=body.add_generation_prompt, variables=body.chat_template_kwargs
            )
            return self._tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

        return await _off_loop(encode, _num_chars(messages))

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self._model:
            hint = nearest(name, [self._model])
            raise ModelNotFound(
                f"model {name!r} does not exist{hint}: this cluster serves {self._model!r}", param="model"
            )

    def check_ids(self, ids: Sequence[int], param: str) -> None:
        size = self._tokenizer.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            wrong = min(ids) if min(ids) < 0 else max(ids)
            raise BadRequest(f"{param}: token id {wrong} is outside the vocabulary [0, {size})", param=param)

    # ---- inside

    def _check(self, body: Generation) -> None:
        self.check_model(body.model)
        self.check_ids([token_id for token_id, _ in body.biases], "logit_bias")
        self.check_ids(body.stop_token_ids, "stop_token_ids")

    async def _limit(self) -> int:
        if self._table.max_model_len is None:
            await self._table.refresh()
        limit = self._table.max_model_len
        if limit is None:
            raise Unavailable("no node is registered yet")
        return limit

    async def _ids(self, prompt: Prompt, limit: int, *, add_special_tokens: bool) -> list[int]:
        if isinstance(prompt, list):
            self.check_ids(prompt, "prompt")
            return prompt
        self._check_chars(prompt, limit, "prompt")
        return await self._encode(prompt, add_special_tokens)

    async def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await _off_loop(lambda: self._tokenizer.encode(text, add_special_tokens=add_special_tokens), len(text))

    def _check_chars(self, text: str, limit: int, param: str) -> None:
        """A text that is too long whatever its tokens are is not worth tokenising."""
        if len(text) > limit * self._tokenizer.max_token_chars:
            raise ContextTooLong(
                f"this model's maximum context length is {limit} tokens; {len(text)} characters of {param} have more",
                param=param,
            )


def _job(
    body: Generation, prompts: tuple[PromptJob, ...], response_id: str, request_id: str, received_at: float
) -> Job:
    text = TextParams(
        stops=tuple(body.stop),
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        skip_special_tokens=body.skip_special_tokens,
        stop_token_ids=tuple(body.stop_token_ids),
        logprobs=body.num_logprobs,
    )
    return Job(response_id, request_id, prompts, body.n, text, body.cache_salt, received_at)


def _prompt_job(body: Generation, ids: Sequence[int], limit: int, default: int, param: str) -> PromptJob:
    """Checks lengths. What the client asked for must fit; our own default is cut to what is left."""
    if not ids:
        raise BadRequest(f"{param}: the prompt has no tokens", param=param)
    room, asked = limit - len(ids), body.token_limit
    if room < 1 or (asked or 0) > room:
        completion = f" and {asked} of completion" if asked is not None else ""
        raise ContextTooLong(
            f"this model's maximum context length is {limit} tokens; the request has {len(ids)} tokens of prompt"
            f"{completion}: shorten the {param} or the completion",
            param=param if room < 1 else "max_tokens",
        )
    max_tokens = min(default, room) if asked is None else asked
    if body.min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens must not exceed max_tokens, {max_tokens}; got {body.min_tokens}", param="min_tokens"
        )
    seed = secrets.randbits(63) if body.seed is None else body.seed
    return PromptJob(tuple(ids), body.sampling(max_tokens=max_tokens, seed=seed))


def _num_chars(messages: Sequence[dict[str, Any]]) -> int:
    return sum(len(message["content"]) for message in messages)


async def _off_loop(encode: Callable[[], list[int]], num_chars: int) -> list[int]:
    return await asyncio.to_thread(encode) if num_chars > LONG_TEXT_CHARS else encode()
