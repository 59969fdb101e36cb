"""The numbers of one request add up, over all metrics that tell of it."""

from __future__ import annotations

import asyncio
import time
from typing import get_args

import pytest

from kvferry.common.nodes import Role
from kvferry.common.requests import RequestTimes
from kvferry.services.gateway.plan import RouteKind, RouteRequest
from kvferry.services.gateway.router import choose
from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, eventually, gateway, run
from tests.gateway.test_router import node

IDS = list(range(40, 60))
TIMES = RequestTimes(queue_s=1.0, prefill_s=2.0, transfer_s=0.5, first_step_s=0.25)


def test_the_times_and_tokens_of_a_request_add_up() -> None:
    async def scenario(setup: Setup) -> None:
        assert (await setup.complete(IDS, max_tokens=5, n=2)).status_code == 200
        for name, count in (
            ("request_generation_tokens", 2),
            ("request_decode_time_seconds", 2),
            ("request_inference_time_seconds", 2),
            ("request_time_per_output_token_seconds", 2),
            ("request_prompt_tokens", 1),
            ("request_params_n", 1),
            ("request_params_max_tokens", 1),
            ("inter_token_latency_seconds", 8),
        ):
            assert setup.metric(f"{name}_count") == count, name
        decode_s = setup.metric("request_decode_time_seconds_sum")
        assert decode_s > 0
        assert decode_s == pytest.approx(setup.metric("inter_token_latency_seconds_sum"))
        assert setup.metric("request_time_per_output_token_seconds_sum") == pytest.approx(decode_s / 4)
        assert setup.metric("request_inference_time_seconds_sum") == pytest.approx(2 * 2.75 + decode_s)
        assert setup.metric("request_generation_tokens_sum") == setup.metric("generation_tokens_total") == 10
        assert setup.metric("request_prompt_tokens_sum") == setup.metric("prompt_tokens_total") == len(IDS)
        assert (setup.metric("request_params_n_sum"), setup.metric("request_params_max_tokens_sum")) == (2, 5)

    run(gateway(FakeDecode(Behaviour(step_s=0.01, times=TIMES))), scenario)


def test_mean_times_are_those_that_clients_measure_and_none_is_beyond_the_last_bucket() -> None:
    """The client's clock starts before the gateway's and ends after it; nearly all of the time is the node's."""
    step_s, num_requests, num_tokens = 0.25, 4, 3
    measured: dict[str, list[float]] = {"time_to_first_token": [], "inter_token_latency": [], "e2e_request_latency": []}

    async def one(setup: Setup) -> None:
        began_s = time.perf_counter()
        body = {"model": "tiny", "prompt": IDS, "max_tokens": num_tokens, "stream": True}
        times = []
        async with setup.client.stream("POST", "/v1/completions", json=body) as reply:
            async for line in reply.aiter_lines():
                if line:
                    times.append(time.perf_counter() - began_s)
        *tokens_s, ended_s = times
        assert len(tokens_s) == num_tokens, "not one event per token"
        measured["time_to_first_token"].append(tokens_s[0])
        measured["inter_token_latency"].append((tokens_s[-1] - tokens_s[0]) / (num_tokens - 1))
        measured["e2e_request_latency"].append(ended_s)

    async def scenario(setup: Setup) -> None:
        await asyncio.gather(*(one(setup) for _ in range(num_requests)))
        for name, seconds in measured.items():
            count = setup.metric(f"{name}_seconds_count")
            mean_s, own_s = setup.metric(f"{name}_seconds_sum") / count, sum(seconds) / num_requests
            assert count == num_requests * (num_tokens - 1 if name == "inter_token_latency" else 1)
            assert mean_s == pytest.approx(own_s, rel=0.2), name
        for family in setup.gateway.metrics.registry.collect():
            if family.type == "histogram":
                counts = {float(s.labels["le"]): s.value for s in family.samples if s.name.endswith("_bucket")}
                *_, last, infinite = (counts[bound] for bound in sorted(counts))
                assert last == infinite, f"{family.name}: some are beyond the last bucket"

    run(gateway(FakeDecode(Behaviour(step_s=step_s)), over_port=True), scenario)


def test_prompt_tokens_by_source_sum_to_the_prompt() -> None:
    async def scenario(setup: Setup) -> None:
        await setup.complete(IDS, max_tokens=2, n=2)
        sources = {"local_cache_hit": 4, "external_kv_transfer": 10, "local_compute": len(IDS) - 14}
        for source, num_tokens in sources.items():
            assert setup.metric("prompt_tokens_by_source_total", source=source) == num_tokens, source
        assert sum(sources.values()) == setup.metric("prompt_tokens_total")

    run(gateway(FakeDecode(Behaviour(cached_tokens=4, received_tokens=10))), scenario)


def test_each_decision_is_of_one_kind_and_each_first_token_is_held_against_its_prediction() -> None:
    decode = FakeDecode(role=Role.DECODE, max_model_len=4096)
    prefill = FakeDecode(node_id="p0", role=Role.PREFILL, max_model_len=4096)

    async def scenario(setup: Setup) -> None:
        for number in range(3):  # other prompts: this node never tells that it holds one
            assert (await setup.complete([number, *IDS * 90], max_tokens=1)).status_code == 200
        kinds = {kind: setup.metric("route_decisions_total", kind=kind) for kind in get_args(RouteKind)}
        assert kinds == {"local": 0, "remote_prefill": 3, "cached": 0}
        errors = {le: setup.metric("route_ttft_error_seconds_bucket", le=le) for le in ("-0.5", "40.0")}
        assert errors == {"-0.5": 3, "40.0": 3}  # predicted at 1,000 tokens/s: 1.8 s

    run(gateway(decode, prefill), scenario)


def test_a_first_token_that_never_came_is_held_against_no_prediction() -> None:
    async def scenario(setup: Setup) -> None:
        silent = asyncio.create_task(setup.complete(IDS, max_tokens=1))
        await eventually(lambda: setup.nodes[0].num_running == 1)
        assert setup.metric("route_ttft_error_seconds_count") == 0
        silent.cancel()
        await asyncio.gather(silent, return_exceptions=True)
        assert setup.metric("route_ttft_error_seconds_count") == 0  # none came

    run(gateway(FakeDecode(Behaviour(hang_after=0))), scenario)


@pytest.mark.parametrize(
    ("roles", "num_tokens", "matched", "kind"),
    [
        ("decode prefill", 1600, 0, "remote_prefill"),
        ("decode prefill", 1600, 20, "remote_prefill"),
        ("decode prefill", 1600, 80, "cached"),
        ("decode", 1600, 0, "local"),
        ("both", 1600, 0, "local"),
        ("both", 1600, 99, "cached"),
    ],
)
def test_the_kind_says_who_is_counted_on_for_most_of_the_prompt(
    roles: str, num_tokens: int, matched: int, kind: RouteKind
) -> None:
    nodes = [node(role, Role(role)) for role in roles.split()]
    assert choose(RouteRequest("r", num_tokens), nodes, {nodes[0].instance_id: matched}).kind == kind


def test_choices_wait_until_their_first_token_and_no_longer_than_the_request() -> None:
    async def scenario(setup: Setup) -> None:
        silent = asyncio.create_task(setup.complete(IDS, n=3))
        await eventually(lambda: setup.nodes[0].num_running == 1)
        assert (setup.metric("num_requests_running"), setup.metric("num_requests_waiting")) == (3, 3)
        setup.nodes[0].behaviour = Behaviour(hang_after=1)
        begun = asyncio.create_task(setup.complete(IDS, n=2))
        await eventually(lambda: setup.metric("generation_tokens_total") == 2)
        assert (setup.metric("num_requests_running"), setup.metric("num_requests_waiting")) == (5, 3)
        for task in (silent, begun):
            task.cancel()
        await asyncio.gather(silent, begun, return_exceptions=True)
        await eventually(lambda: setup.metric("num_requests_running") == 0)
        assert setup.metric("num_requests_waiting") == 0
        assert setup.metric("request_generation_tokens_count") == 0, "none of them has finished"

    run(gateway(FakeDecode(Behaviour(hang_after=0)), over_port=True), scenario)
