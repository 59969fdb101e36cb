"""Files that are made from others are those that `make generated` makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.generate import ROOT, files


@pytest.mark.parametrize("path", sorted(files()), ids=lambda path: str(path.relative_to(ROOT)))
def test_up_to_date(path: Path) -> None:
    assert path.read_text() == files()[path], f"{path.relative_to(ROOT)} is out of date: run `make generated`"


def test_every_board_is_generated() -> None:
    assert {path for path in files() if path.suffix == ".json"} == set((ROOT / "compose/grafana/dashboards").iterdir())
