"""The tables in docs/ that tie a promise to a test by name: each test is there, and each edge and report has one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = [path for path in sorted((ROOT / "docs").glob("*.md")) if "`tests/" in path.read_text()]
_NAMED = re.compile(r"`((?:tests|services)/[\w/]+\.py)::(\w+)`")
TABLES = ("failures.md", "reports.md")


def functions(path: Path) -> set[str]:
    """What pytest would collect there, or what a suite of checks offers; read, not imported."""
    found = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef))
    coroutines = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.AsyncFunctionDef))
    return {node.name for node in (*found, *coroutines) if node.name.startswith(("test_", "check_"))}


@pytest.mark.parametrize("doc", DOCS, ids=lambda path: path.name)
def test_every_test_that_a_document_names_exists(doc: Path) -> None:
    named = _NAMED.findall(doc.read_text())
    missing = [f"{file}::{name}" for file, name in named if not _has(file, name)]
    assert not missing, f"{doc.name} names tests that are not there: {missing}"


def _has(file: str, name: str) -> bool:
    path = ROOT / file
    return path.is_file() and name in functions(path)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_of_the_tables_names_a_test(name: str) -> None:
    lines = (ROOT / "docs" / name).read_text().splitlines()
    rows = [line for line in lines if line.startswith("| ") and not line.startswith(("| edge |", "| id |"))]
    assert len(rows) > 10
    bare = [row.split("|")[1].strip() for row in rows if not _NAMED.search(row)]
    assert not bare, f"docs/{name}: rows without a test: {bare}"
