"""Filters and draws on a GPU: exactly the reference's choices."""

from __future__ import annotations

import pytest
import torch

from kvferry.kernels import reference
from kvferry.kernels.triton import sampling
from tests.kernels.triton.cases import randn

Limits = tuple[int, float, float]


def probabilities(num_rows: int, width: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    return torch.softmax(3 * randn(num_rows, width, seed=seed), dim=-1).to(device)


def filtered(probs: torch.Tensor, limits: list[Limits]) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's result and the reference's."""
    top_k, top_p, min_p = zip(*limits, strict=True)
    arguments = [
        torch.tensor(top_k, device=probs.device),
        torch.tensor(top_p, device=probs.device, dtype=torch.float64),
        torch.tensor(min_p, device=probs.device),
    ]
    return sampling.filter_tokens(probs, *arguments), reference.filter_tokens(probs, *arguments)


@pytest.mark.parametrize("width", [7, 100, 5000])
def test_filters_keep_what_the_reference_keeps(width: int, device: torch.device) -> None:
    limits = [(0, 1.0, 0.0), (1, 1.0, 0.0), (5, 1.0, 0.0), (0, 0.9, 0.0), (0, 0.0, 0.0), (0, 1.0, 0.2), (50, 0.5, 0.01)]
    got, want = filtered(probabilities(len(limits), width, device), limits)
    assert torch.equal(got, want)


def test_ties_and_zeros_are_treated_as_the_reference_does(device: torch.device) -> None:
    probs = torch.tensor([[0.25, 0.0, 0.25, 0.25, 0.0, 0.25], [0.5, 0.125, 0.125, 0.25, 0.0, 0.0]], device=device)
    for limit in ((2, 1.0, 0.0), (0, 0.5, 0.0), (0, 0.75, 0.0), (9, 0.8, 0.5), (5, 1.0, 1.0)):
        got, want = filtered(probs, [limit, limit])
        assert torch.equal(got, want), limit


@pytest.mark.parametrize("width", [7, 100, 5000])
def test_draws_are_the_reference_s(width: int, device: torch.device) -> None:
    probs = probabilities(8, width, device)
    probs[:, 1::3] = 0
    uniform = torch.tensor([0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1 - 2**-53], dtype=torch.float64, device=device)
    got = sampling.draw_tokens(probs, uniform)
    assert torch.equal(got, reference.draw_tokens(probs, uniform))
    assert (probs.gather(1, got[:, None]) > 0).all()


def test_a_number_on_the_edge_of_two_tokens_draws_the_second(device: torch.device) -> None:
    probs = torch.tensor([[0.25, 0.0, 0.25, 0.5]] * 3, device=device)
    edges = torch.tensor([0.0, 0.25, 0.5], dtype=torch.float64, device=device)
    assert sampling.draw_tokens(probs, edges).tolist() == [0, 2, 3]


def test_the_last_possible_token_is_drawn_at_the_upper_end(device: torch.device) -> None:
    """Also where sums are rounded so that none exceeds the goal, as in about half of these rows."""
    probs = 1e-8 * randn(8, 2000).abs().to(device)
    probs[:, 0], probs[:, 1900:] = 1, 0
    top = torch.full((8,), 1 - 2**-53, dtype=torch.float64, device=device)
    assert sampling.draw_tokens(probs, top).tolist() == [1899] * 8


def test_a_row_is_filtered_and_drawn_alike_in_any_company(device: torch.device) -> None:
    probs = probabilities(4, 100, device)
    uniform = torch.rand(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).to(device)
    limits: list[Limits] = [(10, 0.9, 0.01)] * 4
    whole, drawn = filtered(probs, limits)[0], sampling.draw_tokens(probs, uniform)
    for start, stop in ((0, 1), (1, 4)):
        assert torch.equal(filtered(probs[start:stop], limits[start:stop])[0], whole[start:stop])
        assert torch.equal(sampling.draw_tokens(probs[start:stop], uniform[start:stop]), drawn[start:stop])
