"""Our processes are started as new programs: a child that is forked beside gRPC's threads may hang for ever."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORKS = {"os.fork", "os.forkpty", "ProcessPoolExecutor", "multiprocessing", "preexec_fn"}


def names(tree: ast.AST) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            found |= {node.attr, ast.unparse(node)}
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.keyword) and node.arg:
            found.add(node.arg)
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
            found |= {name for alias in node.names for name in (alias.name, f"{node.module}.{alias.name}")}
    return found


def test_nothing_forks() -> None:
    files = [path for folder in ("common", "services", "kernels") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > 100
    for path in files:
        assert not FORKS & names(ast.parse(path.read_text())), path


def test_the_search_would_find_one() -> None:
    for text in (
        "os.fork()",
        "from os import fork",
        "subprocess.run([], preexec_fn=f)",
        "from multiprocessing import Process",
    ):
        assert FORKS & names(ast.parse(text)), text
