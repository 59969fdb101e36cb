"""Pools of NaN with sequences in them, and how near a result must be to the reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvferry.kernels import reference

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LAYER = 1
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""The interpreter cuts off where a GPU rounds: a whole step of bfloat16."""


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.float(), expected.float(), atol=tolerance, rtol=tolerance)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """On the CPU: the same numbers for every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def pool(self, num_blocks: int, dtype: torch.dtype) -> torch.Tensor:
        dims = (num_blocks, 2, 2, self.num_kv_heads, self.block_size, self.head_dim)
        return torch.full(dims, torch.nan, dtype=dtype)


@dataclass(frozen=True)
class Prompt:
    query: torch.Tensor  # [num_tokens, num_heads, head_dim] of every position
    table: list[int]


class Pool:
    """Blocks are handed out in random order; every slot that no position has is NaN."""

    def __init__(self, shape: Shape, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
        num_blocks = num_tokens // shape.block_size + 40
        self.shape, self.dtype, self.device = shape, dtype, device
        self.kv_cache = shape.pool(num_blocks, dtype).to(device)
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()

    def add(self, num_tokens: int, seed: int) -> Prompt:
        shape = self.shape
        table = [self._free.pop() for _ in range(-(-num_tokens // shape.block_size))]
        key, value = (randn(num_tokens, shape.num_kv_heads, shape.head_dim, seed=seed + i) for i in (1, 2))
        query = randn(num_tokens, shape.num_heads, shape.head_dim, seed=seed + 3, dtype=self.dtype)
        position = torch.arange(num_tokens)
        slots = torch.tensor(table)[position // shape.block_size] * shape.block_size + position % shape.block_size
        key, value, slots = (x.to(self.device) for x in (key.to(self.dtype), value.to(self.dtype), slots))
        reference.write_kv(self.kv_cache, LAYER, key, value, slots)
        return Prompt(query.to(self.device), table)

    def tables(self, prompts: Sequence[Prompt]) -> torch.Tensor:
        """Padded columns name block 0, as the engine's do."""
        width = max(len(prompt.table) for prompt in prompts)
        return torch.tensor([one.table + [0] * (width - len(one.table)) for one in prompts], device=self.device)
