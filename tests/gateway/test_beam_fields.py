"""Beam search in a request body: what is accepted, what is refused by name."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from kvferry.common.errors import BadRequest
from kvferry.common.requests import BeamParams
from kvferry.services.gateway.openai import CompletionRequest


def parse(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse(orjson.dumps({"model": "m", "prompt": "x"} | fields))


@pytest.mark.parametrize(
    ("fields", "beam"),
    [
        ({}, None),
        ({"use_beam_search": False, "length_penalty": 1.0}, None),
        ({"use_beam_search": True, "n": 4}, BeamParams(1.0, "false")),
        ({"use_beam_search": True, "n": 4, "temperature": 0, "early_stopping": True}, BeamParams(1.0, "true")),
        ({"use_beam_search": True, "length_penalty": 0.5, "early_stopping": "never"}, BeamParams(0.5, "never")),
    ],
)
def test_beam_params(fields: dict[str, Any], beam: BeamParams | None) -> None:
    assert parse(**fields).sampling(max_tokens=4, seed=0).beam == beam


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"use_beam_search": True, "temperature": 0.7}, "temperature"),
        ({"use_beam_search": True, "frequency_penalty": 1.0}, "frequency_penalty"),
        ({"use_beam_search": True, "logit_bias": {"5": 1}}, "logit_bias"),
        ({"use_beam_search": True, "response_format": {"type": "json_object"}}, "response_format"),
        ({"use_beam_search": True, "structured_outputs": {"choice": ["a", "b"]}}, "structured_outputs"),
        ({"use_beam_search": True, "n": 33}, "n"),
        ({"use_beam_search": True, "early_stopping": "sometimes"}, "early_stopping"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"early_stopping": True}, "early_stopping"),
    ],
)
def test_what_does_not_go_together_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0] == param
    assert param in caught.value.message
