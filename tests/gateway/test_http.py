"""Errors in OpenAI's shape whatever the mistake, and the endpoints that operators use."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import pytest

from kvferry.common.hashing import block_names, root_name
from kvferry.common.nodes import Role
from kvferry.services.gateway import lookup
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, gateway, run
from tests.gateway.tiny_tokenizer import tiny_tokenizer


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "named"),
    [
        ("GET", "/v1/embeddings", 404, "/v1/embeddings"),
        ("POST", "/v1/responses", 404, "/v1/responses"),
        ("GET", "/v1/completions", 405, "GET"),
        ("DELETE", "/v1/models", 405, "DELETE"),
        ("GET", "/v1/models/other", 404, "other"),
        ("GET", "/debug/route/nobody", 404, "nobody"),
    ],
)
def test_paths_and_methods_that_are_not_there(method: str, path: str, status: int, named: str) -> None:
    async def scenario(setup: Setup) -> None:
        assert named in error_of(await setup.client.request(method, path), status)["message"]

    run(gateway(FakeDecode()), scenario)


@pytest.mark.parametrize("stream", [False, True])
def test_mistakes_are_found_before_anything_is_sent(stream: bool) -> None:
    async def scenario(setup: Setup) -> None:
        complete, chat = setup.complete, setup.chat
        long = "fox " * 600
        for ask, fields, status, param in (
            (complete, {"model": "other"}, 404, "model"),
            (chat, {"model": "other"}, 404, "model"),
            (complete, {"temperature": -1}, 400, "temperature"),
            (complete, {"prompt": [512]}, 400, "prompt"),
            (complete, {"prompt": [[1], [-1]]}, 400, "prompt"),
            (complete, {"prompt": [2**63]}, 400, "prompt"),
            (complete, {"prompt": ""}, 400, "prompt"),
            (complete, {"prompt": ["x", ""]}, 400, "prompt"),
            (complete, {"logit_bias": {"512": 1}}, 400, "logit_bias"),
            (complete, {"logit_bias": {"-1": 1}}, 400, "logit_bias"),
            (complete, {"stop_token_ids": [999_999_999]}, 400, "stop_token_ids"),
            (complete, {"min_tokens": 20}, 400, "min_tokens"),
            (complete, {"prompt": long}, 400, "prompt"),
            (complete, {"max_tokens": 512}, 400, "max_tokens"),
            (chat, {"messages": [{"role": "user", "content": long}]}, 400, "messages"),
            (chat, {"messages": [{"role": "user", "content": "x" * 2_000_000}]}, 400, "messages"),
            (chat, {"max_tokens": 512}, 400, "max_tokens"),
        ):
            error = error_of(await ask(**fields, stream=stream), status)
            assert error["param"] == param, (fields, error)
            if error["code"] == "context_length_exceeded":
                assert "512" in error["message"]
        assert setup.nodes[0].submitted == []

    run(gateway(FakeDecode()), scenario)


def test_what_is_left_of_the_context_limits_the_default() -> None:
    async def scenario(setup: Setup) -> None:
        await setup.complete([20] * 505)
        await setup.complete([20] * 500, max_tokens=12)
        assert [request.sampling.max_tokens for request in setup.nodes[0].submitted] == [7, 12]

    run(gateway(FakeDecode()), scenario)


def test_a_body_that_is_too_large_is_refused_whether_it_says_so_or_not() -> None:
    async def scenario(setup: Setup) -> None:
        async def undeclared() -> Any:
            for _ in range(30):
                yield b"x" * 1000

        declared = await setup.client.post("/v1/completions", content=b"x" * 20_000)
        assert error_of(declared, 413)["code"] == "body_too_large"
        assert error_of(await setup.client.post("/v1/completions", content=undeclared()), 413)

    run(gateway(FakeDecode(), max_body_bytes=10_000, over_port=True), scenario)


def test_malformed_json_and_the_wrong_content_type() -> None:
    async def scenario(setup: Setup) -> None:
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            error_of(await setup.client.post(path, content=b'{"prompt": '), 400)
        plain = {"content-type": "text/plain"}
        body = json.dumps({"prompt": "x", "max_tokens": 1}).encode()
        assert (await setup.client.post("/v1/completions", content=body, headers=plain)).status_code == 200

    run(gateway(FakeDecode()), scenario)


def test_a_bug_is_an_error_without_a_trace() -> None:
    async def scenario(setup: Setup) -> None:
        def explode(*_: Any, **__: Any) -> Any:
            raise ZeroDivisionError("secret detail")

        setup.gateway.service.plan = explode  # type: ignore[method-assign]
        error = error_of(await setup.complete("x"), 500)
        assert "secret" not in error["message"]

    run(gateway(FakeDecode()), scenario)


def test_request_ids_go_in_and_out_and_explain_the_route() -> None:
    async def scenario(setup: Setup) -> None:
        response = await setup.client.post(
            "/v1/completions", json={"prompt": "x", "max_tokens": 1}, headers={"x-request-id": "mine-1"}
        )
        assert response.headers["x-request-id"] == "mine-1"
        for name in ("mine-1", response.json()["id"]):
            (plan,) = (await setup.client.get(f"/debug/route/{name}")).json()["plans"]
            assert plan["decode"] == "d0"
            assert plan["decode_candidates"][0]["instance_id"] == setup.nodes[0].instance_id
        odd = await setup.client.get("/health", headers={"x-request-id": "two words"})
        assert odd.headers["x-request-id"] != "two words"
        twice = [setup.complete("x", max_tokens=1) for _ in range(2)]
        first, second = await asyncio.gather(*twice)
        assert first.headers["x-request-id"] != second.headers["x-request-id"]

    run(gateway(FakeDecode()), scenario)


def test_two_requests_with_one_id_do_not_mix() -> None:
    async def scenario(setup: Setup) -> None:
        async def ask(prompt: str) -> str:
            fields = {"prompt": prompt, "max_tokens": len(tiny_tokenizer().encode(prompt))}
            response = await setup.client.post("/v1/completions", json=fields, headers={"x-request-id": "same"})
            text: str = response.json()["choices"][0]["text"]
            return text

        prompts = [f"{n} quick fox" for n in range(8)]
        assert await asyncio.gather(*map(ask, prompts)) == prompts

    run(gateway(FakeDecode(Behaviour(step_s=0.002))), scenario)


def test_a_cached_prefix_is_found_and_decides() -> None:
    async def scenario(setup: Setup) -> None:
        ids = [20 + n % 100 for n in range(100)]
        warm = setup.nodes[1]
        names = block_names(root_name("fake-model", "fake-numerics", "tenant"), ids, 16)
        await setup.index.store(warm.instance_id, names)
        for _ in range(5):
            response = await setup.complete(ids, max_tokens=1, cache_salt="tenant")
            assert response.headers["x-kvferry-route"].startswith("decode=d1 prefill=none matched=6 ")
        assert [request.cache_salt for request in warm.submitted] == ["tenant"] * 5
        assert setup.metric("index_lookups_total") == 5

    run(gateway(FakeDecode(), FakeDecode(node_id="d1")), scenario)


def test_a_hanging_index_does_not_hold_requests_up() -> None:
    async def scenario(setup: Setup) -> None:
        async def hang(names: Sequence[bytes]) -> dict[str, int]:
            await asyncio.Event().wait()
            return {}

        setup.index.match = hang  # type: ignore[method-assign]
        responses = await asyncio.gather(*(setup.complete([20] * 64, max_tokens=1) for _ in range(10)))
        assert {response.status_code for response in responses} == {200}
        assert max(response.elapsed.total_seconds() for response in responses) < 1
        assert setup.metric("index_lookup_failures_total") >= 1

    run(gateway(FakeDecode()), scenario)


def test_models() -> None:
    async def scenario(setup: Setup) -> None:
        listed = (await setup.client.get("/v1/models")).json()
        assert listed["object"] == "list"
        (card,) = listed["data"]
        assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 512)
        assert (await setup.client.get("/v1/models/tiny")).json() == card

    run(gateway(FakeDecode()), scenario)


def test_tokenize_and_detokenize() -> None:
    async def scenario(setup: Setup) -> None:
        post = setup.client.post
        ids = tiny_tokenizer().encode("Hello 🙂")
        body = (await post("/tokenize", json={"prompt": "Hello 🙂", "return_token_strs": True})).json()
        assert (body["tokens"], body["count"], body["max_model_len"]) == (ids, len(ids), 512)
        assert body["token_strs"][0] == tiny_tokenizer().token_text(ids[0])
        assert (await post("/detokenize", json={"tokens": ids})).json() == {"prompt": "Hello 🙂"}
        messages = [{"role": "user", "content": "Hi"}]
        chat = (await post("/tokenize", json={"messages": messages})).json()
        assert tiny_tokenizer().decode(chat["tokens"]).endswith("<|im_start|>assistant\n")
        await setup.chat("Hi", max_tokens=1)
        assert list(setup.nodes[0].submitted[0].prompt_token_ids) == chat["tokens"]
        error_of(await post("/detokenize", json={"tokens": [512]}), 400)
        error_of(await post("/tokenize", json={"prompt": "x", "model": "other"}), 404)

    run(gateway(FakeDecode()), scenario)


def test_ready_means_that_a_decode_node_is() -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.client.get("/health")).status_code == 200
        error_of(await setup.client.get("/ready"), 503)
        async with FakeDecode(node_id="d0") as node:
            await setup.announce(node)
            await asyncio.sleep(0.15)
            await setup.gateway.table.refresh()
            assert (await setup.client.get("/ready")).status_code == 200

    run(gateway(FakeDecode(node_id="p0", role=Role.PREFILL)), scenario)


def test_cluster_asks_the_nodes_and_falls_back_to_their_records() -> None:
    async def scenario(setup: Setup) -> None:
        await setup.complete("x", max_tokens=1)
        state = (await setup.client.get("/cluster")).json()
        assert [(node["node_id"], node["live"]) for node in state["nodes"]] == [("d0", True), ("p0", True)]
        assert state["sessions"][0]["connected"]
        assert state["index"] == {"ok": True}
        await setup.nodes[1].stop()
        setup.nodes[0].instance_id = "another one behind the address"
        state = (await setup.client.get("/cluster")).json()
        assert [(node["node_id"], node["live"]) for node in state["nodes"]] == [("d0", False), ("p0", False)]

    run(gateway(FakeDecode(), FakeDecode(node_id="p0", role=Role.PREFILL)), scenario)


def test_metrics_count_what_happened() -> None:
    async def scenario(setup: Setup) -> None:
        await setup.complete("Hello world", max_tokens=4, n=2)
        text = (await setup.client.get("/metrics")).text
        for line in (
            'kvferry:request_success_total{finished_reason="length"} 2.0',
            'kvferry:request_success_total{finished_reason="abort"} 0.0',
            "kvferry:generation_tokens_total 8.0",
            "kvferry:prompt_tokens_cached_total 2.0",
            "kvferry:num_requests_running 0.0",
            "kvferry:time_to_first_token_seconds_count 1.0",
            "kvferry:e2e_request_latency_seconds_count 1.0",
            "kvferry:inter_token_latency_seconds_count 6.0",
            "kvferry:index_up 1.0",
        ):
            assert line in text.splitlines()
        assert (await setup.client.get("/version")).json()["version"]

    run(gateway(FakeDecode(Behaviour(cached_tokens=2))), scenario)


def test_many_tokens_are_turned_into_text_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    threads: list[bool] = []
    decode = tokenizer.decode

    def spy(token_ids: Sequence[int]) -> str:
        threads.append(threading.current_thread() is threading.main_thread())
        return decode(token_ids)

    monkeypatch.setattr(tokenizer, "decode", spy)

    async def scenario(setup: Setup) -> None:
        for num_tokens in (10, 10_000):
            assert (await setup.client.post("/detokenize", json={"tokens": [5] * num_tokens})).status_code == 200
        refused = await setup.client.post("/detokenize", json={"tokens": [5] * 10_000 + [10**6]})
        assert error_of(refused, 400)["param"] == "tokens"
        assert threads == [True, False]

    run(gateway(FakeDecode(), tokenizer=tokenizer), scenario)


def test_long_texts_are_tokenised_and_named_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    threads: dict[str, list[bool]] = {"encode": [], "block_names": []}

    def spied(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def spy(*args: Any, **how: Any) -> Any:
            threads[name].append(threading.current_thread() is threading.main_thread())
            return work(*args, **how)

        return spy

    monkeypatch.setattr(tokenizer, "encode", spied("encode", tokenizer.encode))
    monkeypatch.setattr(lookup, "block_names", spied("block_names", lookup.block_names))

    async def scenario(setup: Setup) -> None:
        long = "hello world fox " * 40_000
        asked = [
            asyncio.create_task(ask)
            for ask in (setup.complete(long), setup.chat(long, max_tokens=1), setup.complete("short"))
        ]
        assert [reply.status_code for reply in await asyncio.gather(*asked)] == [200] * 3
        assert [sorted(found) for found in threads.values()] == [[False, False, True]] * 2

    run(gateway(FakeDecode(max_model_len=1_000_000), max_body_bytes=2**21), scenario)
