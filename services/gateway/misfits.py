"""Prefill nodes whose blocks mean nothing to decode nodes, and why: the router passes them over without a word."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvferry.common.errors import LayoutMismatch
from kvferry.common.nodes import LayoutCard, NodeRecord, Role


@dataclass(frozen=True, slots=True)
class Misfit:
    """Node ids, those of one layout on either side. `why` names what differs, and both values."""

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    why: str

    @property
    def title(self) -> str:
        return f"{_these(self.prefill)} can give no blocks to {_these(self.decode)}"

    @property
    def detail(self) -> str:
        return f"{self.decode[0]} would refuse them: {self.why}."


def find_misfits(nodes: Iterable[NodeRecord]) -> list[Misfit]:
    """One for each pair of layouts, whatever the number of nodes."""
    by_card: dict[Role, dict[LayoutCard, list[str]]] = {role: {} for role in Role}
    for node in sorted(nodes, key=lambda node: node.node_id):
        by_card[node.role].setdefault(node.card, []).append(node.node_id)
    found = []
    for decode, takers in by_card[Role.DECODE].items():
        for prefill, givers in by_card[Role.PREFILL].items():
            if decode != prefill:
                try:
                    decode.check_gives(prefill, givers[0])
                except LayoutMismatch as exc:
                    found.append(Misfit(tuple(givers), tuple(takers), exc.message))
    return found


def _these(names: Sequence[str]) -> str:
    others = len(names) - 1
    return names[0] if not others else f"{names[0]} and {others} other{'s' * (others > 1)}"
