"""A routing decision as one line of JSON, and the same decision taken again from that line.

The line holds what the router was told of the nodes that could have changed its mind, and what it chose. Taking it
again is running the real router over that; it needs no cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from typing import Any

import orjson

from kvferry.common.errors import BadRequest
from kvferry.common.nodes import BlockAccounts, LayoutCard, NodeLoad, NodeRecord, Role
from kvferry.services.gateway.plan import InFlight, Pace, Plan, RouteRequest, Usual
from kvferry.services.gateway.router import choose

log = logging.getLogger("kvferry.gateway")

MARK = "route "
"""What a log line's message begins with, before the JSON."""
_LOADS = (
    "num_running",
    "num_waiting",
    "num_waiting_tokens",
    "num_waiting_positions",
    "num_blocks",
    "prefill_tokens_per_s",
    "prompt_token_ms",
    "prompt_position_ms",
    "prompt_depth",
    "step_ms",
    "pull_bytes_per_s",
)


@dataclass(frozen=True, slots=True)
class Decision:
    """As it was logged, and as the router takes it now. `logged` is what the line says was chosen."""

    logged: tuple[str, tuple[str, ...]]  # decode node's instance, prefill candidates' in order
    plan: Plan

    @property
    def taken(self) -> tuple[str, tuple[str, ...]]:
        return _chosen(self.plan)

    @property
    def is_same(self) -> bool:
        return self.logged == self.taken


def log_decision(plan: Plan, http_request_id: str) -> None:
    """One line; `http_request_id` is the one that the client knows."""
    if log.isEnabledFor(logging.INFO):
        log.info("%s%s", MARK, orjson.dumps({"http_request_id": http_request_id} | to_json(plan)).decode())


def to_json(plan: Plan) -> dict[str, Any]:
    cards = list(dict.fromkeys(node.card for node in plan.seen))
    decode, prefill = _chosen(plan)
    return {
        "request_id": plan.request_id,
        "num_tokens": plan.num_tokens,
        "decode": decode,
        "prefill": prefill,
        "usual": asdict(plan.usual),
        "cards": [asdict(card) for card in cards],
        "nodes": [_node_to_json(node, cards.index(node.card)) for node in plan.seen],
        "matches": dict(plan.matches),
        "coming": dict(plan.request.coming),
        "stream_delay_weight": plan.request.stream_delay_weight,
        "in_flight": {n: list(astuple(had)) for n, had in plan.request.in_flight.items()},
    }


def decide_again(line: Mapping[str, Any]) -> Decision:
    """Raises BadRequest when the line is not one of `to_json`."""
    try:
        cards = [LayoutCard(**card) for card in line["cards"]]
        nodes = [_node_from_json(node, cards) for node in line["nodes"]]
        in_flight = {name: InFlight(*had) for name, had in line["in_flight"].items()}
        usual = Usual(**line["usual"] | {name: Pace(**line["usual"][name]) for name in ("pace", "quickest")})
        request = RouteRequest(line["request_id"], line["num_tokens"], in_flight, usual=usual, coming=line["coming"])
        request = replace(request, stream_delay_weight=line["stream_delay_weight"])
        return Decision((line["decode"], tuple(line["prefill"])), choose(request, nodes, line["matches"]))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as exc:
        raise BadRequest(f"not a routing decision: {type(exc).__name__}: {exc}") from exc


def find_decisions(lines: Iterable[str], request_id: str | None = None) -> Iterator[Mapping[str, Any]]:
    """Those in a gateway's log, text or JSON; of one request, when its id (or how it begins) is given."""
    for line in lines:
        if MARK + "{" not in line:
            continue
        try:
            text = orjson.loads(line)["message"] if line.startswith("{") else line
            found = orjson.loads(text[text.index(MARK + "{") + len(MARK) :])
        except (ValueError, KeyError, TypeError):  # the mark may stand in any line that repeats what a client wrote
            continue
        if not isinstance(found, dict):
            continue
        ids = found.get("request_id", ""), found.get("http_request_id", "")
        if request_id is None or any(name.startswith(request_id) for name in ids):
            yield found


def _chosen(plan: Plan) -> tuple[str, tuple[str, ...]]:
    return plan.decode.instance_id, tuple(candidate.instance_id for candidate in plan.prefill)


def _node_to_json(node: NodeRecord, card: int) -> dict[str, Any]:
    load = {name: value for name in _LOADS if (value := getattr(node.load, name))}
    return {
        "instance_id": node.instance_id,
        "node_id": node.node_id,
        "role": node.role.value,
        "card": card,
        "max_model_len": node.max_model_len,
        **load,
        "available": node.load.accounts.available,
    }


def _node_from_json(row: Mapping[str, Any], cards: list[LayoutCard]) -> NodeRecord:
    load = {name: row[name] for name in _LOADS if name in row}
    return NodeRecord(
        instance_id=row["instance_id"],
        node_id=row["node_id"],
        role=Role(row["role"]),
        address="",
        model="",
        card=cards[row["card"]],
        max_model_len=row["max_model_len"],
        load=NodeLoad(accounts=BlockAccounts(free=row["available"]), **load),
    )
