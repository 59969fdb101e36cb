"""Tools that a chat offers to the model: what clients may say of them, and the grammar of calls that must be made.

A call that is demanded (`tool_choice` required, or one function by name) is written in the model's own form, which
its parser reads; llguidance holds the output to it. So such an output is a call unless it was cut off. Under `auto` the
same holds behind what opens a call where a function asks to be held to its schema (`strict`) and the form has such a
mark.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Never

from pydantic import AfterValidator, BeforeValidator, Field

from kvferry.common.deep import with_deep_stack
from kvferry.common.errors import BadRequest
from kvferry.common.requests import StructuredOutput
from kvferry.services.gateway.chat_template import ChatTemplate
from kvferry.services.gateway.shape import Shape
from kvferry.services.gateway.structured import WHITESPACE, check_size, checked_grammar
from kvferry.services.gateway.tool_parsers import PARSERS, HermesParser, ToolFormat, format_of_template

MAX_TOOLS = 512
MAX_NAME_CHARS = 256
_ANY_OBJECT: dict[str, Any] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Tool:
    """`raw`: as the client wrote it, for the chat template."""

    name: str
    parameters: dict[str, Any]
    strict: bool
    raw: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode`: auto, none, required or named; with the last, `name`."""

    mode: str = "auto"
    name: str = ""

    @property
    def is_demand(self) -> bool:
        return self.mode in ("required", "named")


def _parse_tools(tools: list[object]) -> list[Tool]:
    return [_tool(tool, f"tools[{number}]") for number, tool in enumerate(tools)]


def _tool(tool: object, at: str) -> Tool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(tool, dict) or not isinstance(function, dict) or not isinstance(name, str):
        _refuse(at, 'must look like {"type": "function", "function": {"name": …}}')
    if not 0 < len(name) <= MAX_NAME_CHARS:
        _refuse(f"{at}.function.name", f"must have 1 to {MAX_NAME_CHARS} characters, got {reprlib.repr(name)}")
    for key, kind in (("parameters", dict), ("description", str), ("strict", bool)):
        if not isinstance(function.get(key), kind | None):
            _refuse(f"{at}.function.{key}", f"must be {'an object' if kind is dict else f'a {kind.__name__}'}")
    return Tool(name, function.get("parameters") or _ANY_OBJECT, bool(function.get("strict")), tool)


def _parse_choice(choice: object) -> ToolChoice:
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or not isinstance(name, str):
            _refuse("tool_choice", 'must look like {"type": "function", "function": {"name": …}}')
        return ToolChoice("named", name)
    if choice not in ("none", "auto", "required"):
        _refuse("tool_choice", f"must be none, auto, required or a function, got {reprlib.repr(choice)}")
    return ToolChoice(str(choice))


def _refuse(at: str, why: str) -> Never:
    raise BadRequest(f"{at} {why}", param=at)


Tools = Annotated[list[Any], Field(max_length=MAX_TOOLS), AfterValidator(_parse_tools)]
Choice = Annotated[ToolChoice | None, BeforeValidator(_parse_choice)]


class ToolFields(Shape):
    """A chat's fields that are about tools."""

    tools: Tools = Field([])
    tool_choice: Choice = None
    parallel_tool_calls: bool = True

    @property
    def offered(self) -> list[Tool]:
        tools: list[Tool] = self.tools
        return tools

    @property
    def choice(self) -> ToolChoice:
        """With tools, the model may choose unless the client says otherwise."""
        return self.tool_choice or ToolChoice("auto" if self.tools else "none")

    @property
    def may_call(self) -> frozenset[str]:
        """The names of the tools that the model may call."""
        if self.choice.mode == "none":
            return frozenset()
        return frozenset([self.choice.name] if self.choice.name else [tool.name for tool in self.offered])


def calls_are_held(body: ToolFields, form: ToolFormat) -> bool:
    """Whether a grammar keeps what begins as a call from turning out to be none."""
    if body.choice.is_demand or form != "hermes":
        return body.choice.is_demand
    return any(tool.strict for tool in body.offered if tool.name in body.may_call)


def tool_form_of(option: str, template: ChatTemplate | None) -> ToolFormat | None:
    """What `--tool-call-parser` comes to for a model with this template."""
    if option == "auto":
        return None if template is None else format_of_template(template.source)
    return next((form for form in PARSERS if form == option), None)


def check_tools(body: ToolFields) -> None:
    """Raises BadRequest on a choice that contradicts the tools."""
    names = [tool.name for tool in body.offered]
    if len(set(names)) != len(names):
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        _refuse("tools", f"has two functions called {twice!r}")
    if body.choice.mode != "none" and not names:
        _refuse("tool_choice", "needs tools")
    if body.choice.name and body.choice.name not in names:
        _refuse("tool_choice", f"names {reprlib.repr(body.choice.name)}, which is not in tools")


def compile_tools(body: ToolFields, form: ToolFormat, content: dict[str, Any] | None = None) -> StructuredOutput:
    """The grammar of an output that is calls, or with `content`, a JSON schema, JSON that matches it instead; without
    it, where no call is demanded, of any text with calls in it.

    A function's `strict` true refuses what of its schema cannot be enforced; otherwise that part is left to the model.
    Raises BadRequest that names the function's parameters. May take half a second; runs in any thread.
    """
    return with_deep_stack(lambda: _compile(body, form, content))


def _compile(body: ToolFields, form: ToolFormat, content: dict[str, Any] | None) -> StructuredOutput:
    callable_ = [(number, tool) for number, tool in enumerate(body.offered) if tool.name in body.may_call]
    several = body.parallel_tool_calls and body.choice.mode != "named"
    tools = [tool for _, tool in callable_]
    if content is None and not body.choice.is_demand:
        grammar = _grammar_in_text(tools)
    else:
        grammar = _grammar(tools, form, several=several, content=content)
    check_size(grammar, "tools")  # before the work that each of them costs
    for number, tool in callable_:  # one by one, so that an error can name its own
        checked_grammar(_grammar([tool], form, several=False), f"tools[{number}].function.parameters")
    return checked_grammar(grammar, "tools")


def _grammar(tools: Sequence[Tool], form: ToolFormat, *, several: bool, content: dict[str, Any] | None = None) -> str:
    """In Lark, with the functions' schemas inside."""
    if form == "hermes":
        opening, key, closing, between = f"{HermesParser.OPEN}\n", "arguments", f"}}\n{HermesParser.CLOSE}", "\n"
    else:
        opening, key, closing, between = "", "parameters", "}", "; "
    lines = ["start: calls" + (" | content" if content is not None else "")]
    lines.append("calls: call" + (f" ({_literal(between)} call)*" if several else ""))
    lines += _calls(tools, opening, key, closing)
    if content is not None:
        lines.append(f"content: %json {_schema(content, lenient=False)}")
    return "\n".join(lines)


def _grammar_in_text(tools: Sequence[Tool]) -> str:
    """In Hermes' form. Text goes on until a call is opened: what then follows is one."""
    lines = ["start: (opening call)* TEXT", f"opening[lazy]: TEXT {_literal(HermesParser.OPEN)}", r"TEXT: /(.|\n)*/"]
    return "\n".join([*lines, *_calls(tools, "\n", "arguments", f"}}\n{HermesParser.CLOSE}")])


def _calls(tools: Sequence[Tool], opening: str, key: str, closing: str) -> list[str]:
    lines = ["call: " + " | ".join(f"call_{number}" for number in range(len(tools)))]
    for number, tool in enumerate(tools):
        head = f'{opening}{{"name": {json.dumps(tool.name)}, "{key}": '
        lines.append(f"call_{number}: {_literal(head)} arguments_{number} {_literal(closing)}")
        lines.append(f"arguments_{number}: %json {_schema(tool.parameters, lenient=not tool.strict)}")
    return lines


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(schema: dict[str, Any], *, lenient: bool) -> str:
    """Arguments are an object whatever the schema says."""
    return json.dumps(
        {"type": "object"} | schema | {"x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": lenient}}
    )
