"""The KV pool's copy in host memory, on nodes whose pool lies in the memory of a device.

Peers read and write the mirror, kernels the pool: a block that has been filled is copied down at the end of its step, a
block that a peer's KV was put into is copied up before the next one. Knows nothing of sequences or peers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from kvferry.kernels import ops
from kvferry.services.engine.schedule import Scheduled


class HostMirror:
    """`pool` and `host` have one shape, `[num_blocks, ...]`, and one dtype; `pool` may be on any device.

    Only blocks whose every slot is filled are in the mirror: no other block is ever offered to a peer.
    """

    def __init__(self, pool: torch.Tensor, host: torch.Tensor) -> None:
        if pool.shape != host.shape or pool.dtype != host.dtype:
            raise ValueError(
                f"a pool {tuple(pool.shape)} {pool.dtype} has no mirror in {tuple(host.shape)} {host.dtype}"
            )
        self._pool, self._host = pool, host

    def copy_up(self, block_ids: Sequence[int]) -> None:
        """Host to device: what peers' blocks were copied into."""
        if block_ids:
            rows = torch.tensor(block_ids)
            ops.scatter_blocks(self._host[rows].to(self._pool.device), self._pool, rows.to(self._pool.device))

    def copy_down(self, block_ids: Sequence[int]) -> None:
        """Device to host: what was filled."""
        if block_ids:
            rows = torch.tensor(block_ids)
            self._host[rows] = ops.gather_blocks(self._pool, rows.to(self._pool.device)).to(self._host.device)


def filled_blocks(rows: Iterable[Scheduled]) -> list[int]:
    """The blocks whose last slot a step writes."""
    filled: list[int] = []
    for row in rows:
        size = row.sequence.block_size
        filled += row.sequence.block_table[row.start // size : (row.start + row.num_tokens) // size]
    return filled
