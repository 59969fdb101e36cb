"""Recorded kernels: replays compute what the function would, from what lies in its tensors now."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from kvferry.kernels import ops
from kvferry.kernels.cpu.native import kernels
from tests.kernels.rows import randn, threads

WIDTH, INNER = 96, 320


def block(rows: int) -> tuple[torch.Tensor, Callable[[], torch.Tensor]]:
    """An input, and a function of it in which every kernel needs the one before."""
    x, weight = randn(rows, WIDTH), randn(WIDTH, seed=1)
    up, down = ops.pack_linear(randn(2 * INNER, WIDTH, seed=2)), ops.pack_linear(randn(WIDTH, INNER, seed=3))
    narrow = ops.pack_linear(randn(WIDTH, WIDTH, seed=4), weight_format="int8")

    def run() -> torch.Tensor:
        normed = ops.rms_norm(x, weight, 1e-5)
        for _ in range(4):
            added = down(ops.silu_and_mul(up(normed)))
            normed = ops.add_rms_norm(x, narrow(added).view(rows, -1), weight, 1e-5)
        return normed

    return x, run


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_replays_have_the_bits_of_the_function_on_new_input(rows: int, count: int) -> None:
    x, run = block(rows)
    with threads(count):
        recording, _ = ops.record(run)
        assert recording is not None
        for seed in range(5, 25):
            x.copy_(randn(rows, WIDTH, seed=seed))
            got = recording().clone()
            x.copy_(randn(rows, WIDTH, seed=seed))
            assert torch.equal(got, run())


def test_a_recording_keeps_its_memory_to_itself() -> None:
    x, run = block(2)
    recording, _ = ops.record(run)
    assert recording is not None
    others = [torch.full((size,), 7.0) for size in (16, 192, 384, 640, 1280, 4096) for _ in range(50)]
    x.copy_(start := randn(2, WIDTH, seed=9))
    got = recording().clone()
    assert all(bool((other == 7.0).all()) for other in others)
    x.copy_(start)
    assert torch.equal(got, run())


@pytest.mark.parametrize(
    "foreign",
    [
        lambda x: x.add_(1),
        lambda x: x + 1,
        lambda x: x.T.flatten(),
        lambda x: x.clone(),
        lambda x: x.new_zeros(3),
        lambda x: x[torch.tensor([1, 0])],
    ],
    ids=["in place", "sum", "copying view", "clone", "zeros", "gather"],
)
def test_what_torch_computes_itself_is_not_recorded(foreign: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, weight = randn(2, WIDTH), randn(WIDTH, seed=1)

    def run() -> torch.Tensor:
        foreign(x)
        return ops.rms_norm(x, weight, 1e-5)

    with torch.inference_mode():
        recording, result = ops.record(run)
        assert recording is None
        assert torch.equal(result, ops.rms_norm(x, weight, 1e-5))


def test_kernels_of_other_threads_are_not_recorded() -> None:
    x, weight = randn(2, WIDTH), randn(WIDTH, seed=1)
    with kernels().recorded() as calls:
        thread = threading.Thread(target=ops.rms_norm, args=(x, weight, 1e-5))
        thread.start()
        thread.join()
        assert calls == []
        ops.rms_norm(x, weight, 1e-5)
    assert len(calls) == 1
    ops.rms_norm(x, weight, 1e-5)
    assert len(calls) == 1
