"""Memory for weights: zeros of any shape that nobody else has, in huge pages where they are given on request."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import psutil
import pytest
import torch

from kvferry.kernels.cpu import huge_pages

ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_parts_are_zeros_of_their_own() -> None:
    shapes = [(3, 5), (1,), (0, 4), (7, 64, 64), (2**20, 17), (1, 1)]
    parts = [huge_pages.zeros(*shape, dtype=dtype) for shape in shapes for dtype in (torch.float32, torch.int8)]
    assert all(not part.any() and part.is_contiguous() for part in parts)
    for i, part in enumerate(parts):
        part.fill_(i + 1)
    for i, part in enumerate(parts):
        assert (part == i + 1).all()
        assert part.data_ptr() % 64 == 0


def test_a_mapping_is_given_back_with_the_last_tensor_in_it() -> None:
    huge_pages.zeros(2 * huge_pages._CHUNK_BYTES, dtype=torch.int8)  # what follows has mappings of its own
    process = psutil.Process()
    before = process.memory_info().vms
    parts = [huge_pages.zeros(2 * huge_pages._CHUNK_BYTES, dtype=torch.int8) for _ in range(4)]
    assert process.memory_info().vms >= before + 6 * huge_pages._CHUNK_BYTES
    del parts
    gc.collect()
    assert process.memory_info().vms < before + 4 * huge_pages._CHUNK_BYTES  # the newest is kept for what comes next


@pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE") or not ENABLED.exists() or "[never]" in ENABLED.read_text(),
    reason="this kernel gives no huge pages to those who ask",
)
def test_they_are_huge_pages() -> None:
    part = huge_pages.zeros(2 * huge_pages._CHUNK_BYTES, dtype=torch.int8)
    part.fill_(1)
    first, inside = part.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name:
            low, high = (int(end, 16) for end in name.split("-"))
            inside = low <= first < high
        elif inside and name == "AnonHugePages:":
            assert int(rest.split()[0]) >= huge_pages._CHUNK_BYTES // 1024
            return
    pytest.fail("the part is in no mapping")
