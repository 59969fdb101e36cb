"""Beam search in a request: vLLM's `use_beam_search`, `length_penalty`, and `early_stopping` of transformers."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from kvferry.common.errors import BadRequest
from kvferry.common.requests import BeamParams
from kvferry.services.gateway.shape import Shape

MAX_WIDTH = 32

_OTHER_SAMPLING = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "prompt_logprobs",
    "echo",
    "response_format",
    "structured_outputs",
)
"""Fields that mean nothing to a beam search, or that it does not support yet."""


class BeamFields(Shape):
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    @model_validator(mode="after")
    def _beam_search_stands_alone(self) -> Self:
        if not self.use_beam_search:
            for name in ("length_penalty", "early_stopping"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise BadRequest(f"{name} requires use_beam_search to be true", param=name)
            return self
        if (width := getattr(self, "n", 1)) > MAX_WIDTH:
            raise BadRequest(f"n: a beam search is at most {MAX_WIDTH} wide, not {width}", param="n")
        for name in _OTHER_SAMPLING:
            if name in self.model_fields_set and not self._is_harmless(name):
                raise BadRequest(f"{name} is not supported with use_beam_search", param=name)
        return self

    def _is_harmless(self, name: str) -> bool:
        value = getattr(self, name)
        return value in (0, type(self).model_fields[name].default)

    @property
    def beam(self) -> BeamParams | None:
        """None: no beam search."""
        if not self.use_beam_search:
            return None
        return BeamParams(self.length_penalty, str(self.early_stopping).lower())
