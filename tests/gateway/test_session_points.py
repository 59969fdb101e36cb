"""What is lost or repeated between gateway and decode node, by the fail points of a session."""

from __future__ import annotations

import pytest

from tests.gateway.fake_decode import Behaviour, FakeDecode
from tests.gateway.harness import Setup, eventually, gateway, run

PROMPT = [5, 6, 7]


def test_a_request_that_never_reaches_its_node_is_one_error_when_its_time_is_over() -> None:
    async def scenario(setup: Setup) -> None:
        lost = await setup.complete(PROMPT, max_tokens=2)
        assert (lost.status_code, lost.json()["error"]["code"]) == (504, "deadline_exceeded")
        assert setup.nodes[0].submitted == []
        assert setup.metric("fail_point_hits_total", point="rpc.session.submit", action="drop") == 1
        assert (await setup.complete(PROMPT, max_tokens=2)).status_code == 200
        assert len(setup.nodes[0].submitted) == 1

    run(gateway(FakeDecode(), fail_points="rpc.session.submit=drop@1", queue_timeout=0.3), scenario)


@pytest.mark.parametrize(("rule", "num_heard"), [("drop:1", 0), ("duplicate:1", 2), ("delay:1:20", 1)])
def test_a_cancel_that_is_lost_repeated_or_late_leaves_nothing_at_the_gateway(rule: str, num_heard: int) -> None:
    """Nor is what the node still sends heard by anybody."""

    async def scenario(setup: Setup) -> None:
        (node,) = setup.nodes
        reply = await setup.complete("The quick brown fox", max_tokens=100, stop=["brown"])
        assert reply.json()["choices"][0]["text"] == "The quick "
        await eventually(lambda: node.num_running == 0 and len(node.cancelled) == num_heard)
        assert (await setup.complete(PROMPT, max_tokens=2)).status_code == 200
        assert len(node.cancelled) == num_heard

    run(gateway(FakeDecode(Behaviour(step_s=0.002)), fail_points=f"rpc.session.cancel={rule}"), scenario)
