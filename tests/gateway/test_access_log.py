"""One line per HTTP request: what was asked, how it ended, what it took; not a word of what was said."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvferry.common.errors import Overloaded
from kvferry.common.log import JsonFormatter
from kvferry.services.gateway.api_keys import new_key
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, gateway, run

SECRET = "Tell nobody of the harbour master"


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("kvferry")
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield stream
    logger.removeHandler(handler)
    logger.setLevel(before)


def access(out: io.StringIO) -> list[dict[str, Any]]:
    return [line for line in map(json.loads, out.getvalue().splitlines()) if line["logger"] == "kvferry.access"]


def test_a_request_is_one_line_with_its_numbers_and_without_its_words(out: io.StringIO) -> None:
    async def scenario(setup: Setup) -> None:
        headers = {"x-request-id": "mine", "authorization": "Bearer sk-secret"}
        body = {"model": "tiny", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 5}
        reply = await setup.client.post("/v1/chat/completions?key=sk-query", json=body, headers=headers)
        assert reply.status_code == 200, reply.text
        (line,) = access(out)
        usage = reply.json()["usage"]
        assert line["duration_s"] > 0
        expected = {
            "method": "POST",
            "path": "/v1/chat/completions",
            "status": 200,
            "request_id": "mine",
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": 2,
            "generation_tokens": 5,
            "decode_node": "d0",
            "ended": "length",
        }
        assert {name: line[name] for name in expected} == expected
        written = out.getvalue()
        for secret in (SECRET, "harbour", "sk-secret", "sk-query"):
            assert secret not in written

    run(gateway(FakeDecode(Behaviour(cached_tokens=2))), scenario)


def test_it_names_the_key_and_does_not_show_it(out: io.StringIO) -> None:
    key, kept = new_key("alice")

    async def scenario(setup: Setup) -> None:
        for given in (key, "kvf-wrong"):
            await setup.client.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"authorization": f"Bearer {given}"}
            )
        known, unknown = access(out)
        assert (known["status"], known["api_key_name"]) == (200, "alice")
        assert known["message"].endswith(" of alice")
        assert unknown["status"] == 401
        assert "api_key_name" not in unknown
        for secret in (key, "kvf-wrong", kept.split()[0].removeprefix("sha256:")):
            assert secret not in out.getvalue()

    run(gateway(FakeDecode(), api_keys=kept), scenario)


def test_a_path_cannot_write_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(setup: Setup) -> None:
        with caplog.at_level(logging.INFO, "kvferry.access"):
            await setup.client.get("/v1/models/x%0A00:00:00%20I%20forged%1B[2J%E2%80%AE")
        (record,) = [record for record in caplog.records if record.name == "kvferry.access"]
        assert "x\\n00:00:00 I forged\\x1b[2J\\u202e 404" in record.getMessage()
        assert record.getMessage().isprintable()

    run(gateway(FakeDecode()), scenario)


def test_lines_of_a_request_that_fails_carry_its_id(out: io.StringIO) -> None:
    async def scenario(setup: Setup) -> None:
        reply = await setup.client.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
        assert reply.status_code == 429
        lines = [json.loads(line) for line in out.getvalue().splitlines()]
        own = [line for line in lines if not line["message"].startswith("session")]
        assert own
        assert {line.get("request_id") for line in own} == {"mine"}
        (line,) = access(out)
        assert (line["status"], line["ended"]) == (429, "overloaded")
        others = [line for line in lines if line not in own]
        assert not any("request_id" in line for line in others)

    run(gateway(FakeDecode(Behaviour(error=Overloaded("full")))), scenario)


def test_what_is_polled_all_day_is_not_logged(out: io.StringIO) -> None:
    async def scenario(setup: Setup) -> None:
        for path in ("/health", "/metrics", "/ready"):
            await setup.client.get(path)
        assert access(out) == []

    run(gateway(FakeDecode()), scenario)
