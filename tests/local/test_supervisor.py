from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvferry.common.errors import StartupError
from kvferry.services.local.supervisor import Backoff, Fleet, describe
from tests.local.processes import SLEEP, STUBBORN, alive, program, read_pid, recording_console, wait_until, write_pid

REPOSITORY = Path(__file__).parents[2]
QUICK = Backoff(first_s=0.05, longest_s=0.2, stable_s=60)


def run_fleet(stages, during, backoff=QUICK):
    """Starts the stages, awaits `during(fleet)`, drains; returns what was shown and how long draining took."""
    console, out = recording_console()

    async def run() -> float:
        fleet = Fleet(console, backoff)
        try:
            for stage in stages:
                fleet.start(stage)
            async with asyncio.timeout(30):
                await during(fleet)
        finally:
            begun = time.monotonic()
            await fleet.drain()
        return time.monotonic() - begun

    drain_s = asyncio.run(run())
    return out.getvalue(), drain_s


async def ready(fleet):
    await fleet.wait_ready()


def test_a_child_is_announced_when_it_is_ready_and_its_lines_carry_its_name(tmp_path):
    flag = tmp_path / "flag"
    code = f"print('hello'); import pathlib; pathlib.Path({str(flag)!r}).touch(); " + SLEEP
    shown, _ = run_fleet([[program("node-0", code, ready=flag.exists)]], ready)
    assert "node-0     | hello\n" in shown
    assert "node-0 ready after" in shown


def test_a_last_line_without_an_end_and_bytes_that_are_no_text_are_shown():
    code = "import sys; sys.stdout.buffer.write(b'\\xff bad\\nthe end'); sys.exit(3)"

    async def until_restart(fleet):
        await asyncio.sleep(0.5)

    shown, _ = run_fleet([[program("x", code, ready=lambda: False)]], until_restart)
    assert "| � bad\n" in shown
    assert "| the end\n" in shown


def test_a_crashed_child_is_reported_with_its_last_lines_and_started_again(tmp_path):
    count = tmp_path / "count"
    code = f"""
import os, pathlib, sys, time
count = pathlib.Path({str(count)!r})
n = len(count.read_text()) if count.exists() else 0
count.write_text("x" * (n + 1))
print("attempt", n)
if n < 2: os.kill(os.getpid(), 11)
time.sleep(600)
"""

    async def until_third(fleet):
        await asyncio.to_thread(wait_until, lambda: count.exists() and len(count.read_text()) == 3)

    shown, _ = run_fleet([[program("node-0", code, ready=lambda: False)]], until_third)
    assert shown.count("node-0 was killed by SIGSEGV after") == 2
    assert "kvferry    |     attempt 1\n" in shown
    assert "node-0 is started again in 0.05 s" in shown
    assert "node-0 is started again in 0.1 s" in shown


def test_a_quiet_child_is_heard_only_when_it_fails():
    async def for_a_while(fleet):
        await asyncio.sleep(0.5)

    code = "print('fine'); raise SystemExit(3)"
    shown, _ = run_fleet([[program("redis", code, quiet=True, ready=lambda: False)]], for_a_while)
    assert "redis      | fine" not in shown
    assert "kvferry    |     fine" in shown


def test_pauses_double_up_to_a_bound():
    backoff = Backoff(first_s=0.5, longest_s=30)
    assert [backoff.delay_s(n) for n in (1, 2, 3, 6, 7, 8, 10_000)] == [0.5, 1, 2, 16, 30, 30, 30]


def test_a_stable_run_makes_the_next_failure_the_first():
    async def for_a_while(fleet):
        await asyncio.sleep(1.5)

    children = [[program("x", "import time; time.sleep(0.2)", ready=lambda: False)]]
    shown, _ = run_fleet(children, for_a_while, Backoff(first_s=0.05, stable_s=0.15))
    assert shown.count("started again in 0.05 s") >= 2
    assert "started again in 0.1 s" not in shown


def test_a_configuration_error_at_the_first_start_is_final():
    code = "import sys; print('kvferry: no such model'); sys.exit(2)"

    async def until_failed(fleet):
        await fleet.failed.wait()
        assert isinstance(fleet.failure, StartupError)
        assert fleet.failure.message == "node-0: no such model"

    shown, _ = run_fleet([[program("node-0", code, ready=lambda: False)]], until_failed)
    assert "started again" not in shown


def test_the_same_status_after_it_was_ready_is_a_crash_like_any_other(tmp_path):
    code = "import time, sys; time.sleep(0.4); sys.exit(2)"

    async def for_a_while(fleet):
        await fleet.wait_ready()
        await asyncio.sleep(1)
        assert fleet.failure is None

    shown, _ = run_fleet([[program("node-0", code)]], for_a_while)
    assert "node-0 ended with status 2 after" in shown
    assert "started again" in shown


def test_a_program_that_does_not_exist_is_a_startup_error():
    async def until_failed(fleet):
        await fleet.failed.wait()
        assert "cannot run /no/such/program: No such file" in str(fleet.failure)

    spec = program("x", "", ready=lambda: False)
    object.__setattr__(spec, "command", ("/no/such/program",))
    run_fleet([[spec]], until_failed)


def test_stages_end_one_after_the_other_in_reverse_order(tmp_path):
    log = tmp_path / "log"

    def child(name):
        code = f"""
import signal, sys, time
def end(*_):
    time.sleep(0.1)
    with open({str(log)!r}, "a") as file: file.write({name!r} + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, end)
open({str(tmp_path / name)!r}, "w").close()
time.sleep(600)
"""
        return program(name, code, ready=(tmp_path / name).exists)

    run_fleet([[child("redis")], [child("prefill-0"), child("decode-0")], [child("gateway")]], ready)
    ended = log.read_text().split()
    assert ended[0] == "gateway"
    assert set(ended[1:3]) == {"prefill-0", "decode-0"}
    assert ended[3:] == ["redis"]


def test_a_child_that_ignores_sigterm_is_killed_after_its_grace_period(tmp_path):
    pid = tmp_path / "pid"
    stubborn = program("x", write_pid(pid) + STUBBORN, ready=pid.exists, grace_s=0.5)
    shown, drain_s = run_fleet([[stubborn]], ready)
    assert "x did not end within 0.5 s: killed" in shown
    assert 0.4 < drain_s < 5
    assert not alive(read_pid(pid))


def test_kill_cuts_a_drain_short(tmp_path):
    stubborn = program("x", write_pid(tmp_path / "pid") + STUBBORN, ready=(tmp_path / "pid").exists, grace_s=60)

    async def then_kill_soon(fleet):
        await fleet.wait_ready()
        asyncio.get_running_loop().call_later(0.3, fleet.kill)

    _, drain_s = run_fleet([[stubborn]], then_kill_soon)
    assert drain_s < 10


def test_draining_during_a_pause_or_a_start_leaves_no_process():
    async def at_once(fleet):
        await asyncio.sleep(0)

    async def in_the_pause(fleet):
        await asyncio.sleep(0.5)

    _, drain_s = run_fleet([[program("x", SLEEP)]], at_once)
    assert drain_s < 10
    _, drain_s = run_fleet([[program("x", "raise SystemExit(1)", ready=lambda: False)]], in_the_pause, Backoff(60, 60))
    assert drain_s < 2


def test_what_a_child_leaves_in_its_group_goes_with_it(tmp_path):
    pid = tmp_path / "pid"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {write_pid(pid) + STUBBORN!r}]); " + SLEEP
    run_fleet([[program("x", code, ready=pid.exists)]], ready)
    wait_until(lambda: not alive(read_pid(pid)))


def test_niceness_and_environment_reach_the_child():
    code = "import os, time; print(os.nice(0), os.environ['COLOUR'], flush=True); time.sleep(600)"

    async def for_a_while(fleet):
        await asyncio.sleep(0.7)

    shown, _ = run_fleet([[program("x", code, niceness=7, environ={"COLOUR": "red"})]], for_a_while)
    assert f"| {os.nice(0) + 7} red\n" in shown


@pytest.mark.skipif(sys.platform != "linux", reason="the parent-death signal is Linux's")
def test_children_end_when_the_supervisor_is_killed(tmp_path):
    pid = tmp_path / "pid"
    script = f"""
import asyncio, sys
from kvferry.services.local.supervisor import Fleet
from tests.local.processes import program, recording_console, SLEEP, write_pid
async def run():
    fleet = Fleet(recording_console()[0])
    fleet.start([program("x", {write_pid(pid) + SLEEP!r})])
    await asyncio.sleep(600)
asyncio.run(run())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY)
    try:
        child = read_pid(pid)
        assert alive(child)
    finally:
        supervisor.kill()
        supervisor.wait()
    wait_until(lambda: not alive(child))


def test_exit_statuses_are_told_in_words():
    assert describe(3) == "ended with status 3"
    assert describe(-signal.SIGKILL) == "was killed by SIGKILL"
    assert describe(-60) == "was killed by signal 60"
