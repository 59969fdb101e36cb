"""Visits every state that a small instance of the hand-over can reach, and checks the promises in each.

python -m tests.transfer.explore            what the tests visit, one line for each instance
"""

from __future__ import annotations

import time
from collections import Counter, deque
from dataclasses import dataclass

from tests.transfer.small_world import Action, Budgets, World
from tests.transfer.snapshots import clone, fingerprint

INSTANCES: dict[str, tuple[int, Budgets, bool]] = {
    "one prompt, a cancel, a crash, a message lost or late, a block reused": (
        1,
        Budgets(drop=1, renew=1, reuse=1),
        False,
    ),
    "one prompt, a cancel, a crash, a message repeated, a block reused": (1, Budgets(duplicate=1, reuse=1), False),
    "two prompts that exceed the owner's pool": (2, Budgets(cancel=0, crash=0), False),
    "cached blocks, a message lost or late, some evicted, their lease revoked, a block reused": (
        1,
        Budgets(drop=1, renew=1, reuse=1, evict=1, revoke=1),
        True,
    ),
    "cached blocks, a message repeated, some evicted, their lease revoked, a block reused": (
        1,
        Budgets(duplicate=1, reuse=1, evict=1, revoke=1),
        True,
    ),
}
"""Two nodes of three blocks each; a prompt has two."""


@dataclass
class Explored:
    num_states: int
    num_steps: int
    num_over: int
    longest: int
    seconds: float
    actions: Counter[str]

    def __str__(self) -> str:
        return (
            f"{self.num_states} states, {self.num_steps} steps, {self.num_over} ends, "
            f"at most {self.longest} steps away, {self.seconds:.1f} s"
        )


def explore(num_prompts: int, budgets: Budgets, cached: bool = False) -> Explored:
    """Breadth first, so that a failure is shown with one of its shortest histories."""
    started, first = time.perf_counter(), World(num_prompts, budgets, cached)
    origin: dict[object, tuple[object, Action] | None] = {fingerprint(first): None}
    todo: deque[tuple[World, object, int]] = deque([(first, fingerprint(first), 0)])
    before: dict[object, set[object]] = {}
    over: list[object] = []
    steps, longest = Counter[str](), 0
    while todo:
        world, here, depth = todo.popleft()
        longest = depth
        if world.is_over:
            over.append(here)
        for action in list(world.actions()):
            after = clone(world)
            steps[action[0]] += 1
            try:
                after.take(action)
                after.check()
            except Exception as exc:
                raise AssertionError(f"{exc!r} after {[*_history(origin, here), action]}") from exc
            there = fingerprint(after)
            before.setdefault(there, set()).add(here)
            if there not in origin:
                origin[there] = here, action
                todo.append((after, there, depth + 1))
    _check_that_all_can_end(origin, before, over)
    seconds = time.perf_counter() - started
    return Explored(len(origin), steps.total(), len(over), longest, seconds, steps)


def _check_that_all_can_end(
    origin: dict[object, tuple[object, Action] | None], before: dict[object, set[object]], over: list[object]
) -> None:
    """From every state some way leads to an end in which nothing is owned by anybody."""
    seen, todo = set(over), list(over)
    while todo:
        for state in before.get(todo.pop(), set()) - seen:
            seen.add(state)
            todo.append(state)
    stuck = next((state for state in origin if state not in seen), None)
    assert stuck is None, f"no way out after {list(_history(origin, stuck))}"


def _history(origin: dict[object, tuple[object, Action] | None], state: object) -> list[Action]:
    actions: list[Action] = []
    while (came := origin[state]) is not None:
        state, action = came
        actions.insert(0, action)
    return actions


def main() -> None:
    for name, instance in INSTANCES.items():
        found = explore(*instance)
        print(f"{name}: {found}")


if __name__ == "__main__":
    main()
