"""The batch-invariant product: near torch's, and the same bits for a row in any company."""

from __future__ import annotations

import pytest
import torch

from kvferry.kernels.triton import dense
from tests.kernels.triton.cases import DTYPES, assert_near, randn

ROW_COUNTS = (1, 2, 3, 8, 33)


def operands(
    num_rows: int, depth: int, num_columns: int, dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """Rows, weights, bias; the products have a size of about 1."""
    x, weight = randn(num_rows, depth, dtype=dtype), (randn(num_columns, depth, seed=1) / depth**0.5).to(dtype)
    return [one.to(device) for one in (x, weight, randn(num_columns, seed=2, dtype=dtype))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_rows", "depth", "num_columns"), [(1, 63, 7), (3, 100, 130), (70, 576, 65), (2, 2100, 33)]
)
def test_it_agrees_with_torch(
    num_rows: int, depth: int, num_columns: int, dtype: torch.dtype, device: torch.device
) -> None:
    x, weight, bias = operands(num_rows, depth, num_columns, dtype, device)
    plain = (x.double() @ weight.double().T).to(dtype)
    assert_near(dense.matmul(x, weight), plain)
    assert_near(dense.InvariantLinear(weight, bias)(x), (plain.double() + bias.double()).to(dtype))


@pytest.mark.parametrize(
    ("depth", "dtype"), [(100, torch.float32), (2100, torch.float32), (2100, torch.bfloat16)], ids=str
)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows(
    depth: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Few rows take other programs than many do: 70 is more than one tile."""
    x, weight, bias = operands(70, depth, 40, dtype, device)
    linear = dense.InvariantLinear(weight, bias)
    whole = linear(x)
    for num_rows in ROW_COUNTS:
        for start in (0, 70 - num_rows):
            assert torch.equal(linear(x[start : start + num_rows]), whole[start : start + num_rows]), num_rows


def test_rows_may_be_a_slice_and_nothing_beside_them_leaks(device: torch.device) -> None:
    x, weight, _ = operands(5, 100, 40, torch.float32, device)
    wide = torch.full((7, 300), torch.nan, device=device)
    wide[1:6, 100:200] = x
    assert torch.equal(dense.matmul(wide[1:6, 100:200], weight), dense.matmul(x, weight))
    assert torch.equal(dense.InvariantLinear(weight)(x.T.contiguous().T), dense.matmul(x, weight))


def test_no_rows_are_no_error(device: torch.device) -> None:
    x, weight, bias = operands(0, 100, 40, torch.float32, device)
    assert dense.matmul(x, weight, bias).shape == (0, 40)
