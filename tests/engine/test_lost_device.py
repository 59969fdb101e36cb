"""After an error that a GPU does not recover from, no batch would ever succeed: the process has to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvferry.services.engine.loader import load_model
from kvferry.services.engine.schedule import RunnerLost
from tests.engine.test_host_mirror import GREEDY, make_node, sequence


@pytest.mark.parametrize(
    ("text", "is_lost"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("Triton Error [CUDA]: an illegal memory access was encountered", True),
        ("CUDA out of memory. Tried to allocate 20.00 GiB", False),
        ("expected all tensors on one device", False),
    ],
)
def test_a_lost_device_ends_the_engine_and_other_errors_only_the_batch(
    text: str, is_lost: bool, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(tiny_model, torch.float32)

    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError(text)

    monkeypatch.setattr(model, "hidden", fail)
    node = make_node(model, mirrored=True)
    node.engine.submit(sequence("a", [3, 4, 5], GREEDY))
    if is_lost:
        with pytest.raises(RunnerLost, match="the device of this process is lost"):
            node.engine.step()
    else:
        node.engine.step()
        assert [failed.key for report in node.reports for failed in report.failed] == ["a"]
