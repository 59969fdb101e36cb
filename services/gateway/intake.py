"""From a well-formed request to a job for the nodes: model name, chat template, tokens, limits, seed.

Everything a request can be refused for without asking a node is found here, before anything is spent on it. Long
texts are rendered and tokenised off the event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

from kvferry.common.config import nearest
from kvferry.common.errors import BadRequest, ContextTooLong, ModelNotFound, Unavailable
from kvferry.common.requests import SamplingParams, StructuredOutput
from kvferry.services.gateway.choice import TextParams
from kvferry.services.gateway.generation_config import GenerationConfig
from kvferry.services.gateway.messages import Prompt
from kvferry.services.gateway.nodes import NodeTable
from kvferry.services.gateway.openai import (
    DEFAULT_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    Generation,
    TokenizeRequest,
)
from kvferry.services.gateway.prompt_limits import Terms, max_tokens_of, truncated
from kvferry.services.gateway.prompt_text import PromptText, align
from kvferry.services.gateway.structured import compile_structured
from kvferry.services.gateway.tokenizer import Tokenizer
from kvferry.services.gateway.tool_parsers import PARSERS, ToolCallParser, ToolFormat
from kvferry.services.gateway.tools import calls_are_held, compile_tools

LONG_TEXT_CHARS = 4000  # longer ones are worth a thread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PromptJob:
    """One prompt as the nodes will see it. `shown`: what the client gets back of it."""

    token_ids: tuple[int, ...]
    sampling: SamplingParams
    shown: PromptText | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request, ready for the nodes. Choice `s` of prompt `p` has index `p * n + s`."""

    response_id: str
    request_id: str
    prompts: tuple[PromptJob, ...]
    n: int
    text: TextParams
    cache_salt: str = ""
    priority: int = 0
    received_at: float = field(default_factory=time.monotonic)

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


class Intake:
    """Makes jobs. Methods raise BadRequest, ModelNotFound or Unavailable."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        table: NodeTable,
        model: str,
        defaults: GenerationConfig | None = None,
        tool_form: ToolFormat | None = None,
    ) -> None:
        """`tool_form`: how the model writes calls of its own accord; None: it is not known to."""
        self._tokenizer = tokenizer
        self._table = table
        self._model = model
        self._defaults = defaults or GenerationConfig()
        self._tool_form = tool_form

    async def completion(self, body: CompletionRequest, response_id: str, request_id: str) -> Job:
        received_at = time.monotonic()
        self._check(body)
        limit = await self._limit()
        terms = Terms(
            limit, DEFAULT_MAX_TOKENS, await self._bad_words(body.bad_words), "prompt", await _structured(body)
        )
        prompts = [await self._ids(prompt, limit, body) for prompt in body.prompts]
        jobs = tuple(
            self._prompt_job(body, ids, terms, prompt, body.echo)
            for prompt, ids in zip(body.prompts, prompts, strict=True)
        )
        return _job(body, jobs, response_id, request_id, received_at, only_prompt=body.max_tokens == 0)

    async def chat(self, body: ChatRequest, response_id: str, request_id: str) -> Job:
        received_at = time.monotonic()
        self._check(body)
        limit = await self._limit()

        def encode() -> list[int]:
            text = self._render(body, body.messages)
            if body.truncate_prompt_tokens is None:
                self._check_chars(text, limit, "messages")
            return self._tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

        ids = await _off_loop(encode, _num_chars(body.messages, body))
        bad_words, structured = await self._bad_words(body.bad_words), await self._chat_structured(body)
        terms = Terms(limit, limit, bad_words, "messages", structured)
        job = self._prompt_job(body, ids, terms)
        return _job(body, (job,), response_id, request_id, received_at)

    def told(self, job: Job, max_chars: int | None) -> list[str]:
        """One line for each prompt of a job, for an operator who has asked for it."""
        texts = (self._tokenizer.decode(prompt.token_ids)[:max_chars] for prompt in job.prompts)
        return [f"prompt={text!r} {prompt.sampling}" for text, prompt in zip(texts, job.prompts, strict=True)]

    def tool_parser(self, body: ChatRequest) -> Callable[[], ToolCallParser] | None:
        """Makes what reads the calls in a choice's text; None: all of it is content."""
        if not body.may_call:
            return None
        return partial(PARSERS[self._form], body.may_call, is_held=self._is_held(body))

    async def tokenize(self, body: TokenizeRequest) -> list[int]:
        self.check_model(body.model)
        if body.prompt is not None:
            return await self._encode(body.prompt, body.add_special_tokens is not False)
        messages = body.messages or []

        def encode() -> list[int]:
            text = self._render(body, messages)
            return self._tokenizer.encode(text, add_special_tokens=bool(body.add_special_tokens))

        return await _off_loop(encode, _num_chars(messages, body))

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

    def _render(self, body: ChatRequest | TokenizeRequest, messages: Sequence[Mapping[str, Any]]) -> str:
        text = self._tokenizer.render(
            messages,
            tools=[tool.raw for tool in body.offered] or None,
            add_generation_prompt=body.add_generation_prompt,
            variables=body.template_variables,
        )
        if not body.continue_final_message:
            return text
        last = messages[-1]["content"].strip()
        at = text.rfind(last)
        if at < 0:
            raise BadRequest(
                "continue_final_message: the chat template does not show the last message as it is",
                param="continue_final_message",
            )
        return text[: at + len(last)]

    @property
    def _form(self) -> ToolFormat:
        """In which calls are written; one that the model must make is held to it even where it knows none."""
        return self._tool_form or "llama3_json"

    def _is_held(self, body: ChatRequest) -> bool:
        """A beam search follows no grammar."""
        return calls_are_held(body, self._form) and (body.choice.is_demand or not body.use_beam_search)

    async def _chat_structured(self, body: ChatRequest) -> StructuredOutput | None:
        """What the output is held to. A call that must be made goes before a form of the content."""
        if not body.may_call:
            return await _structured(body)
        if body.structured_outputs is not None:
            raise BadRequest(
                "structured_outputs is not supported beside tools that may be called: use response_format",
                param="structured_outputs",
            )
        if body.choice.is_demand:
            return await asyncio.to_thread(compile_tools, body, self._form)
        if self._tool_form is None:
            raise BadRequest(
                'tools with tool_choice "auto" is not supported for this model, whose calls have no form that is known '
                'to this server (its --tool-call-parser): use "required", one function by name, or "none"',
                param="tools",
            )
        if await _structured(body) is None or body.response_format is None:
            return await asyncio.to_thread(compile_tools, body, self._form) if self._is_held(body) else None
        return await asyncio.to_thread(compile_tools, body, self._form, body.response_format.schema_of_content)

    def _check(self, body: Generation) -> None:
        self.check_model(body.model)
        self.check_ids([token_id for token_id, _ in body.biases], "logit_bias")
        self.check_ids(body.stop_token_ids, "stop_token_ids")
        self.check_ids(body.allowed_token_ids, "allowed_token_ids")

    async def _limit(self) -> int:
        if self._table.max_model_len is None:
            await self._table.refresh()
        limit = self._table.max_model_len
        if limit is None:
            raise Unavailable("no node is registered yet")
        return limit

    async def _ids(self, prompt: Prompt, limit: int, body: CompletionRequest) -> list[int]:
        if isinstance(prompt, list):
            self.check_ids(prompt, "prompt")
            return prompt
        if body.truncate_prompt_tokens is None:
            self._check_chars(prompt, limit, "prompt")
        return await self._encode(prompt, body.add_special_tokens is not False)

    async def _bad_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens as they stand at the beginning of a text and behind a space."""
        spelled = [prefix + word.lstrip() for word in words for prefix in ("", " ")]

        def encode() -> list[tuple[int, ...]]:
            return [tuple(self._tokenizer.encode(text, add_special_tokens=False)) for text in spelled]

        return tuple(dict.fromkeys(await _off_loop(encode, sum(map(len, spelled)))))

    def _prompt_job(
        self, body: Generation, ids: Sequence[int], terms: Terms, prompt: Prompt = "", echo: bool = False
    ) -> PromptJob:
        kept = truncated(body, ids, terms.limit)
        max_tokens = max_tokens_of(body, len(kept), terms, self._defaults.max_new_tokens)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        sampling = body.sampling(max_tokens=max_tokens, seed=seed, bad_words=terms.bad_words, defaults=self._defaults)
        sampling = replace(sampling, structured=terms.structured)
        shown = None
        if echo or body.prompt_logprobs is not None:
            text = prompt if echo and isinstance(prompt, str) and len(kept) == len(ids) else None
            text, offsets = align(self._tokenizer, kept, text, skip_special_tokens=body.skip_special_tokens)
            logprobs, asked = body.num_logprobs is not None, body.prompt_logprobs is not None
            shown = PromptText(tuple(kept), text, offsets, echo, echo and logprobs, asked)
        return PromptJob(tuple(kept), sampling, shown)

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
    body: Generation,
    prompts: tuple[PromptJob, ...],
    response_id: str,
    request_id: str,
    received_at: float,
    only_prompt: bool = False,
) -> Job:
    text = TextParams(
        stops=tuple(body.stop),
        include_stop=body.include_stop_str_in_output,
        min_tokens=body.min_tokens,
        skip_special_tokens=body.skip_special_tokens,
        stop_token_ids=tuple(body.stop_token_ids),
        logprobs=body.num_logprobs,
        only_prompt=only_prompt,
        return_token_ids=body.return_token_ids,
    )
    return Job(response_id, request_id, prompts, body.n, text, body.cache_salt, body.priority, received_at)


def _num_chars(messages: Sequence[dict[str, Any]], body: ChatRequest | TokenizeRequest) -> int:
    """About how many a template may print of them. Of what is nested nobody knows without a walk: taken for long."""
    if body.tools or body.chat_template_kwargs or any(message.get("tool_calls") for message in messages):
        return LONG_TEXT_CHARS + 1
    return sum(len(message["content"]) for message in messages)


async def _off_loop(encode: Callable[[], T], num_chars: int) -> T:
    return await asyncio.to_thread(encode) if num_chars > LONG_TEXT_CHARS else encode()


async def _structured(body: Generation) -> StructuredOutput | None:
    if body.response_format is None and body.structured_outputs is None:
        return None
    return await asyncio.to_thread(compile_structured, body.response_format, body.structured_outputs)
