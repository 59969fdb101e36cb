"""API keys: who comes in, what each may use, and what is kept of them."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
from pathlib import Path

import openai
import pytest

from kvferry.common.errors import ConfigError
from kvferry.services.gateway.api_keys import (
    LOOK_EVERY_S,
    MAX_FILE_BYTES,
    ApiKeys,
    InvalidApiKey,
    KeyRecord,
    RateLimited,
    new_key,
)
from kvferry.services.local.cli import main
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, eventually, gateway, run
from tests.gateway.tiny_tokenizer import tiny_tokenizer

KEY, LINE = new_key("alice")
OTHER, OTHER_LINE = new_key("bob")


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_what_is_kept_of_a_key_is_its_hash() -> None:
    key, line = new_key("alice")
    assert key not in line
    assert line == f"sha256:{hashlib.sha256(key.encode()).hexdigest()} alice"
    assert ApiKeys(line).tenant(key).record.name == "alice"
    for wrong in ("", key[:-1], key + "x", line.split()[0], "é", OTHER):
        with pytest.raises(InvalidApiKey):
            ApiKeys(line).tenant(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        KEY + " alice",
        "sha256:12 alice",
        LINE.partition(" ")[0],
        LINE + " rpm=0",
        LINE + " rpm=-1",
        LINE + " rpm=many",
        LINE + " speed=5",
        f"{LINE};{LINE}",
        f"{LINE};{OTHER_LINE.partition(' ')[0]} alice",
    ],
)
def test_a_bad_line_is_refused_at_the_start_and_never_shows_a_key(line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ApiKeys(line)
    assert KEY not in caught.value.message


def test_keys_are_read_again_and_a_broken_file_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock, path = Clock(), tmp_path / "keys"

    def write(text: str) -> None:
        path.write_text(text)
        os.utime(path, (clock.now_s, clock.now_s))
        clock.now_s += LOOK_EVERY_S

    write(f"# ours\n\n{LINE} rpm=60\n")
    keys = ApiKeys("", path, clock)
    alice = keys.tenant(KEY)
    write(f"{LINE} rpm=60\n{OTHER_LINE}\n")
    assert keys.tenant(OTHER).record.name == "bob"
    assert keys.tenant(KEY) is alice  # what she has used is not forgotten
    with caplog.at_level(logging.ERROR, "kvferry.gateway"):
        write("nonsense " + KEY)
        assert keys.tenant(OTHER).record.name == "bob"
    assert "keys stay as they were" in caplog.text
    assert KEY not in caplog.text
    write(OTHER_LINE)
    with pytest.raises(InvalidApiKey):
        keys.tenant(KEY)
    path.unlink()
    clock.now_s += LOOK_EVERY_S
    assert keys.tenant(OTHER)


def test_what_is_no_file_or_far_too_large_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock, path = Clock(), tmp_path / "keys"
    path.write_text(LINE)
    keys = ApiKeys("", path, clock)

    def pipe() -> None:
        os.mkfifo(path)

    def large() -> None:
        with path.open("wb") as file:
            file.truncate(MAX_FILE_BYTES + 1)

    for make, unmake in ((pipe, path.unlink), (path.mkdir, path.rmdir), (large, path.unlink)):
        path.unlink(missing_ok=True)
        make()
        clock.now_s += LOOK_EVERY_S
        with caplog.at_level(logging.ERROR, "kvferry.gateway"):
            assert keys.tenant(KEY).record.name == "alice"
        assert "expected a file of at most" in caplog.text
        caplog.clear()
        unmake()
    pipe()
    with pytest.raises(ConfigError, match="expected a file"):
        ApiKeys("", path, clock)


def test_limits_per_minute_refill_steadily_and_say_when() -> None:
    clock = Clock()
    tenant = ApiKeys(f"{LINE} rpm=2 tpm=60", None, clock).tenant(KEY)
    for _ in range(2):
        tenant.admit()
        tenant.release(0)
    with pytest.raises(RateLimited, match="2 requests per minute") as caught:
        tenant.admit()
    assert caught.value.retry_after_s == 30
    clock.now_s += 30
    tenant.admit()
    tenant.release(90)  # more than there was: paid later
    assert tenant.headers()["x-ratelimit-remaining-tokens"] == "0"
    clock.now_s += 30
    with pytest.raises(RateLimited, match="60 tokens per minute") as caught:
        tenant.admit()
    assert caught.value.retry_after_s == 1
    clock.now_s += 1
    tenant.admit()


def test_salts_keep_keys_apart() -> None:
    own, same = KeyRecord.parse(LINE + " cache_salt=own", ""), KeyRecord.parse(OTHER_LINE + " cache_salt=own", "")
    assert own.cache_salt
    assert own.cache_salt != same.cache_salt
    team = [ApiKeys(f"{line} cache_salt=team").tenant(key) for key, line in ((KEY, LINE), (OTHER, OTHER_LINE))]
    assert team[0].salted("a") == team[1].salted("a") != team[0].salted("b")
    assert ApiKeys(LINE).tenant(KEY).salted("a") == "a"


def test_without_a_known_key_only_probes_and_metrics_are_answered() -> None:
    async def scenario(setup: Setup) -> None:
        for path in ("/", "/health", "/ready", "/ping", "/metrics"):
            assert (await setup.client.get(path)).status_code != 401, path
        for given in ({}, bearer("kvf-wrong"), {"authorization": KEY}, {"authorization": f"Basic {KEY}"}):
            for method, path in (
                ("GET", "/v1/models"),
                ("POST", "/v1/completions"),
                ("POST", "/tokenize"),
                ("POST", "/detokenize"),
                ("GET", "/cluster"),
                ("GET", "/cluster/live"),
                ("GET", "/debug/route/x"),
                ("GET", "/nowhere"),
            ):
                answer = await setup.client.request(method, path, headers=given)
                assert answer.status_code == 401, path
                error = answer.json()["error"]
                assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert answer.headers["www-authenticate"] == "Bearer"
        assert (await setup.client.get("/v1/models", headers=bearer(KEY))).status_code == 200
        client = openai.AsyncOpenAI(base_url="http://gateway/v1", api_key="wrong", http_client=setup.client)
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()
        assert [model.id async for model in client.with_options(api_key=KEY).models.list()] == ["tiny"]

    run(gateway(FakeDecode(), api_keys=LINE), scenario)


def test_a_body_of_a_stranger_is_not_read() -> None:
    async def scenario(setup: Setup) -> None:
        answer = await setup.client.post("/v1/completions", content=b"x" * 2000)
        assert answer.status_code == 401

    run(gateway(FakeDecode(), api_keys=LINE, max_body_bytes=1000), scenario)


def test_a_key_is_held_to_its_limits_and_others_are_not() -> None:
    async def scenario(setup: Setup) -> None:
        setup.client.headers.update(bearer(KEY))
        first = await setup.complete("Hello", max_tokens=4)
        assert first.status_code == 200
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        assert (await setup.client.get("/v1/models")).status_code == 200  # not counted
        assert (await setup.complete("Hello", temperature=-1)).status_code == 400  # counted
        refused = await setup.complete("Hello")
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        setup.client.headers.update(bearer(OTHER))
        assert (await setup.complete("Hello", max_tokens=4)).status_code == 200

    run(gateway(FakeDecode(), api_keys=f"{LINE} rpm=2;{OTHER_LINE}"), scenario)


def test_tokens_are_counted_when_a_request_has_ended() -> None:
    async def scenario(setup: Setup) -> None:
        setup.client.headers.update(bearer(KEY))
        answer = await setup.complete("Hello", max_tokens=20)
        used = answer.json()["usage"]["total_tokens"]
        assert used > 20
        refused = await setup.complete("Hello")
        assert refused.status_code == 429
        assert "tokens per minute" in refused.json()["error"]["message"]

    run(gateway(FakeDecode(), api_keys=f"{LINE} tpm=20"), scenario)


def test_a_refusal_costs_its_key_no_tokens() -> None:
    async def scenario(setup: Setup) -> None:
        setup.client.headers.update(bearer(KEY))
        setup.gateway.service.draining = True
        for _ in range(3):
            assert (await setup.complete("Hello", max_tokens=4)).status_code == 503
        setup.gateway.service.draining = False
        answer = await setup.complete("Hello", max_tokens=4)
        assert answer.status_code == 200, answer.text

    run(gateway(FakeDecode(), api_keys=f"{LINE} tpm=4"), scenario)


def test_an_empty_list_of_keys_lets_nobody_in() -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.complete("Hello", max_tokens=4)).status_code == 401

    run(gateway(FakeDecode(), api_keys=""), scenario)


def test_what_each_key_used_is_counted_by_name_and_nothing_is_of_strangers() -> None:
    async def scenario(setup: Setup) -> None:
        used = {}
        for key, prompt in ((KEY, "Hello"), (OTHER, [5] * 30)):
            answer = await setup.complete(prompt, max_tokens=4)
            assert answer.status_code == 401
            setup.client.headers.update(bearer(key))
            used[key] = (await setup.complete(prompt, max_tokens=4)).json()["usage"]
            setup.client.headers.update(bearer("kvf-wrong"))
        setup.client.headers.update(bearer(KEY))
        assert (await setup.complete("Hello")).status_code == 429
        for name, key, refused in (("alice", KEY, 1), ("bob", OTHER, 0)):
            counts = {
                what: setup.metric(f"api_key_{what}_total", api_key_name=name)
                for what in ("requests", "requests_refused", "prompt_tokens", "generation_tokens")
            }
            assert counts == {
                "requests": 1,
                "requests_refused": refused,
                "prompt_tokens": used[key]["prompt_tokens"],
                "generation_tokens": 4,
            }
        page = (await setup.client.get("/metrics")).text
        assert set(re.findall(r'api_key_name="([^"]*)"', page)) == {"alice", "bob", "never"}
        assert 'kvferry:api_key_requests_total{api_key_name="never"} 0.0' in page

    never = new_key("never")[1]
    run(gateway(FakeDecode(), api_keys=f"{LINE} rpm=1;{OTHER_LINE};{never}"), scenario)


def test_requests_in_flight_are_given_back_when_they_end() -> None:
    async def scenario(setup: Setup) -> None:

        setup.client.headers.update(bearer(KEY))
        running = asyncio.create_task(setup.complete("Hello", max_tokens=4))
        await eventually(lambda: bool(setup.nodes[0].submitted))
        refused = await setup.complete("Hello")
        assert refused.status_code == 429
        assert "in flight" in refused.json()["error"]["message"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        setup.nodes[0].behaviour = Behaviour()
        assert (await setup.complete("Hello", max_tokens=4)).status_code == 200

    run(gateway(FakeDecode(Behaviour(hang_after=1)), api_keys=f"{LINE} max_in_flight=1"), scenario)


def test_what_a_key_caches_is_its_own() -> None:
    async def scenario(setup: Setup) -> None:
        salts = []
        for key, salt in ((KEY, ""), (OTHER, ""), (KEY, "x"), (OTHER, "x")):
            setup.client.headers.update(bearer(key))
            assert (await setup.complete("Hello", max_tokens=1, cache_salt=salt)).status_code == 200
            salts.append(setup.nodes[0].submitted[-1].cache_salt)
        assert len(set(salts)) == 4
        assert salts[3] == "x"  # bob's line asks for nothing

    run(gateway(FakeDecode(), api_keys=f"{LINE} cache_salt=own;{OTHER_LINE}"), scenario)


def test_no_key_and_no_prompt_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(setup: Setup) -> None:
        setup.client.headers.update(bearer(KEY))
        with caplog.at_level(logging.DEBUG, "kvferry"):
            await setup.complete("a secret prompt")
            await setup.complete("a secret prompt", temperature=-1)
            await setup.client.get("/v1/models", headers=bearer("kvf-wrong"))
        assert "/v1/models 401" in caplog.text
        for secret in (KEY, LINE.split()[0].removeprefix("sha256:"), "kvf-wrong", "secret prompt"):
            assert secret not in caplog.text
            assert not any(secret in str(vars(record)) for record in caplog.records)

    run(gateway(FakeDecode(), tokenizer=tiny_tokenizer(), api_keys=LINE), scenario)


def test_prompts_are_logged_where_that_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(setup: Setup) -> None:
        with caplog.at_level(logging.INFO, "kvferry"):
            await setup.complete(["first words", "second words"], temperature=0.5, max_tokens=3)
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request prompt=")]
        assert [line.split("'")[1] for line in lines] == ["first", "secon"]
        assert all("temperature=0.5" in line for line in lines)

    run(gateway(FakeDecode(), enable_log_requests=True, max_log_len=5), scenario)


def test_web_pages_of_allowed_origins_may_ask_first_and_without_a_key() -> None:
    async def scenario(setup: Setup) -> None:
        asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        for origin, allowed in (("https://app.example", True), ("https://evil.example", False)):
            answer = await setup.client.options("/v1/completions", headers={"origin": origin, **asks})
            assert (answer.headers.get("access-control-allow-origin") == origin) == allowed
        answer = await setup.client.get("/v1/models", headers={"origin": "https://app.example", **bearer(KEY)})
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"]

    run(gateway(FakeDecode(), api_keys=LINE, allowed_origins="https://app.example"), scenario)


def test_the_command_prints_a_key_that_its_line_lets_in(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["api-key", "new", "alice"]) == 0
    shown = [line.partition(": ")[2] for line in capsys.readouterr().out.splitlines()]
    assert ApiKeys(shown[1]).tenant(shown[0]).record.name == "alice"
    assert main(["api-key", "new", "a b"]) == 2
