"""A model's chat template: messages -> prompt text, in the sandbox, with the helpers that `transformers` offers.

Templates are code that came with the weights: they run without access to anything but what they are given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvferry.common.errors import BadRequest, ModelLoadError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model would write; for a prompt it is just its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class ChatTemplate:
    """Compiled once per process; `render` may run in any thread."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Raises ModelLoadError on a template that does not parse."""
        env = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        env.filters["tojson"] = _tojson
        env.globals["raise_exception"] = _raise_exception
        env.globals["strftime_now"] = _strftime_now
        try:
            self._template = env.from_string(source)
        except jinja2.TemplateSyntaxError as exc:
            raise ModelLoadError(f"the model's chat template does not parse: line {exc.lineno}: {exc.message}") from exc
        self._special_tokens = dict(special_tokens)
        self.source = source

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt. Raises BadRequest when the template refuses the messages, in the template's own words."""
        given = self._special_tokens | dict(variables or {})
        given |= {"messages": messages, "tools": tools, "documents": None}
        given["add_generation_prompt"] = add_generation_prompt
        try:
            return self._template.render(given)
        except jinja2.TemplateError as exc:
            raise BadRequest(f"messages: the chat template refuses them: {exc}", param="messages") from exc
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError, RecursionError) as exc:
            raise BadRequest(f"messages: the chat template fails on them: {exc}", param="messages") from exc
