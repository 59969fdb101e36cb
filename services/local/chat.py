"""`kvferry chat`: talks to a gateway in the terminal. A plain client: it knows the HTTP surface and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx

from kvferry.common.errors import KvferryError
from kvferry.services.local.access import Access, no_answer

HELP = "/reset forgets the conversation, /exit (or Ctrl-D) leaves, Ctrl-C stops an answer."
CONNECT_TIMEOUT_S = 5.0

Message = dict[str, str]


def main(
    access: Access,
    model: str | None,
    *,
    system: str | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
) -> int:
    """Runs until /exit or the end of input. Raises Unavailable when there is no gateway, NoAccess if it wants more."""
    options = {"max_tokens": max_tokens, "temperature": temperature}
    timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT_S)
    with access.client(timeout) as client:
        model = model or _first_model(client, access)
        print(f"{model} at {access.url}. {HELP}")
        start: list[Message] = [{"role": "system", "content": system}] if system else []
        history = list(start)
        while (line := _ask()) is not None:
            if line == "/exit":
                break
            if line == "/reset":
                history = list(start)
                print("(forgotten)")
            elif line.startswith("/"):
                print(HELP)
            elif line:
                _turn(client, history, line, {"model": model} | {k: v for k, v in options.items() if v is not None})
    return 0


def _first_model(client: httpx.Client, access: Access) -> str:
    try:
        reply = client.get("/v1/models").raise_for_status()
        return str(reply.json()["data"][0]["id"])
    except (httpx.HTTPError, ValueError, LookupError) as exc:
        raise no_answer(access, exc) from exc


def _ask() -> str | None:
    """One line from the user; None at the end of input. Ctrl-C at the prompt only clears the line."""
    while True:
        try:
            return input("> ").strip()
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            print()


def _turn(client: httpx.Client, history: list[Message], line: str, options: dict[str, Any]) -> None:
    """Asks, shows the answer as it comes, and remembers both; of an answer that was stopped, what was shown."""
    history.append({"role": "user", "content": line})
    parts: list[str] = []
    try:
        for text in _stream(client, {**options, "messages": history, "stream": True}):
            parts.append(text)
            sys.stdout.write(text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stdout.write(" (stopped)")
    except (httpx.HTTPError, KvferryError) as exc:
        sys.stdout.write(f"\n(error: {exc})")
    finally:
        print()
        if parts:
            history.append({"role": "assistant", "content": "".join(parts)})
        else:
            history.pop()


def _stream(client: httpx.Client, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of the answer's text. Leaving the loop early closes the connection, which cancels the request."""
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.is_error:
            reply.read()
            raise KvferryError(_error_message(reply.text) or f"HTTP {reply.status_code}")
        for line in reply.iter_lines():
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:") or data == "[DONE]":
                continue
            if message := _error_message(data):
                raise KvferryError(message)
            for choice in json.loads(data).get("choices", ()):
                yield choice.get("delta", {}).get("content") or ""


def _error_message(text: str) -> str:
    """The message of an error in OpenAI's shape, or ""."""
    with suppress(ValueError, TypeError, LookupError, AttributeError):
        return str(json.loads(text)["error"]["message"])
    return ""
