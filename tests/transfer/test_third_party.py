"""The suite of all transports serves who has nothing but the installed package, with owners of his own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

CHECKS = "63-63 or (dies and not 19) or expired or beyond or dropped"
"""A few of each kind but those for other degrees of tensor parallelism, which this transport lacks. 19: SIGSTOP."""
THIRD_PARTY = Path(__file__).with_name("third_party.py")


def run(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_mine.py").write_text(source)
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHECKS, "test_mine.py"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)


def test_another_ones_transport_passes_the_suite_from_outside(tmp_path: Path) -> None:
    done = run(tmp_path, THIRD_PARTY.read_text())
    assert done.returncode == 0, done.stdout
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None
    assert int(found[1]) == 7, done.stdout
