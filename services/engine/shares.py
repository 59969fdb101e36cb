"""How prompts share a step: plain numbers, so that a simulated node shares as a real one does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def share_out(dues: Sequence[int], num_startable: int, budget: int, most: int = 0) -> list[int]:
    """Tokens of `budget` for each running prompt, in order, of which so many are still to be computed.

    Each leaves half of what it finds, as far as there is use for it: to those after it, and to `num_startable` tokens
    of others. `most`: what a prompt takes of a step at the most; 0: all.
    """
    behind, counts = sum(dues) + num_startable, []
    for due in dues:
        behind -= due
        counts.append(min(due, budget - min(budget // 2, behind), most or budget))
        budget -= counts[-1]
    return counts


def num_startable(dues: Iterable[int], budget: int) -> int:
    """Tokens that could begin beside running prompts, of those that would be next: of each that half of `budget`
    finishes. Of two long ones, one after the other is sooner done in the mean than both side by side."""
    return sum(max(due, 1) for due in dues if due <= budget // 2)


def goes_first(received_due: int, budget: int, came_first: bool) -> bool:
    """Whether one that has received its blocks begins before the first in the queue, where both could. It owns blocks
    and mostly has next to nothing to compute; but where `budget` does not finish it, it passes nobody who `came_first`.
    """
    return received_due <= budget or not came_first
