"""A prefill node with a shorter context than the decode node that asks it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.transfer import sim
from tests.transfer.fleet import Fleet, chat

PROMPT = chat(5, 60)


@pytest.mark.parametrize("limit", [len(PROMPT) - 1, len(PROMPT)])
def test_a_prefill_node_computes_no_prompt_beyond_its_own_context(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(sim, "COPIES_WAIT", True)
    fleet = Fleet(1, 1, 40)
    node = fleet.p[0].service._node
    node.loaded = replace(node.loaded, max_model_len=limit)
    if limit >= len(PROMPT):
        assert fleet.answer("fits", PROMPT, fleet.d[0], by=fleet.p[0]).prefilled_by == fleet.p[0].instance
    else:
        fleet.submit("long", PROMPT, fleet.d[0], by=fleet.p[0])
        while "long" not in fleet.ended:
            fleet.go_on()
        output = fleet.first["long"]
        assert (output.error_code, output.token_ids) == ("context_length_exceeded", ())
        assert output.error_message == "the prompt has 60 tokens; the context of prefill node p0 is 59"
        assert fleet.p[0].runner.num_tokens == fleet.d[0].runner.num_tokens == 0
    fleet.go_on(3)
    fleet.check_clean()
    fleet.close()
