from __future__ import annotations

import io

import pytest

from kvferry.services.local.console import Console
from kvferry.services.local.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Gone(Terminal):
    def write(self, _: str) -> int:
        raise BrokenPipeError


def test_on_a_terminal_a_bar_moves_in_one_line(monkeypatch):
    monkeypatch.setattr("kvferry.services.local.progress.REDRAW_S", 0)
    out = Terminal()
    with Progress("converting", out) as bar:
        bar(0.5)
        bar(1.0)
    assert out.getvalue().count("\n") == 1
    assert out.getvalue().split("\r")[2:] == [
        "converting [###############               ]  50%",
        "converting [##############################] 100%\n",
    ]


def test_elsewhere_a_few_plain_lines_are_written():
    out = io.StringIO()
    with Progress("converting", out) as bar:
        for step in range(101):
            bar(step / 100)
    assert out.getvalue() == "".join(f"converting: {share}%\n" for share in (0, 25, 50, 75, 100))


@pytest.mark.parametrize("no_color", [False, True])
def test_the_console_colours_names_only_where_that_is_wanted(monkeypatch, no_color):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    out = Terminal()
    Console(out).log("decode-0", "hello")
    assert ("\x1b[36m" in out.getvalue()) is not no_color
    assert out.getvalue().endswith(" hello\n")


def test_a_line_does_not_break_the_moving_status():
    out = Terminal()
    console = Console(out)
    console.status("waiting for x")
    console.say("x ready")
    console.status("")
    assert out.getvalue().count("\r\x1b[K") == 3
    assert "x ready\nwaiting for x" in out.getvalue()


def test_a_console_whose_terminal_is_gone_goes_on():
    console = Console(Gone())
    console.status("waiting")
    console.say("hello")
