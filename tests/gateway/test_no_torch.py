"""The gateway's container has no torch: importing the app must not ask for it."""

from __future__ import annotations

import subprocess
import sys

_SCRIPT = """
import sys
import kvferry.services.gateway.app
heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
ours = [name for name in sys.modules if name.startswith("kvferry.services.") and name.split(".")[2] in
        ("engine", "transfer", "prefill", "decode", "node", "local")]
assert not heavy and not ours, (heavy, ours)
"""


def test_the_gateway_imports_no_torch_and_no_node_code() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
