"""Several streams of one gateway at once, followed event by event, and what their clients have put together."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

TIMEOUT_S = 120.0


@dataclass
class Choice:
    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    ends: list[tuple[str, Any]] = field(default_factory=list)


@dataclass
class Stream:
    """`route`: what the gateway says about its first attempt."""

    body: dict[str, Any]
    choices: dict[int, Choice] = field(default_factory=dict)
    num_events: int = 0
    usage: Any = None
    error: Any = None
    route: str = ""
    done: bool = False

    def take(self, event: Mapping[str, Any]) -> None:
        assert not self.done, "an event behind [DONE]"
        self.num_events += 1
        self.error = event.get("error") or self.error
        self.usage = event.get("usage") or self.usage
        for part in event.get("choices", ()):
            choice = self.choices.setdefault(part["index"], Choice())
            choice.text += part["text"] if "text" in part else part["delta"].get("content") or ""
            for name, values in (part.get("logprobs") or {}).items():
                choice.logprobs.setdefault(name, []).extend(values or [])
            if part["finish_reason"]:
                choice.ends.append((part["finish_reason"], part["stop_reason"]))

    @property
    def told(self) -> tuple[Any, ...]:
        """All that another run of the same request must give, bit for bit."""
        assert self.done
        assert self.error is None, self.error
        return self.choices, self.usage


class Streams:
    def __init__(self, url: str, bodies: Sequence[dict[str, Any]]) -> None:
        fields = {"model": "test", "stream": True, "stream_options": {"include_usage": True}}
        self.all = [Stream(fields | body) for body in bodies]
        self._url = url
        self._moved = asyncio.Condition()

    async def begun(self, num_events: int) -> None:
        """Waits until each stream has had so many events."""
        async with self._moved, asyncio.timeout(TIMEOUT_S):
            await self._moved.wait_for(lambda: all(s.num_events >= num_events or s.done for s in self.all))

    async def run(self) -> None:
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client, asyncio.TaskGroup() as tasks:
            for stream in self.all:
                tasks.create_task(self._follow(client, stream))

    async def _follow(self, client: httpx.AsyncClient, stream: Stream) -> None:
        path = "/v1/chat/completions" if "messages" in stream.body else "/v1/completions"
        async with client.stream("POST", self._url + path, json=stream.body) as reply:
            assert reply.status_code == httpx.codes.OK, await reply.aread()
            stream.route = reply.headers["x-kvferry-route"]
            async for line in reply.aiter_lines():
                if line == "data: [DONE]":
                    stream.done = True
                elif line:
                    stream.take(json.loads(line.removeprefix("data: ")))
                async with self._moved:
                    self._moved.notify_all()


@asynccontextmanager
async def running(url: str, bodies: Sequence[dict[str, Any]]) -> AsyncIterator[Streams]:
    """Inside, the streams run; behind it, all have ended."""
    streams = Streams(url, bodies)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(streams.run())
        yield streams


def ask(url: str, bodies: Sequence[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """What undisturbed streams tell."""

    async def run() -> list[Stream]:
        async with running(url, bodies) as streams:
            pass
        return streams.all

    return [stream.told for stream in asyncio.run(run())]
