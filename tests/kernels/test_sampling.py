"""The sampler's filters on a CPU: exactly the tokens that sorting would keep."""

from __future__ import annotations

import pytest
import torch

from kvferry.kernels import ops, reference
from tests.kernels.rows import randn, threads

LIMITS = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.999, 0.0),
    (0, 0.0, 0.0),
    (0, 1.0, 0.2),
    (50, 0.5, 0.01),
    (3, 0.3, 0.5),
    (10**6, 0.95, 0.0),
]
"""top-k, top-p, min-p."""


def arguments(limits: list[tuple[int, float, float]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    top_k, top_p, min_p = zip(*limits, strict=True)
    return torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float64), torch.tensor(min_p)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("width", [1, 2, 7, 63, 2000, 49_152])
def test_filters_keep_what_the_reference_keeps(width: int, scale: float) -> None:
    probs = torch.softmax(scale * randn(len(LIMITS), width, seed=width), dim=-1)
    assert torch.equal(ops.filter_tokens(probs, *arguments(LIMITS)), reference.filter_tokens(probs, *arguments(LIMITS)))


@pytest.mark.parametrize("limit", LIMITS)
def test_ties_and_zeros_are_treated_as_the_reference_does(limit: tuple[int, float, float]) -> None:
    steps = torch.softmax(randn(8, 300), dim=-1).mul(200).round() / 256
    steps[0] = 0.25
    args = arguments([limit] * len(steps))
    assert torch.equal(ops.filter_tokens(steps, *args), reference.filter_tokens(steps, *args))


def test_the_whole_mass_keeps_everything_but_zeros() -> None:
    """However sums are rounded: the largest `top_p` below 1, over numbers from 1 down to the smallest."""
    probs = torch.cat([torch.ones(1), 2.0 ** -torch.arange(1.0, 149.0), torch.zeros(3)]).view(1, -1)
    kept = ops.filter_tokens(probs, *arguments([(0, 1 - 2**-53, 0.0)]))
    assert torch.equal(kept[kept > 0], probs[0, : int((kept > 0).sum())])
    assert int((kept > 0).sum()) >= 53


def test_a_row_is_filtered_alike_in_any_company() -> None:
    probs = torch.softmax(3 * randn(33, 5000), dim=-1)
    limits = [LIMITS[i % len(LIMITS)] for i in range(33)]
    with threads(1):
        expected = ops.filter_tokens(probs, *arguments(limits))
    for num_threads in (1, 2):
        with threads(num_threads):
            for start, stop in ((0, 1), (1, 3), (5, 33), (0, 33)):
                got = ops.filter_tokens(probs[start:stop], *arguments(limits[start:stop]))
                assert torch.equal(got, expected[start:stop])


def test_a_strided_row_and_the_argument_itself_are_left_alone() -> None:
    wide = torch.softmax(randn(4, 200), dim=-1)
    before, args = wide.clone(), arguments([(3, 1.0, 0.0)] * 4)
    assert torch.equal(
        ops.filter_tokens(wide[:, ::2], *args), reference.filter_tokens(wide[:, ::2].contiguous(), *args)
    )
    assert torch.equal(wide, before)
