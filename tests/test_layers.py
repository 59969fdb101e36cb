"""Imports only point down. The table is the architecture; the test reads every import of the tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

_NODE = {"common", "proto", "rpc", "index", "transfer", "engine"}
MAY_IMPORT: dict[str, set[str]] = {
    "common": set(),
    "proto": set(),
    "kernels": {"common"},
    "rpc": {"common", "proto"},
    "index": {"common"},
    "transfer": {"common", "proto", "rpc", "kernels"},
    "engine": {"common", "kernels"},
    "node": _NODE,  # what prefill and decode nodes share
    "prefill": _NODE | {"node"},
    "decode": _NODE | {"node"},
    "gateway": {"common", "proto", "rpc", "index"},
    "local/simulate": {"common", "index", "engine", "gateway"},  # runs the real router over simulated nodes
    "local": {"common", "proto", "rpc", "index"},  # others: in a function, when a command runs it, or for types
}
MUST_NOT_USE: dict[str, set[str]] = {
    "common": {"torch", "numpy", "grpc", "redis", "fastapi"},
    "rpc": {"torch", "numpy", "redis"},
    "index": {"torch", "numpy", "grpc"},
    "gateway": {"torch", "numpy", "transformers", "safetensors"},
    "local": {"torch", "transformers"},
    "local/simulate": {"torch", "numpy", "transformers"},
}
LAZY = {"local"}


class Import(NamedTuple):
    where: str
    module: str
    in_function: bool


def imports_of(path: Path) -> Iterator[Import]:
    tree = ast.parse(path.read_text())
    lazy = {
        node
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    lazy |= {n for block in ast.walk(tree) if _is_for_types(block) for n in ast.walk(block)}
    for node in ast.walk(tree):
        where = f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where}: write `from kvferry.x import`, not a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        yield from (Import(where, name, node in lazy) for name in names)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def files_of(layer: str) -> Iterator[Path]:
    """A folder inside of another one's that has a line of its own is not the outer one's."""
    inner = [path for name, path in folders().items() if name.startswith(f"{layer}/")]
    found = folders()[layer].rglob("*.py")
    return (path for path in found if not any(path.is_relative_to(folder) for folder in inner))


def layer_of(module: str) -> str | None:
    """The layer that a dotted name belongs to; None: not ours."""
    parts = module.split(".")
    if parts[0] != "kvferry" or len(parts) == 1 or parts[1] == "__version__":
        return None
    return parts[2] if parts[1] == "services" else parts[1]


def folders() -> dict[str, Path]:
    services = {path.name: path for path in (ROOT / "services").iterdir() if path.is_dir()}
    services["local/simulate"] = ROOT / "services" / "local" / "simulate"
    own = {name: ROOT / name for name in ("common", "kernels", "proto")} | services
    return {name: path for name, path in own.items() if any(path.rglob("*.py"))}


@pytest.mark.parametrize("layer", sorted(folders()))
def test_a_layer_imports_only_what_lies_below_it(layer):
    assert layer in MAY_IMPORT, f"services/{layer} has no place in the table"
    wrong = [
        f"{found.where} imports {found.module}"
        for path in files_of(layer)
        for found in imports_of(path)
        if (target := layer_of(found.module)) is not None
        and target not in MAY_IMPORT[layer] | {layer.partition("/")[0]}
        and not (layer in LAZY and found.in_function)
    ]
    assert wrong == []


@pytest.mark.parametrize("layer", sorted(MUST_NOT_USE))
def test_a_layer_does_without_the_packages_it_must_not_know(layer):
    wrong = [
        f"{found.where} imports {found.module}"
        for path in files_of(layer)
        for found in imports_of(path)
        if found.module.split(".")[0] in MUST_NOT_USE[layer] and not (layer in LAZY and found.in_function)
    ]
    assert wrong == []


def test_the_table_has_no_cycle():
    done: set[str] = set()
    while len(done) < len(MAY_IMPORT):
        next_ones = {layer for layer, below in MAY_IMPORT.items() if layer not in done and below <= done}
        assert next_ones, f"a cycle among {set(MAY_IMPORT) - done}"
        done |= next_ones


def test_the_four_folders_are_no_packages_of_their_own():
    """An `__init__.py` in `proto` or `kernels` would shadow other people's packages of that name."""
    assert [
        folder for folder in ("common", "kernels", "proto", "services") if (ROOT / folder / "__init__.py").exists()
    ] == []
