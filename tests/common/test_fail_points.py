"""Fail points: what they refuse, that they can be replayed, and that they cost nothing while they are off."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from kvferry.common.errors import ConfigError
from kvferry.common.fail_points import POINTS, Action, FailPoints, spoilt


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("transfer.grpc.chunks=drop:0.1", r"unknown fail point .*did you mean 'transfer.grpc.chunk'"),
        ("index.lookup=dorp:0.1", r"no action 'dorp' \(did you mean 'drop'\?\); it has "),
        ("transfer.shm.copy=drop:0.1", r"no action 'drop'"),
        ("index.lookup=drop", "expected point=action:probability"),
        ("index.lookup=drop:1.5", "must lie above 0 and be at most 1"),
        ("index.lookup=drop:0", "must lie above 0 and be at most 1"),
        ("index.lookup", "expected point=action:probability"),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused_with_what_would(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        FailPoints(spec)


def _drawn(seed: int, spec: str, num: int = 200) -> list[str]:
    points = FailPoints(spec, seed)
    return [fault.action.value if (fault := points.hit("rpc.prefill.reply")) else "" for _ in range(num)]


def test_the_same_seed_goes_wrong_in_the_same_way_whatever_other_points_do() -> None:
    spec = "rpc.prefill.reply=drop:0.2, rpc.prefill.reply=duplicate:0.2"
    alone = _drawn(7, spec)
    assert {"", "drop", "duplicate"} == set(alone)
    assert _drawn(7, f"index.lookup=drop:0.5,{spec}") == alone
    assert _drawn(8, spec) != alone


def test_a_fault_at_the_nth_passage_happens_there_and_once() -> None:
    assert [i for i, what in enumerate(_drawn(0, "rpc.prefill.reply=drop@5"), 1) if what] == [5]


def test_a_fault_at_the_nth_passage_comes_before_the_dice_and_does_not_disturb_them() -> None:
    dice = "rpc.prefill.reply=delay:0.9:1"
    with_one = _drawn(3, f"{dice},rpc.prefill.reply=drop@7")
    without = _drawn(3, dice)
    assert with_one[6] == "drop"
    assert with_one[:6] + with_one[7:] == without[:6] + without[7:]


def test_what_was_done_is_counted() -> None:
    points = FailPoints("index.lookup=drop@1,index.lookup=delay@2:1,index.publish=drop:1")
    assert [asyncio.run(points.copies("index.lookup")) for _ in range(3)] == [0, 1, 1]
    assert points.hits == {("index.lookup", "drop"): 1, ("index.lookup", "delay"): 1}


def test_a_repeated_message_is_sent_twice_and_a_delayed_one_later() -> None:
    points = FailPoints("transfer.lease.renew=duplicate@1,transfer.lease.renew=delay@2:40")
    assert asyncio.run(points.copies("transfer.lease.renew")) == 2
    started = time.monotonic()
    assert asyncio.run(points.copies("transfer.lease.renew")) == 1
    assert time.monotonic() - started >= 0.04


def test_spoilt_bytes_differ_in_one_place() -> None:
    data = bytes(range(256))
    assert sum(a != b for a, b in zip(data, spoilt(data), strict=True)) == 1


def test_a_kill_ends_the_process_at_once() -> None:
    script = (
        "from kvferry.common.fail_points import FailPoints\n"
        "points = FailPoints('rpc.prefill.start=kill@3')\n"
        "for i in range(9): points.hit('rpc.prefill.start'); print(i, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert done.stdout.split() == ["0", "1"]


def test_points_that_are_off_neither_lock_nor_count() -> None:
    points = FailPoints()
    points._lock = None  # type: ignore[assignment]  # whoever takes it fails
    assert points.hit("transfer.grpc.chunk") is None
    assert not points.are_on
    assert not points.hits


def test_every_point_has_an_action_and_is_wired_somewhere() -> None:
    """A name in the table that no code passes would be a drill that never happens."""
    from pathlib import Path

    source = "".join(path.read_text() for path in (Path(__file__).parents[2] / "services").rglob("*.py"))
    for point, actions in POINTS.items():
        assert actions <= set(Action)
        assert actions
        assert f'"{point}"' in source, f"{point} is passed nowhere"
