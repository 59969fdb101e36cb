from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import cluster
from tests.e2e.reference import Lone, ask


@pytest.fixture(scope="module")
def lone(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lone]:
    """What a node alone on a machine answers, each prompt computed from its first token."""
    with cluster(tmp_path_factory.mktemp("lone"), str(tiny_model)) as nodes:
        nodes.start_node("both", "--no-enable-prefix-caching")
        gateway = nodes.start_gateway()
        yield lambda prompt, **fields: ask(gateway, prompt, **fields)
