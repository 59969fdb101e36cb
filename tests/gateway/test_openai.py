"""Every field is served, refused by name, or unknown: nothing known is accepted and ignored."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.common.errors import BadRequest
from kvferry.common.requests import SamplingParams
from kvferry.services.gateway.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {}}}


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.parse(json.dumps({"prompt": "hi"} | fields).encode())


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.parse(json.dumps({"messages": [USER]} | fields).encode())


def refused(make: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        make(**fields)
    return caught.value


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("repetition_penalty", 0),
        ("repetition_penalty", -1),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", 2.0),
        ("max_tokens", "ten"),
        ("max_completion_tokens", 0),
        ("min_tokens", -1),
        ("n", 0),
        ("n", -1),
        ("n", 129),
        ("n", "two"),
        ("n", True),
        ("seed", 2**63),
        ("seed", 1.5),
        ("seed", "x"),
        ("logit_bias", [1]),
        ("logit_bias", {"5": "x"}),
        ("logit_bias", {"abc": 1}),
        ("stop", {"a": 1}),
        ("stop", 5),
        ("stop", [""]),
        ("stop", [1]),
        ("stop", ["x" * 5000]),
        ("stop", ["x"] * 65),
        ("stop_token_ids", ["x"]),
        ("stop_token_ids", 5),
        ("ignore_eos", "yes"),
        ("stream", 1),
        ("cache_salt", 5),
        ("allowed_token_ids", []),
        ("allowed_token_ids", ["x"]),
        ("bad_words", [""]),
        ("bad_words", [" "]),
        ("bad_words", "x"),
        ("prompt_logprobs", -1),
        ("prompt_logprobs", 21),
        ("truncate_prompt_tokens", 0),
        ("truncate_prompt_tokens", -2),
        ("priority", 1.5),
        ("priority", 2**31),
        ("stream_options", {"include_usage": True}),
    ],
)
@pytest.mark.parametrize("make", [completion, chat])
def test_a_value_out_of_range_or_type_is_refused_and_named(make: Any, field: str, value: Any) -> None:
    error = refused(make, **{field: value})
    assert error.param is not None
    assert error.param.split("[")[0] == field
    assert field in error.message


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_json_does_not_have_are_refused(literal: str) -> None:
    with pytest.raises(BadRequest):
        CompletionRequest.parse(b'{"prompt": "hi", "temperature": %b}' % literal.encode())


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'"x"', b"5", b"null", b"\xff", b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest, match="body"):
        CompletionRequest.parse(body)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("best_of", 3),
        ("guided_json", {}),
        ("logits_processors", ["x"]),
        ("spaces_between_special_tokens", False),
    ],
)
@pytest.mark.parametrize("make", [completion, chat])
def test_what_is_not_served_is_refused_by_name(make: Any, field: str, value: Any) -> None:
    error = refused(make, **{field: value})
    assert error.param == field
    assert "not supported" in error.message


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (completion, "suffix", "end"),
        (chat, "chat_template", "{{ messages }}"),
        (chat, "functions", [{"name": "f"}]),
        (chat, "modalities", ["text", "audio"]),
        (chat, "audio", {"voice": "x"}),
    ],
)
def test_what_one_endpoint_does_not_serve_is_refused_by_name(make: Any, field: str, value: Any) -> None:
    error = refused(make, **{field: value})
    assert error.param == field
    assert "not supported" in error.message


def test_values_that_mean_off_unknown_fields_and_nulls_are_harmless() -> None:
    completion(
        best_of=1, echo=False, suffix="", response_format={"type": "text"}, use_beam_search=False, priority=0, what=1
    )
    chat(tools=[], tool_choice=None, functions=[], reasoning={"x": 1}, temperature=None, stream_options=None, n=None)
    assert completion(max_tokens=None, logprobs=None).sampling(max_tokens=5, seed=1) == SamplingParams(
        max_tokens=5, seed=1
    )


def test_fields_arrive_in_the_sampling_parameters() -> None:
    fields: dict[str, Any] = {
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "repetition_penalty": 3.0,
        "presence_penalty": 2,
        "frequency_penalty": -2,
        "ignore_eos": True,
    }
    params = completion(**fields, logit_bias={"5": 1000}, stop_token_ids=[9], logprobs=3).sampling(
        max_tokens=8, seed=-1
    )
    assert params == SamplingParams(
        **fields, max_tokens=8, seed=2**64 - 1, logit_bias=((5, 100.0),), stop_token_ids=(9,), logprobs=3
    )
    assert completion(top_k=-1).sampling(max_tokens=1, seed=0).top_k == 0


def test_logprobs_of_a_chat() -> None:
    assert chat().num_logprobs is None
    assert chat(logprobs=True).num_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).num_logprobs == 20
    for fields in ({"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        assert refused(chat, **fields).param == "top_logprobs"
    assert refused(completion, logprobs=21).param == "logprobs"


def test_which_token_limit_rules() -> None:
    assert chat().token_limit is None
    assert chat(max_tokens=40, max_completion_tokens=3).token_limit == 3
    assert chat(max_tokens=2, max_completion_tokens=3).token_limit == 3
    assert completion(max_tokens=40, max_completion_tokens=3).token_limit == 3


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("x", ["x"]), ([1, 2], [[1, 2]]), (["x", "y"], ["x", "y"]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_prompt_forms(prompt: Any, parsed: Any) -> None:
    assert completion(prompt=prompt).prompts == parsed


@pytest.mark.parametrize(
    "prompt", [[], [[]], ["a", 1], [1.5], [[20], "x"], {"a": 1}, 7, [True], [None], [[1], []], [["x"]], [[1.0]]]
)
def test_prompts_of_other_forms_are_refused(prompt: Any) -> None:
    assert refused(completion, prompt=prompt).param == "prompt"


def test_a_missing_prompt_or_messages_is_named() -> None:
    with pytest.raises(BadRequest, match="prompt is required"):
        CompletionRequest.parse(b"{}")
    with pytest.raises(BadRequest, match="messages is required"):
        ChatRequest.parse(b"{}")
    assert refused(chat, messages=[]).param == "messages"
    assert refused(chat, messages="hi").param == "messages"


def test_too_many_choices_in_one_request() -> None:
    assert refused(completion, prompt=["x"] * 1000, n=2).param == "prompt"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[0]"),
        ({"role": "wizard", "content": "hi"}, "messages[0].role"),
        ({"content": "hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "assistant"}, "messages[0].content"),
        ({"role": "assistant", "tool_calls": "x"}, "messages[0].tool_calls"),
        ({"role": "user", "content": "x", "tool_calls": []}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": ["x"]}, "messages[0].tool_calls[0]"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": 5}}]}, "messages[0].tool_calls[0]"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
    ],
)
def test_a_bad_message_is_named(message: Any, param: str) -> None:
    assert refused(chat, messages=[message]).param == param


def test_text_parts_are_the_joined_string() -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages == [{"role": "user", "content": "Say hello"}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": 5, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": {"function": {}}, "tools": [TOOL]}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0]"),
        ({"tools": [TOOL, {"type": "retrieval"}]}, "tools[1]"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools[0].function.parameters"),
        ({"tools": [TOOL], "parallel_tool_calls": "no"}, "parallel_tool_calls"),
    ],
)
def test_tools_that_are_malformed_or_contradict_the_choice_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refused(chat, **fields).param == param


def test_which_tools_may_be_called() -> None:
    other = {"type": "function", "function": {"name": "other"}}
    both: dict[str, Any] = {"tools": [TOOL, other]}
    assert chat(**both).may_call == chat(**both, tool_choice="required").may_call == {"lookup", "other"}
    named = {"type": "function", "function": {"name": "other"}}
    assert chat(**both, tool_choice=named).may_call == {"other"}
    assert chat(**both, tool_choice="none").may_call == frozenset()
    assert chat().may_call == frozenset()


def test_tokenize_wants_one_form() -> None:
    for body in (b"{}", b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}]}'):
        with pytest.raises(BadRequest, match="either"):
            TokenizeRequest.parse(body)
    with pytest.raises(BadRequest) as caught:
        DetokenizeRequest.parse(b'{"tokens": [1, -1]}')
    assert caught.value.param == "tokens[1]"


names = st.sampled_from([*CompletionRequest.model_fields, *ChatRequest.model_fields, *ChatRequest.unsupported])
short_texts = st.text(alphabet="a1é\ud800\x00", max_size=4)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | short_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short_texts, inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(names, json_values, max_size=6))
def test_no_body_breaks_the_parser(fields: dict[str, Any]) -> None:
    """A shape or BadRequest, nothing else."""
    for shape in (CompletionRequest, ChatRequest):
        with contextlib.suppress(BadRequest):
            shape.parse(json.dumps(fields).encode())
