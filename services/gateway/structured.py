"""Structured output: what a client may demand of the output's form, and its grammar, checked before a node is asked.

Whatever the client gave (a JSON schema, a regular expression, a list of choices, a grammar) becomes one llguidance
grammar. The nodes know only that. What depends on the tokenizer, such as special tokens in a grammar, a node checks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import orjson
from llguidance import LLMatcher, LLParserLimits, grammar_from
from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvferry.common.deep import with_deep_stack
from kvferry.common.errors import BadRequest
from kvferry.common.requests import StructuredOutput
from kvferry.services.gateway.errors import param_of
from kvferry.services.gateway.shape import Shape

MAX_GRAMMAR_CHARS = 2**18
"""Bounds time, and depth: llguidance needs up to 4 kB of stack for each nested part, and none is written in less than
ten characters, so any grammar of this size fits into the stack of `with_deep_stack` twice over."""
MAX_CHOICES = 8192
MAX_COMPLAINT_CHARS = 512
MAX_SEARCHED_CHARS = 2**20
"""Parts of a refused schema that are tried by themselves, in characters altogether, to find the one at fault."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{1,20}"
"""Between the tokens of a JSON output. Bounded, or a small model may fill its whole budget with it."""

_LIMITS = LLParserLimits(verbose_errors=False)
_SUBSCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "contains", "not", "if", "then", "else")
_SUBSCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SUBSCHEMA_MAPS = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")

Where = tuple[str | int, ...]


def _schema(value: object) -> dict[str, Any]:
    """A schema is an object, or text that holds one; `true` permits any JSON."""
    try:
        parsed: object = orjson.loads(value) if isinstance(value, str) else value
    except orjson.JSONDecodeError as exc:
        raise PydanticCustomError("schema", "the text should be a JSON schema: {reason}", {"reason": str(exc)}) from exc
    if parsed is True:
        return {}
    if not isinstance(parsed, dict):
        raise PydanticCustomError("schema", "a JSON schema should be an object")
    return parsed


Schema = Annotated[dict[str, Any], BeforeValidator(_schema)]


class JsonSchema(Shape):
    """`strict` makes no difference: the output always matches."""

    name: str = Field("", max_length=512)
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Shape):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise BadRequest("response_format.json_schema is required", param="response_format.json_schema")
        return self

    @property
    def schema_of_content(self) -> dict[str, Any]:
        """Meaningless for text."""
        return self.json_schema.schema_ if self.json_schema is not None else {"type": "object"}


class StructuredOutputs(Shape):
    """vLLM's field: exactly one constraint. A grammar is Lark, or GBNF where it has `::=`."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "structural_tag": (),
        "disable_additional_properties": (False,),
    }

    json_: Schema | None = Field(None, alias="json")
    json_object: bool = False
    regex: str | None = Field(None, max_length=MAX_GRAMMAR_CHARS)
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = Field(None, max_length=MAX_GRAMMAR_CHARS)
    whitespace_pattern: str | None = Field(None, max_length=512)
    disable_any_whitespace: bool = False

    @model_validator(mode="before")
    @classmethod
    def _only_what_is_served(cls, data: Any) -> Any:
        for name, harmless in cls.unsupported.items() if isinstance(data, dict) else ():
            if (value := data.get(name)) is not None and value not in harmless:
                raise BadRequest(f"structured_outputs.{name} is not supported", param=f"structured_outputs.{name}")
        return data

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        given = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar}
        names = [name for name, value in given.items() if value is not None] + ["json_object"] * self.json_object
        if len(names) != 1:
            found = f", got {' and '.join(names)}" if names else ""
            raise BadRequest(
                f"structured_outputs: give exactly one of {', '.join(given)} and json_object{found}",
                param="structured_outputs",
            )
        return self


def check_one_constraint(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> None:
    """Raises BadRequest when both fields demand a form."""
    if structured is not None and response_format is not None and response_format.type != "text":
        raise BadRequest(
            "structured_outputs and response_format both constrain the output: give one of them",
            param="structured_outputs",
        )


def compile_structured(
    response_format: ResponseFormat | None, structured: StructuredOutputs | None
) -> StructuredOutput | None:
    """The grammar that the output must follow. Raises BadRequest that says which part cannot be served.

    May take half a second for a large schema; runs in any thread.
    """
    return with_deep_stack(lambda: _compile(response_format, structured))


def _compile(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> StructuredOutput | None:
    if structured is not None:
        return _from_structured_outputs(structured)
    if response_format is None or response_format.type == "text":
        return None
    param = "response_format" if response_format.json_schema is None else "response_format.json_schema.schema"
    return _from_schema(response_format.schema_of_content, param)


def _from_structured_outputs(body: StructuredOutputs) -> StructuredOutput:
    field = "structured_outputs"
    if body.regex is not None:
        return checked_grammar(LLMatcher.grammar_from_regex(body.regex), f"{field}.regex")
    if body.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in body.choice)
        return checked_grammar(LLMatcher.grammar_from_lark(f"start: {choices}"), f"{field}.choice")
    if body.grammar is not None:
        try:
            return checked_grammar(grammar_from("grammar", body.grammar), f"{field}.grammar")
        except ValueError as exc:
            raise BadRequest(f"{field}.grammar: {exc}", param=f"{field}.grammar") from exc
    whitespace = "" if body.disable_any_whitespace else body.whitespace_pattern
    if body.json_ is None:
        return _from_schema({"type": "object"}, f"{field}.json_object", whitespace)
    return _from_schema(body.json_, f"{field}.json", whitespace)


def _from_schema(schema: dict[str, Any], param: str, whitespace: str | None = None) -> StructuredOutput:
    try:
        return checked_grammar(_schema_grammar(schema, whitespace), param)
    except BadRequest as exc:
        complaint = exc.message.removeprefix(f"{param}: ")
        if not (where := _culprit(schema, complaint)):
            raise
        raise BadRequest(f"{param}: at {param_of(where)}: {complaint}", param=param) from exc
    except (TypeError, ValueError) as exc:  # nested too deeply for a parser of JSON
        raise BadRequest(f"{param}: {exc}", param=param) from exc


def _schema_grammar(schema: dict[str, Any], whitespace: str | None = None) -> str:
    """Raises TypeError or ValueError when the schema is nested too deeply."""
    pattern = WHITESPACE if whitespace is None else whitespace
    return LLMatcher.grammar_from_json_schema(
        orjson.dumps(schema).decode(), overrides={"whitespace_pattern": pattern, "lenient": False}
    )


def check_size(grammar: str, param: str) -> None:
    """Raises BadRequest on a grammar that is too large."""
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise BadRequest(f"{param}: {len(grammar)} characters exceed the limit of {MAX_GRAMMAR_CHARS}", param=param)


def checked_grammar(grammar: str, param: str) -> StructuredOutput:
    """Raises BadRequest on a grammar that is too large or wrong. Runs inside `with_deep_stack`."""
    check_size(grammar, param)
    if (complaint := _complaint(grammar)) is not None:
        raise BadRequest(f"{param}: {complaint}", param=param)
    return StructuredOutput(grammar, param)


def _complaint(grammar: str) -> str | None:
    """What llguidance has against a grammar, without the excerpts that it draws."""
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=_LIMITS)
    if not is_wrong:
        return None
    first, *others = (line.strip() for line in messages[0].splitlines())
    reason = next((line.removeprefix("error: ") for line in others if line.startswith("error: ")), "")
    complaint = f"{first} {reason}" if first.endswith(":") else first
    return complaint.rpartition("(in regex): ")[2][:MAX_COMPLAINT_CHARS]


def _culprit(schema: dict[str, Any], complaint: str) -> Where:
    """Where the smallest part stands that draws the same complaint by itself; empty: only the whole schema does."""
    definitions = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    found: Where = ()
    num_chars = 0
    for path, part in _parts(schema, ()):
        if path[: len(found)] == found:
            grammar = _schema_grammar(definitions | part)
            num_chars += len(grammar)
            if num_chars > MAX_SEARCHED_CHARS:
                break
            if _complaint(grammar) == complaint:
                found = path
    return found


def _parts(schema: dict[str, Any], path: Where) -> Iterator[tuple[Where, dict[str, Any]]]:
    """All subschemas that are objects, parents first, definitions before what refers to them; the whole left out."""
    steps: list[tuple[Where, Any]] = []
    for key in _SUBSCHEMA_MAPS:
        if isinstance(named := schema.get(key), dict):
            steps += [((key, name), part) for name, part in named.items()]
    steps += [((key,), schema[key]) for key in _SUBSCHEMAS if key in schema]
    for key in _SUBSCHEMA_LISTS:
        if isinstance(several := schema.get(key), list):
            steps += [((key, number), part) for number, part in enumerate(several)]
    for step, part in steps:
        if isinstance(part, dict):
            yield path + step, part
            yield from _parts(part, path + step)
