"""Copies of rows of bytes: the right ones, no byte beside them, whatever the size and where they begin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.kernels.cpu.rows import Rows, copy_rows

NUM_ROWS, EDGE = 6, 200
UNTOUCHED = 0xEE


def _rows(num_planes: int, plane_bytes: int, gap: int, first: int) -> tuple[Rows, Rows]:
    """Rows of planes with `gap` bytes after each, beginning `first` bytes into the memory that comes with them."""
    size = NUM_ROWS * num_planes * (plane_bytes + gap)
    memory = np.full(size + 2 * EDGE, UNTOUCHED, dtype=np.uint8)
    whole = memory[first : first + size].reshape(NUM_ROWS, num_planes, plane_bytes + gap)
    return whole[:, :, :plane_bytes], memory


@pytest.mark.parametrize("past_cache", [False, True])
def test_rows_beyond_2_to_the_31_bytes_are_read_and_written(past_cache: bool) -> None:
    """The rows are address space, of which two become memory."""
    row_bytes, far = 2**20 + 3, 2**11 + 1
    large, small = np.empty((far + 1, row_bytes), np.uint8), np.empty((2, row_bytes), np.uint8)
    small[:] = np.random.default_rng(0).integers(0, 256, small.shape, dtype=np.uint8)
    copy_rows(small, [0], large, [far], past_cache=past_cache)
    copy_rows(large, [far], small, [1], past_cache=past_cache)
    assert far * row_bytes > 2**31
    np.testing.assert_array_equal(small[1], small[0])


@settings(deadline=None, max_examples=200)
@given(
    pairs=st.lists(
        st.tuples(st.integers(0, NUM_ROWS - 1), st.integers(0, NUM_ROWS - 1)),
        max_size=6,
        unique_by=lambda pair: pair[1],
    ),
    num_planes=st.integers(1, 3),
    plane_bytes=st.sampled_from((1, 3, 63, 64, 65, 255, 256, 257, 700)),
    gaps=st.tuples(st.sampled_from((0, 1, 64)), st.sampled_from((0, 1, 64))),
    firsts=st.tuples(st.integers(0, EDGE), st.integers(0, EDGE)),
    past_cache=st.booleans(),
)
def test_rows_arrive_and_nothing_else_changes(
    pairs: list[tuple[int, int]],
    num_planes: int,
    plane_bytes: int,
    gaps: tuple[int, int],
    firsts: tuple[int, int],
    past_cache: bool,
) -> None:
    (source, _), (target, memory) = (_rows(num_planes, plane_bytes, *at) for at in zip(gaps, firsts, strict=True))
    source[:] = np.random.default_rng(0).integers(0, 256, source.shape, dtype=np.uint8)
    before = memory.copy()
    copy_rows(source, [src for src, _ in pairs], target, [dst for _, dst in pairs], past_cache=past_cache)
    for src, dst in pairs:
        np.testing.assert_array_equal(target[dst], source[src])
        target[dst] = UNTOUCHED
    np.testing.assert_array_equal(memory, before)


@pytest.mark.parametrize(("src", "dst"), [([6], [0]), ([-1], [0]), ([0], [6]), ([0, 1], [2, -1])])
def test_a_row_outside_is_refused_before_anything_is_written(src: list[int], dst: list[int]) -> None:
    source, target = np.ones((6, 8), np.uint8), np.zeros((6, 8), np.uint8)
    with pytest.raises(IndexError, match=r"rows -?\d to -?\d of 6"):
        copy_rows(source, src, target, dst, past_cache=False)
    assert not target.any()


@pytest.mark.parametrize(
    ("source", "target", "dst"),
    [
        (np.ones((6, 8), np.uint8), np.zeros((6, 9), np.uint8), [0]),
        (np.ones((6, 8), np.uint8), np.zeros((6, 8), np.uint8), [0, 1]),
        (np.ones((6, 16), np.uint8)[:, ::2], np.zeros((6, 8), np.uint8), [0]),
    ],
    ids=["sizes differ", "more targets than sources", "gaps"],
)
def test_rows_that_do_not_fit_are_refused(source: Rows, target: Rows, dst: list[int]) -> None:
    with pytest.raises(ValueError, match=r"rows|gaps"):
        copy_rows(source, [0], target, dst, past_cache=False)
    assert not target.any()
