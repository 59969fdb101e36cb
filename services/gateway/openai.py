"""What clients may ask: the request shapes of OpenAI's text endpoints with vLLM's extensions.

A field has one of four fates. Known and served: typed strictly and checked against vLLM's range. Known and not
served: refused by name, unless it has the value that means "off". Unknown: ignored. Null: as if it were absent.
Nothing here knows of tokenizers or nodes; what depends on the model is checked in `intake.py`. All that can be checked
without it is checked by `parse`, which may run in any thread.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from kvferry.common.errors import BadRequest
from kvferry.common.requests import SamplingParams
from kvferry.services.gateway.errors import from_validation
from kvferry.services.gateway.messages import Prompt, check_tools, parse_messages, parse_prompts

MAX_N = 128
MAX_CHOICES = 1024
MAX_STOPS = 64
MAX_STOP_CHARS = 4096
MAX_LOGPROBS = 20
MAX_MESSAGES = 16_384
MAX_NAME_CHARS = 512
DEFAULT_MAX_TOKENS = 16

# Field -> the values that mean "off". Anything else is refused by name.
_UNSUPPORTED: dict[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "prompt_logprobs": (),
    "prompt_embeds": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "truncate_prompt_tokens": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structural_tag": (),
    "logits_processors": ([],),
    "priority": (0,),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
}
_UNSUPPORTED_COMPLETION = _UNSUPPORTED | {"suffix": ("",), "echo": (False,)}
_UNSUPPORTED_CHAT = _UNSUPPORTED | {
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "echo": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
    "thinking_token_budget": (),
}


class Shape(BaseModel):
    """Base of all bodies. `parse` is the way in."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    @classmethod
    def parse(cls, body: bytes) -> Self:
        """Raises BadRequest that names the first field at fault."""
        try:
            data = orjson.loads(body)
        except orjson.JSONDecodeError as exc:
            raise BadRequest(f"the body is not JSON: {exc}") from exc
        if not isinstance(data, dict):
            raise BadRequest("the body must be a JSON object")
        for name, harmless in cls.unsupported.items():
            if (value := data.get(name)) is not None and value not in harmless:
                raise BadRequest(f"{name} is not supported", param=name)
        try:
            return cls.model_validate(data)
        except ValidationError as exc:
            raise from_validation(exc) from exc

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        return {k: v for k, v in data.items() if v is not None} if isinstance(data, dict) else data


class StreamOptions(Shape):
    include_usage: bool = False
    continuous_usage_stats: bool = False


def _token_biases(biases: dict[str, float]) -> dict[str, float]:
    """Keys must be token ids. Values are cut to OpenAI's range, as vLLM does."""
    if not all(key.removeprefix("-").isdecimal() for key in biases):
        raise BadRequest("logit_bias: keys must be token ids", param="logit_bias")
    return {key: min(100.0, max(-100.0, value)) for key, value in biases.items()}


TokenCount = Annotated[int, Field(ge=1, lt=2**31)]


class Generation(Shape):
    """What completions and chats have in common."""

    model: str | None = Field(None, max_length=MAX_NAME_CHARS)
    n: int = Field(1, ge=1, le=MAX_N)
    best_of: int | None = None
    max_tokens: TokenCount | None = None
    min_tokens: int = Field(0, ge=0, lt=2**31)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], AfterValidator(_token_biases)] = {}
    stop: list[str] = Field([], max_length=MAX_STOPS)
    stop_token_ids: list[int] = Field([], max_length=1024)
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str = Field("", max_length=256)
    add_special_tokens: bool | None = None

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
        return self

    @property
    def num_logprobs(self) -> int | None:
        """None: the client wants none. k: the chosen token's and the k best."""
        raise NotImplementedError

    @property
    def token_limit(self) -> int | None:
        """What the client set for the completion, if anything."""
        raise NotImplementedError

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items())

    def sampling(self, *, max_tokens: int, seed: int) -> SamplingParams:
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.biases,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=seed & (2**64 - 1),
            logprobs=self.num_logprobs,
        )


Messages = Annotated[list[Any], Field(min_length=1, max_length=MAX_MESSAGES), AfterValidator(parse_messages)]
"""Parsed: roles and contents are checked, text parts joined."""


class CompletionRequest(Generation):
    unsupported = _UNSUPPORTED_COMPLETION

    prompt: Annotated[Any, AfterValidator(parse_prompts)]
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: TokenCount | None = None

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def token_limit(self) -> int | None:
        """OpenAI's name on the chat endpoint is honoured here too; the tighter one rules."""
        return min((n for n in (self.max_tokens, self.max_completion_tokens) if n is not None), default=None)

    @model_validator(mode="after")
    def _not_too_many(self) -> Self:
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise BadRequest(f"prompt: at most {MAX_CHOICES} choices (prompts times n) in one request", param="prompt")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        prompts: list[Prompt] = self.prompt
        return prompts


class ChatRequest(Generation):
    unsupported = _UNSUPPORTED_CHAT

    messages: Messages
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    max_completion_tokens: TokenCount | None = None
    tools: list[Any] = []
    tool_choice: Any = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | None = None

    @model_validator(mode="after")
    def _chat_fields_agree(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise BadRequest("top_logprobs requires logprobs to be true", param="top_logprobs")
        check_tools(self.tools, self.tool_choice)
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


class TokenizeRequest(Shape):
    """vLLM's `/tokenize`: either `prompt` or `messages`."""

    model: str | None = Field(None, max_length=MAX_NAME_CHARS)
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise BadRequest("give either prompt or messages", param="prompt")
        return self


class DetokenizeRequest(Shape):
    model: str | None = Field(None, max_length=MAX_NAME_CHARS)
    tokens: list[Annotated[int, Field(ge=0)]]
