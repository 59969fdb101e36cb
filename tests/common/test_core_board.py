"""Cores that nodes lend each other. Rows are claimed by locks of processes, so every other node here is one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.common import core_board
from kvferry.common.core_board import CoreBoard
from kvferry.common.errors import ConfigError

NODE = """
import sys
from pathlib import Path
from kvferry.common import core_board
core_board._LINGER_NS = 0
from kvferry.common.core_board import CoreBoard
board = CoreBoard(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
for line in sys.stdin:
    print(eval(line), flush=True)
"""


class Other:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def do(self, what: str) -> str:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@contextlib.contextmanager
def other(path: Path, share: int, num_cores: int) -> Iterator[Other]:
    command = [sys.executable, "-c", NODE, str(path), str(share), str(num_cores)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Other(process)
        finally:
            process.kill()


@pytest.fixture(autouse=True)
def without_lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_board, "_LINGER_NS", 0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cores"


def test_a_node_has_all_cores_while_the_others_compute_nothing(path: Path) -> None:
    mine = CoreBoard(path, 3, 8)
    with other(path, 5, 8) as theirs:
        assert theirs.do("board.begin()") == "8"
        assert mine.begin() == 3
        assert theirs.do("board.begin()") == "5"
        theirs.do("board.idle()")
        assert mine.begin() == 8
        mine.idle()
        assert theirs.do("board.begin()") == "8"
    mine.close()


def test_who_has_just_computed_keeps_its_cores_for_a_moment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, now = CoreBoard(path, 1, 2), core_board.time.monotonic_ns()
    with other(path, 1, 2) as theirs:
        theirs.do(f"setattr(core_board, '_LINGER_NS', {10**12})")
        theirs.do("board.begin()")
        theirs.do("board.idle()")
        assert mine.begin() == 1
        monkeypatch.setattr(core_board.time, "monotonic_ns", lambda: now + 2 * 10**12)
        theirs.do("board.idle()")  # once more: nothing new
        assert mine.begin() == 2
    mine.close()


def test_each_keeps_its_share_where_there_are_more_nodes_than_cores(path: Path) -> None:
    mine = CoreBoard(path, 1, 2)
    with other(path, 1, 2) as second, other(path, 1, 2) as third:
        assert [node.do("board.begin()") for node in (second, third)] == ["2", "1"]
        assert mine.begin() == 1
        second.do("board.idle()")
        assert mine.begin() == 1
        third.do("board.idle()")
        assert mine.begin() == 2
    mine.close()


@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_who_died_or_stands_still_computes_nothing(
    path: Path, kind: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = CoreBoard(path, 1, 2)
    with other(path, 1, 2) as theirs:
        theirs.do("board.begin()")
        assert mine.begin() == 1
        os.kill(theirs.process.pid, kind)
        later = core_board.time.monotonic_ns() + core_board._SILENT_NS
        monkeypatch.setattr(core_board.time, "monotonic_ns", lambda: later)
        assert mine.begin() == 2
    mine.close()


def test_the_row_of_a_dead_one_is_used_again(path: Path) -> None:
    with other(path, 1, 2) as first:
        assert first.do("board._row") == "0"
    with other(path, 1, 2) as second, other(path, 1, 2) as third:
        assert {node.do("board._row") for node in (second, third)} == {"0", "1"}


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"core_board .*nowhere/cores: No such file"):
        CoreBoard(tmp_path / "nowhere" / "cores", 1, 2)
