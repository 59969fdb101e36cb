"""What clients may ask: the request shapes of OpenAI's text endpoints with vLLM's extensions.

A field has one of four fates. Known and served: typed strictly and checked against vLLM's range. Known and not
served: refused by name, unless it has the value that means "off". Unknown: ignored. Null: as if it were absent.
Nothing here knows of tokenizers or nodes; what depends on the model is checked in `intake.py`. All that can be checked
without it is checked by `parse`, which may run in any thread.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from kvferry.common.errors import BadRequest
from kvferry.services.gateway.messages import Prompt, parse_messages, parse_prompts
from kvferry.services.gateway.sampling_fields import MAX_LOGPROBS, SamplingFields
from kvferry.services.gateway.shape import Shape
from kvferry.services.gateway.structured import ResponseFormat, StructuredOutputs, check_one_constraint
from kvferry.services.gateway.tools import ToolFields, check_tools

MAX_N = 128
MAX_CHOICES = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_MESSAGES = 16_384
MAX_NAME_CHARS = 512
DEFAULT_MAX_TOKENS = 16

# Field -> the values that mean "off". Anything else is refused by name.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "prompt_embeds": ([],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
_UNSUPPORTED_COMPLETION = _UNSUPPORTED | {"suffix": ("",)}
_UNSUPPORTED_CHAT = _UNSUPPORTED | {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "echo": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "thinking_token_budget": (),
}


class StreamOptions(Shape):
    include_usage: bool = False
    continuous_usage_stats: bool = False


TokenCount = Annotated[int, Field(ge=1, lt=2**31)]


class Generation(SamplingFields):
    """What completions and chats have in common."""

    model: str | None = Field(None, max_length=MAX_NAME_CHARS)
    n: int = Field(1, ge=1, le=MAX_N)
    best_of: int | None = None
    max_tokens: TokenCount | None = None
    stop: list[str] = Field([], max_length=MAX_STOPS)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, lt=2**31)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str = Field("", max_length=256)
    request_id: str | None = Field(None, pattern=r"^[!-~]{1,128}\z")
    return_token_ids: bool = False
    add_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop_or_several(cls, stop: object) -> object:
        return [stop] if isinstance(stop, str) else stop

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        if any(not stop or len(stop) > MAX_STOP_CHARS for stop in self.stop):
            raise BadRequest(f"stop: each string must have 1 to {MAX_STOP_CHARS} characters", param="stop")
        if self.best_of is not None and self.best_of != self.n:
            raise BadRequest("best_of other than n is not supported", param="best_of")
        if self.stream_options is not None and not self.stream:
            raise BadRequest("stream_options is only allowed when stream is true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise BadRequest("prompt_logprobs is not available when stream is true", param="prompt_logprobs")
        if self.truncate_prompt_tokens == 0:
            raise BadRequest("truncate_prompt_tokens: must be -1 or at least 1, got 0", param="truncate_prompt_tokens")
        check_one_constraint(self.response_format, self.structured_outputs)
        return self

    @property
    @abstractmethod
    def token_limit(self) -> int | None:
        """What the client set for the completion, if anything."""


Messages = Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(parse_messages)]
"""Parsed: roles and contents are checked, text parts joined."""


class CompletionRequest(Generation):
    unsupported = _UNSUPPORTED_COMPLETION

    prompt: Annotated[Any, AfterValidator(parse_prompts)]
    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None  # 0: only the prompt, echoed
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: TokenCount | None = None
    echo: bool = False

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """An echoed prompt has log-probabilities where the completion has."""
        return self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs

    @property
    def token_limit(self) -> int | None:
        """OpenAI's name on the chat endpoint is honoured here too; the tighter one rules."""
        return min((n for n in (self.max_tokens, self.max_completion_tokens) if n is not None), default=None)

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise BadRequest(f"prompt: at most {MAX_CHOICES} choices (prompts times n) in one request", param="prompt")
        if self.max_tokens == 0 and not self.echo:
            raise BadRequest("max_tokens: must be at least 1 unless echo is true, got 0", param="max_tokens")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        prompts: list[Prompt] = self.prompt
        return prompts


class ChatRequest(Generation, ToolFields):
    unsupported = _UNSUPPORTED_CHAT

    messages: Messages
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: TokenCount | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field({})
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs requires logprobs to be true", param="top_logprobs")
        check_tools(self)
        _check_continued(self)
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        """The newer name rules where both are given."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def template_variables(self) -> dict[str, Any]:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return effort | self.chat_template_kwargs


def _check_continued(body: ChatRequest | TokenizeRequest) -> None:
    """The last message can be gone on with, or a new one be begun."""
    if not body.continue_final_message:
        return
    if body.add_generation_prompt:
        raise BadRequest(
            "continue_final_message needs add_generation_prompt false: the model cannot do both",
            param="continue_final_message",
        )
    if not (body.messages and body.messages[-1]["content"].strip()):
        raise BadRequest("continue_final_message: the last message has no text", param="continue_final_message")


class TokenizeRequest(ToolFields):
    """vLLM's `/tokenize`: either `prompt` or `messages`."""

    model: str | None = Field(None, max_length=MAX_NAME_CHARS)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field({})
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")
        _check_continued(self)
        return self

    @property
    def template_variables(self) -> dict[str, Any]:
        return self.chat_template_kwargs


class DetokenizeRequest(Shape):
    model: str | None = Field(None, max_length=MAX_NAME_CHARS)
    tokens: list[Annotated[int, Field(ge=0)]]
