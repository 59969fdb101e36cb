"""Becomes another program that dies with its parent: `python launch.py PARENT_PID NICENESS PROGRAM ARGUMENT…`.

A program of its own, run by path with `-I -S`, so that it starts in milliseconds and nothing of ours runs between a
fork and an exec (`preexec_fn` is not safe beside threads). Imports nothing of ours.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
CONFIG_EXIT = 2
"""Exit status of whatever the operator must mend: a supervisor ends with it and starts nothing again."""


def main(arguments: list[str]) -> None:
    parent, niceness, program = int(arguments[0]), int(arguments[1]), arguments[2:]
    if sys.platform == "linux":
        # SIGTERM and not SIGKILL: an orphan still gives back its shared memory. Survives the exec below.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise SystemExit(f"launch: the parent {parent} is gone")
    os.nice(niceness)
    try:
        os.execvp(program[0], program)
    except OSError as exc:
        print(f"cannot run {program[0]}: {exc.strerror}", file=sys.stderr)
        raise SystemExit(CONFIG_EXIT) from None


if __name__ == "__main__":
    main(sys.argv[1:])
