"""`kvferry explain`: takes logged routing decisions again, with the real router, and shows what they were made of."""

from __future__ import annotations

import sys
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from kvferry.common.errors import ConfigError, Unavailable
from kvferry.services.local.access import DEFAULT_URL, Access, no_answer

if TYPE_CHECKING:
    from kvferry.services.gateway.decision import Decision  # the gateway's packages, only when the command runs
    from kvferry.services.gateway.plan import Candidate

NUM_SHOWN = 8
HTTP_TIMEOUT_S = 5.0
_TERMS = ("queue", "compute", "transfer", "step", "pressure")


def main(what: str, *, request_id: str | None = None, access: Access | None = None) -> int:
    """0 when each decision follows again from its line, 1 when one does not. Raises ConfigError where there is none."""
    from kvferry.services.gateway.decision import decide_again, find_decisions

    if what == "-":
        lines = list(find_decisions(sys.stdin, request_id))
    elif Path(what).is_file():
        with Path(what).open(encoding="utf-8", errors="replace") as file:
            lines = list(find_decisions(file, request_id))
    else:
        lines = _ask(access or Access(DEFAULT_URL), what)
    if not lines:
        raise ConfigError(f"{what}: no routing decision{f' of {request_id}' if request_id else ''} in it")
    decisions = [decide_again(line) for line in lines]
    print("\n\n".join(describe(decision) for decision in decisions))
    return int(not all(decision.is_same for decision in decisions))


def _ask(access: Access, request_id: str) -> list[Mapping[str, Any]]:
    path = f"/debug/route/{urllib.parse.quote(request_id, safe='')}"
    try:
        with access.client(HTTP_TIMEOUT_S) as client:
            answer = client.get(path)
            if answer.status_code == httpx.codes.NOT_FOUND:
                raise ConfigError(f"{request_id} is no file, and {access.url} knows no recent request of that id")
            return [plan["decision"] for plan in answer.raise_for_status().json()["plans"]]
    except (httpx.HTTPError, ValueError, LookupError) as exc:
        problem = no_answer(access, exc)
        if isinstance(problem, Unavailable):
            raise ConfigError(f"{request_id} is no file, and {access.url} does not answer: {exc}") from exc
        raise problem from exc


def describe(decision: Decision) -> str:
    """What was chosen, whether the router chooses it again, and both rounds' candidates with their terms."""
    plan = decision.plan
    name = {node.instance_id: node.node_id for node in plan.seen}

    def spoken(chosen: tuple[str, tuple[str, ...]]) -> str:
        decode, prefill = chosen
        by = ", ".join(name.get(p, p) for p in prefill) or "none: the decode node computes"
        return f"decode {name.get(decode, decode)}, prefill {by}"

    verdict = "the same again" if decision.is_same else f"NOT THE SAME AGAIN: {spoken(decision.taken)}"
    return "\n".join(
        [
            f"{plan.request_id}: {plan.num_tokens} prompt tokens, first token predicted in {plan.ttft_ms:.0f} ms",
            f"chosen: {spoken(decision.logged)} ({verdict})",
            *_table("decode", plan.decode_candidates, name),
            *_table("prefill", plan.prefill_candidates, name),
        ]
    )


def _table(title: str, candidates: Sequence[Candidate], name: Mapping[str, str]) -> Iterable[str]:
    if not candidates:
        return
    width = max(len(title), *(len(c.node_id) for c in candidates))
    heads = "".join(f"{term:>10}" for term in (*_TERMS, "total ms"))
    yield f"{title:<{width}}{'matched':>9}{'computes':>10}{heads}  computed by"
    for c in candidates[:NUM_SHOWN]:
        terms = "".join(f"{ms:>10.1f}" for ms in (*astuple(c.cost), c.cost.total_ms))
        by = name.get(c.computed_by, c.computed_by)
        yield f"{c.node_id:<{width}}{c.matched_blocks:>9}{c.num_uncached:>10}{terms}  {by}"
    if len(candidates) > NUM_SHOWN:
        yield f"and {len(candidates) - NUM_SHOWN} more"
