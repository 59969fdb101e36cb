"""The OpenAPI document at /openapi.json: bodies from the shapes that check them, answers written down here.

What a schema cannot say (fields that exclude each other, limits of the model) a 400 says, which names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvferry.services.gateway.openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from kvferry.services.gateway.shape import Shape

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_INTEGER: Schema = {"type": "integer"}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_FUNCTION: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 256},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}
_NAMED: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": _TEXT}},
    },
}
_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": _TEXT},
}
_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["developer", "system", "user", "assistant", "tool"]},
        "content": {"anyOf": [_TEXT, {"type": "array", "items": _PART, "minItems": 1}, {"type": "null"}]},
        "name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
        "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
    },
}
_BY_HAND: dict[str, Schema] = {
    "prompt": {
        "anyOf": [_TEXT, _IDS]
        + [{"type": "array", "items": item, "minItems": 1, "maxItems": 1024} for item in (_TEXT, _IDS)]
    },
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "maxItems": 16_384},
    "tools": {"type": "array", "items": _TOOL, "maxItems": 512},
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED]},
    "stop": {"anyOf": [_TEXT, {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 64}]},
    "request_id": {"type": "string", "pattern": "^[!-~]{1,128}$"},
}
"""Fields that Python code checks rather than a type."""

_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string", "minLength": 1},
                "type": _TEXT,
                "param": {"type": ["string", "null"]},
                "code": _TEXT,
            },
        }
    },
}
_USAGE: Schema = {
    "type": "object",
    "required": ["prompt_tokens", "completion_tokens", "total_tokens"],
    "properties": {
        "prompt_tokens": _INTEGER,
        "completion_tokens": _INTEGER,
        "total_tokens": _INTEGER,
        "prompt_tokens_details": {"type": "object", "properties": {"cached_tokens": _INTEGER}},
    },
}
_FINISH = {"enum": ["stop", "length", "tool_calls"]}
_CALL: Schema = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": _TEXT,
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": _TEXT, "arguments": _TEXT},
        },
    },
}
_ASSISTANT: Schema = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"const": "assistant"},
        "content": {"type": ["string", "null"]},
        "tool_calls": {"type": "array", "items": _CALL, "minItems": 1},
    },
}


def _answer(kind: str, of_choice: Schema) -> Schema:
    choice = {
        "type": "object",
        "required": ["index", "finish_reason", "logprobs", *of_choice],
        "properties": {
            "index": _INTEGER,
            "finish_reason": _FINISH,
            "stop_reason": {"type": ["string", "integer", "null"]},
            "logprobs": {"type": ["object", "null"]},
            "token_ids": {"type": "array", "items": _INTEGER},
            **of_choice,
        },
    }
    properties = {
        "id": _TEXT,
        "object": {"const": kind},
        "created": _INTEGER,
        "model": _TEXT,
        "choices": {"type": "array", "items": choice, "minItems": 1},
        "usage": _USAGE,
    }
    return {"type": "object", "required": list(properties), "properties": properties}


_CARD: Schema = {
    "type": "object",
    "required": ["id", "object", "created", "owned_by"],
    "properties": {
        "id": _TEXT,
        "object": {"const": "model"},
        "created": _INTEGER,
        "owned_by": _TEXT,
        "max_model_len": {"type": ["integer", "null"]},
    },
}


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "required": list(properties), "properties": properties}


_TOKENS: Schema = {
    "type": "object",
    "required": ["count", "max_model_len", "tokens"],
    "properties": {
        "count": _INTEGER,
        "max_model_len": {"type": ["integer", "null"]},
        "tokens": {"type": "array", "items": _INTEGER},
        "token_strs": {"type": "array", "items": _TEXT},
    },
}
_STATUS = _object(status=_TEXT)
_SPOKEN: dict[tuple[str, str], tuple[str, type[Shape] | None, Schema]] = {
    ("post", "/v1/completions"): ("Complete a text", CompletionRequest, _answer("text_completion", {"text": _TEXT})),
    ("post", "/v1/chat/completions"): (
        "Answer a conversation",
        ChatRequest,
        _answer("chat.completion", {"message": _ASSISTANT}),
    ),
    ("get", "/v1/models"): (
        "The model",
        None,
        _object(object={"const": "list"}, data={"type": "array", "items": _CARD}),
    ),
    ("post", "/tokenize"): ("The tokens of a text or a conversation", TokenizeRequest, _TOKENS),
    ("post", "/detokenize"): ("The text of tokens", DetokenizeRequest, _object(prompt=_TEXT)),
    ("get", "/health"): ("Alive", None, _STATUS),
    ("get", "/ping"): ("Alive", None, _STATUS),
    ("get", "/ready"): ("A request sent now could be served", None, _STATUS),
    ("get", "/load"): ("Requests in flight", None, _object(server_load=_INTEGER)),
    ("get", "/version"): ("The version", None, _object(version=_TEXT)),
}
_STREAMED = frozenset({"/v1/completions", "/v1/chat/completions"})


def document(version: str, *, asks_for_key: bool) -> dict[str, Any]:
    """OpenAPI 3.1."""
    schemas: dict[str, Schema] = {"Error": _ERROR}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), (summary, body, answer) in _SPOKEN.items():
        ok: dict[str, Any] = {"application/json": {"schema": answer}}
        if path in _STREAMED:
            ok["text/event-stream"] = {"schema": {"type": "string", "description": "chunks, then `data: [DONE]`"}}
        error = {"description": "error", "content": {"application/json": {"schema": _ref("Error")}}}
        operation: dict[str, Any] = {
            "summary": summary,
            "operationId": f"{method}_{path.strip('/').replace('/', '_')}",
            "responses": {"200": {"description": "done", "content": ok}, "4XX": error, "5XX": error},
        }
        if body is not None:
            schemas |= _schemas_of(body)
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": _ref(body.__name__)}},
            }
        paths.setdefault(path, {})[method] = operation
    made: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "kvferry", "version": version},
        "paths": paths,
        "components": {"schemas": schemas},
    }
    if asks_for_key:
        made["components"]["securitySchemes"] = {"apiKey": {"type": "http", "scheme": "bearer"}}
        made["security"] = [{"apiKey": []}]
    return made


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _schemas_of(body: type[Shape]) -> dict[str, Schema]:
    """The body's schema and those that it refers to."""
    whole = body.model_json_schema(ref_template="#/components/schemas/{model}")
    parts: dict[str, Schema] = whole.pop("$defs", {})
    parts.pop("ToolChoice", None)
    whole["properties"] = {name: _BY_HAND.get(name, schema) for name, schema in whole["properties"].items()}
    whole["properties"] |= {name: _refused(values) for name, values in body.unsupported.items()}
    made = parts | {body.__name__: whole}
    for schema in made.values():
        required = schema.get("required", [])
        schema["properties"] = {
            name: part if name in required else {"anyOf": [part, {"type": "null"}]}
            for name, part in schema.get("properties", {}).items()
        }
    return made


def _refused(harmless: tuple[object, ...]) -> Schema:
    return {"description": "not supported", "enum": [*harmless, None]}


def paths_of(spoken: Mapping[str, Any]) -> set[tuple[str, str]]:
    """Method and path of everything that a document describes."""
    return {(method, path) for path, methods in spoken["paths"].items() for method in methods}
