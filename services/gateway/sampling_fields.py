"""The fields of a request that say how tokens are drawn, with vLLM's names and ranges, and what they come to.

What depends on the vocabulary or on text (`bad_words`) is finished by `intake.py`, which has the tokenizer.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator

from kvferry.common.errors import BadRequest
from kvferry.common.requests import SamplingParams
from kvferry.services.gateway.beam_fields import BeamFields
from kvferry.services.gateway.generation_config import GenerationConfig

MAX_LOGPROBS = 20
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARS = 256


def _token_biases(biases: dict[str, float]) -> dict[str, float]:
    """Keys must be token ids. Values are cut to OpenAI's range, as vLLM does."""
    if not all(key.removeprefix("-").isdecimal() for key in biases):
        raise BadRequest("logit_bias: keys must be token ids", param="logit_bias")
    return {key: min(100.0, max(-100.0, value)) for key, value in biases.items()}


class SamplingFields(BeamFields):
    min_tokens: int = Field(0, ge=0, lt=2**31)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], AfterValidator(_token_biases)] = Field({})
    allowed_token_ids: list[int] = Field([], min_length=1, max_length=2**20)
    bad_words: list[str] = Field([], max_length=MAX_BAD_WORDS)
    stop_token_ids: list[int] = Field([], max_length=1024)
    ignore_eos: bool = False
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    prompt_logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _bad_words_are_words(self) -> Self:
        if any(not word.strip() or len(word) > MAX_BAD_WORD_CHARS for word in self.bad_words):
            raise BadRequest(
                f"bad_words: each must have 1 to {MAX_BAD_WORD_CHARS} characters and not be blank", param="bad_words"
            )
        return self

    @property
    @abstractmethod
    def num_logprobs(self) -> int | None:
        """None: the client wants none. k: the chosen token's and the k best."""

    @property
    def num_prompt_logprobs(self) -> int | None:
        """Like `num_logprobs`, of the prompt's tokens."""
        return self.prompt_logprobs

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        return tuple((int(token_id), bias) for token_id, bias in self.logit_bias.items())

    def sampling(
        self,
        *,
        max_tokens: int,
        seed: int,
        bad_words: tuple[tuple[int, ...], ...] = (),
        defaults: GenerationConfig | None = None,
    ) -> SamplingParams:
        """`bad_words`: their token ids. `defaults` stand in for fields that the client did not give."""

        def given(name: str) -> Any:
            default = None if name in self.model_fields_set else getattr(defaults, name, None)
            return getattr(self, name) if default is None else default

        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            temperature=given("temperature"),
            top_p=given("top_p"),
            top_k=max(given("top_k"), 0),
            min_p=given("min_p"),
            repetition_penalty=given("repetition_penalty"),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.biases,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            seed=seed & (2**64 - 1),
            logprobs=self.num_logprobs,
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids)),
            bad_words=bad_words,
            prompt_logprobs=self.num_prompt_logprobs,
            beam=self.beam,
        )
