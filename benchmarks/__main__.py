"""`python -m benchmarks [NAME] [options]`: runs one benchmark, or all of them with their defaults."""

from __future__ import annotations

import importlib
import os
import sys

from kvferry.common.cores import NODE_ENVIRON

NAMES = ("memory", "batching", "prefix", "serving")
BY_NAME_ONLY = ("aot", "gateway", "handover", "index", "kernels", "quality", "routing", "simulated", "step_times")
BY_NAME_ONLY += ("attention", "transfer")


def main() -> int:
    os.environ.update(NODE_ENVIRON | os.environ)  # before torch is imported
    names = [sys.argv[1]] if len(sys.argv) > 1 else list(NAMES)
    if names[0] not in NAMES + BY_NAME_ONLY:
        print(f"unknown benchmark {names[0]!r}: known are {', '.join(NAMES + BY_NAME_ONLY)}", file=sys.stderr)
        return 2
    for name in names:
        if status := int(importlib.import_module(f"benchmarks.{name}").main(sys.argv[2:])):
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
