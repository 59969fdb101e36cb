"""A dense layer on a GPU whose rows keep their bits in any company: fixed tiles, one order of sums."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvferry.kernels.triton.jit import matmul as jit
from kvferry.kernels.triton.launch import Option, launch

CHUNK = 1024
"""Terms of a sum that one program adds before they join the total. Part of the numerics."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Sizes of a program's work. Part of the numerics."""

    rows: int
    columns: int
    depth: int
    options: dict[str, Option]


TILES = {
    2: Tile(64, 128, 64, {"num_warps": 8, "num_stages": 3, "enable_fp_fusion": False}),
    4: Tile(64, 64, 16, {"num_warps": 4, "num_stages": 3, "enable_fp_fusion": False}),
}
"""By bytes of an element."""

_ADD_COLUMNS = 1024


def matmul(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x` [num_rows, depth], `weight` [num_columns, depth], `bias` [num_columns] -> [num_rows, num_columns].

    All in one dtype; sums are float32. Few rows are spread over more programs, with the same bits.
    """
    (num_rows, depth), num_columns = x.shape, len(weight)
    tile = TILES[x.element_size()]
    num_chunks = -(-depth // CHUNK)
    is_split = num_rows <= tile.rows and num_chunks > 1
    out = x.new_empty(num_rows, num_columns)
    parts = x.new_empty(num_chunks, num_rows, num_columns, dtype=torch.float32) if is_split else out
    launch(
        jit.matmul,
        (-(-num_rows // tile.rows), -(-num_columns // tile.columns), num_chunks if is_split else 1),
        x,
        weight,
        None if is_split else bias,
        parts,
        num_rows,
        num_columns,
        depth,
        x.stride(0),
        rows=tile.rows,
        columns=tile.columns,
        tile=tile.depth,
        chunk=CHUNK,
        is_split=is_split,
        options=tile.options,
    )
    if is_split:
        grid = (num_rows, -(-num_columns // _ADD_COLUMNS))
        launch(jit.add_chunks, grid, parts, bias, out, num_rows, num_columns, num_chunks, columns=_ADD_COLUMNS)
    return out


class InvariantLinear:
    """`x @ weight.T + bias`; `weight` [out, width] and `bias` [out] are kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight.contiguous(), bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return matmul(x if x.stride(-1) == 1 else x.contiguous(), self._weight, self._bias)
