"""What a client may demand of the output's form: what reaches the nodes, and what is refused before anything starts."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher

from kvferry.common.errors import BadRequest
from kvferry.common.requests import StructuredOutput
from kvferry.services.gateway.openai import ChatRequest, CompletionRequest
from kvferry.services.gateway.structured import MAX_GRAMMAR_CHARS, compile_structured
from tests.gateway.fake_decode import FakeDecode
from tests.gateway.harness import Setup, gateway, run

OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


def compiled(**fields: Any) -> StructuredOutput | None:
    """Of a chat and of a completion, which must agree."""
    chat = ChatRequest.parse(json.dumps({"messages": [{"role": "user", "content": "x"}], **fields}).encode())
    completion = CompletionRequest.parse(json.dumps({"prompt": "x", **fields}).encode())
    made = compile_structured(chat.response_format, chat.structured_outputs)
    assert compile_structured(completion.response_format, completion.structured_outputs) == made
    return made


def refused(**fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        compiled(**fields)
    return caught.value


def json_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": json_schema(OBJECT)}, "response_format.json_schema.schema"),
        ({"response_format": json_schema(True)}, "response_format.json_schema.schema"),
        ({"structured_outputs": {"json": OBJECT}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": json.dumps(OBJECT)}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": OBJECT, "disable_any_whitespace": True}}, "structured_outputs.json"),
        ({"structured_outputs": {"json": OBJECT, "whitespace_pattern": " ?"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": r"\d+", "json": None}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": ["yes", "né\n", '"', "🙂"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"grammar": 'root ::= "a" | "b"'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"grammar": 'start: "a" /[b-d]+/'}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "text"}}, "structured_outputs.regex"),
    ],
)
def test_every_form_becomes_a_grammar_that_names_its_field(fields: dict[str, Any], param: str) -> None:
    made = compiled(**fields)
    assert made is not None
    assert made.param == param
    assert LLMatcher.validate_grammar(made.grammar) == ""


def test_no_demand_is_no_grammar() -> None:
    assert compiled() is None
    assert compiled(response_format={"type": "text"}) is None
    assert compiled(response_format=None, structured_outputs=None) is None


SCHEMA = "response_format.json_schema.schema"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "foo"}, f"{SCHEMA}: Invalid type: foo"),
        (
            {"properties": {"a": {"items": {"not": {}}}}},
            f'{SCHEMA}: at properties.a.items: Unimplemented keys: ["not"]',
        ),
        ({"anyOf": [{"type": "null"}, {"uniqueItems": True}]}, f"{SCHEMA}: at anyOf[1]: Unimplemented keys"),
        (
            {"properties": {"a": {"$ref": "#/$defs/X"}}, "$defs": {"X": {"type": "string", "format": "zip"}}},
            f"{SCHEMA}: at $defs.X: Unknown format: zip",
        ),
        ({"$ref": "#/$defs/X"}, f"{SCHEMA}: Pointer '/$defs/X' does not exist"),
        ({"$ref": "http://localhost/x"}, "does not fetch resources"),
        (
            {"properties": {"a": {"pattern": "(?=a)b", "type": "string"}}},
            "at properties.a: regex parse error: look-around",
        ),
        ({"type": "integer", "minimum": 5, "maximum": 2}, "minimum (5) is greater than maximum (2)"),
        ([], f"{SCHEMA}: a JSON schema should be an object, got []"),
        (False, f"{SCHEMA}: a JSON schema should be an object, got False"),
        ({"description": "x" * MAX_GRAMMAR_CHARS}, "exceed the limit of"),
    ],
)
def test_a_schema_that_cannot_be_served_is_refused_and_the_part_is_named(schema: Any, message: str) -> None:
    error = refused(response_format=json_schema(schema))
    assert message in error.message
    assert error.param == SCHEMA


@pytest.mark.parametrize(
    ("structured", "param", "message"),
    [
        ({}, "structured_outputs", "give exactly one of json, regex, choice, grammar and json_object"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs", "got regex and choice"),
        ({"regex": "a("}, "structured_outputs.regex", "unclosed group"),
        ({"regex": r"(a)\1"}, "structured_outputs.regex", "backreferences are not supported"),
        ({"choice": []}, "structured_outputs.choice", "at least 1 item"),
        ({"choice": ["a", 5]}, "structured_outputs.choice[1]", "valid string"),
        ({"grammar": "root ::= x"}, "structured_outputs.grammar", "Rule 'x' not found"),
        ({"grammar": "start: x"}, "structured_outputs.grammar", 'unknown name: "x"'),
        ({"grammar": "nonsense"}, "structured_outputs.grammar", "Expected"),
        ({"json": "nonsense"}, "structured_outputs.json", "the text should be a JSON schema"),
        ({"json": {}, "whitespace_pattern": "("}, "structured_outputs.json", "unclosed group"),
        ({"structural_tag": "{}"}, "structured_outputs.structural_tag", "not supported"),
        (
            {"json": {}, "disable_additional_properties": True},
            "structured_outputs.disable_additional_properties",
            "not",
        ),
        ("x", "structured_outputs", "valid dictionary"),
    ],
)
def test_a_constraint_that_cannot_be_served_is_refused_by_name(structured: Any, param: str, message: str) -> None:
    error = refused(structured_outputs=structured)
    assert message in error.message
    assert error.param == param


@pytest.mark.parametrize(
    ("response_format", "param"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "response_format.json_schema.schema"),
        ({"type": "structural_tag"}, "response_format.type"),
        ({}, "response_format.type"),
        ("json", "response_format"),
    ],
)
def test_a_response_format_that_is_none_is_refused_by_name(response_format: Any, param: str) -> None:
    assert refused(response_format=response_format).param == param


def test_two_demands_conflict() -> None:
    error = refused(response_format={"type": "json_object"}, structured_outputs={"regex": "a"})
    assert error.param == "structured_outputs"
    assert "give one of them" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {
            "json": {
                "$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(5000)} | {"a5000": {}},
                "$ref": "#/$defs/a0",
            }
        },
        {"grammar": "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(15_000)) + '\nr15000: "a"'},
        {"grammar": "start: R0\n" + "\n".join(f"R{i}: R{i + 1}" for i in range(15_000)) + '\nR15000: "a"'},
    ],
    ids=["references", "rules", "terminals"],
)
def test_a_long_chain_does_not_overflow_the_stack(fields: Any) -> None:
    """Of an ordinary thread it would, and that ends the process."""
    assert compiled(structured_outputs=fields) is not None


def test_nesting_has_a_limit() -> None:
    deep: Any = {}
    for _ in range(400):
        deep = {"items": deep}
    assert "limit" in refused(structured_outputs={"json": deep}).message


def test_the_grammar_reaches_the_node() -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.chat(response_format=json_schema(OBJECT), max_tokens=2)).status_code == 200
        assert (await setup.complete(["a", "b"], structured_outputs={"regex": "x"}, max_tokens=2)).status_code == 200
        assert (await setup.complete(max_tokens=2)).status_code == 200
        sent = [request.sampling.structured for request in setup.nodes[0].submitted]
        regex = compiled(structured_outputs={"regex": "x"})
        assert sent == [compiled(response_format=json_schema(OBJECT)), regex, regex, None]

    run(gateway(FakeDecode()), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_a_400_before_any_node_is_asked(stream: bool) -> None:
    async def scenario(setup: Setup) -> None:
        bad = json_schema({"properties": {"a": {"not": {}}}})
        for reply in (
            await setup.chat(response_format=bad, stream=stream),
            await setup.complete(response_format=bad, stream=stream),
        ):
            assert reply.status_code == 400
            error = reply.json()["error"]
            assert error["param"] == SCHEMA
            assert "at properties.a: " in error["message"]
            assert error["type"] == "invalid_request_error"
        assert setup.nodes[0].submitted == []

    run(gateway(FakeDecode()), scenario)
