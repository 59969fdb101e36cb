"""Prompts and chat messages as clients write them -> the plain form that the rest of the gateway uses.

Written by hand where pydantic's unions would answer with a list of everything that might have been meant.
"""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, Never

import orjson

from kvferry.common.errors import BadRequest

Prompt = str | list[int]

_ROLES = ("developer", "system", "user", "assistant", "tool")


def parse_prompts(prompt: object) -> list[Prompt]:
    """A string, token ids, a list of strings or a list of token id lists -> one entry per prompt.

    Whether the ids exist is the caller's to check. Raises BadRequest.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise BadRequest("prompt must be a string, a list of token ids, or a list of either", param="prompt")
    if not prompt:
        raise BadRequest("prompt must not be empty", param="prompt")
    if _is_ids(prompt):
        return [prompt]
    if all(isinstance(item, str) for item in prompt):
        return prompt
    if all(isinstance(item, list) for item in prompt):
        for number, item in enumerate(prompt):
            if not item or not _is_ids(item):
                raise BadRequest(f"prompt[{number}] must be a non-empty list of token ids", param="prompt")
        return prompt
    raise BadRequest("prompt: all entries must be strings, or all token ids, or all lists of token ids", param="prompt")


def _is_ids(items: Sequence[object]) -> bool:
    return all(type(item) is int for item in items)


def parse_messages(messages: Sequence[object]) -> list[dict[str, Any]]:
    """Checks roles and contents and joins text parts. Raises BadRequest naming the message."""
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: object, at: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        _refuse(at, "must be an object with role and content")
    role = message.get("role")
    if role not in _ROLES:
        _refuse(f"{at}.role", f"must be one of {', '.join(_ROLES)}, got {reprlib.repr(role)}")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None and (role != "assistant" or not isinstance(tool_calls, list)):
        _refuse(f"{at}.tool_calls", "must be a list, in an assistant message")
    result: dict[str, Any] = {"role": role}
    if message.get("content") is None:
        if not (role == "assistant" and tool_calls):
            _refuse(f"{at}.content", f"is required in a message of role {role}")
        result["content"] = ""
    else:
        result["content"] = _content(message["content"], f"{at}.content")
    for key in ("name", "tool_call_id"):
        if (value := message.get(key)) is not None:
            if not isinstance(value, str):
                _refuse(f"{at}.{key}", "must be a string")
            result[key] = value
    if tool_calls:
        result["tool_calls"] = _tool_calls(tool_calls, f"{at}.tool_calls")
    return result


def _content(content: object, at: str) -> str:
    """A string, or text parts joined to one: the same text gives the same prompt either way."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        _refuse(at, "must be a string or a list of parts")
    if not content:
        _refuse(at, "must have at least one part")
    return "".join(_part(part, f"{at}[{number}]") for number, part in enumerate(content))


def _part(part: object, at: str) -> str:
    if not isinstance(part, dict):
        _refuse(at, "must be an object with type and text")
    kind = part.get("type")
    if kind != "text":
        _refuse(at, f"of type {reprlib.repr(kind)} is not supported: this model reads text")
    text = part.get("text")
    if not isinstance(text, str):
        _refuse(f"{at}.text", "must be a string")
    return text


def _tool_calls(calls: Sequence[object], at: str) -> list[dict[str, Any]]:
    """As templates want them: the arguments as an object, not as text."""
    return [_tool_call(call, f"{at}[{number}]") for number, call in enumerate(calls)]


def _tool_call(call: object, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) and call.get("type", "function") == "function" else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
        _refuse(at, 'must look like {"id": …, "type": "function", "function": {"name": …, "arguments": …}}')
    if not isinstance(call.get("id", ""), str):
        _refuse(f"{at}.id", "must be a string")
    arguments = function.get("arguments") or "{}"
    try:
        parsed: object = orjson.loads(arguments) if isinstance(arguments, str) else arguments
    except orjson.JSONDecodeError:
        parsed = None
    if not isinstance(parsed, dict):
        _refuse(f"{at}.function.arguments", f"must be a JSON object as text, got {reprlib.repr(arguments)}")
    return {**call, "type": "function", "function": {**function, "arguments": parsed}}


def _refuse(at: str, why: str) -> Never:
    raise BadRequest(f"{at} {why}", param=at)
