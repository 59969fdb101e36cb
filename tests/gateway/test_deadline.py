"""A deadline passes when it should, and only the one set last."""

from __future__ import annotations

import asyncio

from kvferry.services.gateway.deadline import Deadline


def passes(*moves: tuple[float, float | None], close_after_s: float | None = None) -> list[float]:
    """Sets the deadline at the given times (seconds from the start) and says when it passed, to 50 ms."""

    async def scenario() -> list[float]:
        loop = asyncio.get_running_loop()
        started, passed = loop.time(), []
        deadline = Deadline(lambda: passed.append(round((loop.time() - started) * 20) / 20))
        for at, seconds in moves:
            await asyncio.sleep(started + at - loop.time())
            deadline.set(seconds)
        if close_after_s is not None:
            await asyncio.sleep(close_after_s)
            deadline.close()
        await asyncio.sleep(started + 0.8 - loop.time())
        deadline.close()
        return passed

    return asyncio.run(scenario())


def test_it_passes_once() -> None:
    assert passes((0.0, 0.2)) in ([0.2], [0.25])


def test_moved_later_it_does_not_pass_early() -> None:
    assert passes((0.0, 0.1), (0.05, 0.4)) in ([0.45], [0.5])


def test_moved_earlier_it_passes_earlier() -> None:
    assert passes((0.0, 10.0), (0.05, 0.1)) in ([0.15], [0.2])


def test_taken_away_or_closed_it_never_passes() -> None:
    assert passes((0.0, 0.1), (0.05, None)) == []
    assert passes((0.0, 0.1), close_after_s=0.05) == []


def test_set_again_after_being_taken_away_it_passes() -> None:
    assert passes((0.0, 0.1), (0.05, None), (0.3, 0.2)) in ([0.5], [0.55])
