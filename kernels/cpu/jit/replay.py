"""Runs recorded kernels one after the other, on a whole team of threads that meets after each."""

from __future__ import annotations

from kvferry.kernels.cpu.jit.memory import load_int
from kvferry.kernels.cpu.jit.threads import arrive, call_kernel, call_plain, load_shared

SPINS = 4096
"""How often a thread looks for the others before it offers its core to whoever waits for one."""


def replay(args):
    """For the arguments see `kernels/cpu/replay.py`."""
    table, num_steps, step_bytes = load_int(args + 16), load_int(args + 24), load_int(args + 32)
    team_size, give_way = load_int(args + 40), load_int(args + 48)
    num_threads = call_plain(team_size) if team_size != 0 else 1
    due = 0
    for step in range(num_steps):
        at = table + step * step_bytes
        call_kernel(load_int(at), at + 8)
        due += num_threads
        arrive(args)
        spins = 0
        while load_shared(args) < due:
            spins += 1
            if spins > SPINS:
                call_plain(give_way)
