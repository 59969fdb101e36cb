"""What a JSON line says, and of which request."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from contextvars import Context
from typing import Any

import pytest

from kvferry.common.log import JsonFormatter, add_log_field, log_fields

log = logging.getLogger("kvferry.test")


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    log.addHandler(handler)
    yield stream
    log.removeHandler(handler)


def lines(out: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_fields_reach_tasks_and_threads_of_the_request_and_no_other(out: io.StringIO) -> None:
    async def request(name: str) -> None:
        with log_fields(request_id=name, trace_id=""):
            await asyncio.sleep(0)
            await asyncio.gather(asyncio.create_task(say("task")), asyncio.to_thread(log.warning, "thread"))
            await asyncio.create_task(say("apart"), context=Context())

    async def say(text: str) -> None:
        log.warning(text)

    async def both() -> None:
        await asyncio.gather(request("a"), request("b"))

    asyncio.run(both())
    seen = sorted((line["message"], line.get("request_id", "")) for line in lines(out))
    assert seen == [("apart", ""), ("apart", ""), ("task", "a"), ("task", "b"), ("thread", "a"), ("thread", "b")]
    assert not any("trace_id" in line for line in lines(out)), "an empty field is none"


def test_a_field_added_in_a_task_is_on_the_last_line_of_the_request(out: io.StringIO) -> None:
    async def handler() -> None:
        add_log_field("trace_id", "t")

    async def request() -> None:
        with log_fields(request_id="a"):
            await asyncio.create_task(handler())
            log.warning("end")
        log.warning("after")

    asyncio.run(request())
    inside, after = lines(out)
    assert (inside["request_id"], inside["trace_id"]) == ("a", "t")
    assert "request_id" not in after


def test_one_event_is_one_line_whatever_is_in_it(out: io.StringIO) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.exception("failed\nbadly", extra={"size": 3})
    (line,) = lines(out)
    assert line["message"] == "failed\nbadly"
    assert "two\nlines" in line["exception"]
    assert line["size"] == 3
