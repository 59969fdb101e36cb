"""Copies in worker threads: the right rows, and no write after the awaiter has ended."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.services.transfer import copier
from kvferry.services.transfer.copier import Copier, copy_blocks, copy_pieces


@settings(deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(0, 19), st.integers(0, 19)), max_size=20, unique_by=lambda pair: pair[1]),
    block_bytes=st.sampled_from([1, 3, 64]),
    is_compiled=st.booleans(),
)
def test_a_copy_equals_the_loop_over_its_blocks(
    pairs: list[tuple[int, int]], block_bytes: int, is_compiled: bool
) -> None:
    source = np.random.default_rng(0).integers(1, 255, (20, block_bytes), dtype=np.uint8)
    dest, expected = np.zeros_like(source), np.zeros_like(source)
    for src, dst in pairs:
        expected[dst] = source[src]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copier, "can_copy_rows", lambda: is_compiled)
        copy_blocks(source, [src for src, _ in pairs], dest, [dst for _, dst in pairs])
    np.testing.assert_array_equal(dest, expected)


def test_a_copy_of_many_pieces_stops_between_two_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copier, "_PIECE_BYTES", 8)
    source, dest, stop = np.ones((10, 4), np.uint8), np.zeros((10, 4), np.uint8), threading.Event()
    copy_blocks(source, range(10), dest, range(10), stop)
    assert dest.all()
    stop.set()
    dest[:] = 0
    copy_blocks(source, range(10), dest, range(10), stop)
    assert not dest.any()


@pytest.mark.parametrize("dst", [range(10), range(9, -1, -1)], ids=["adjacent", "scattered"])
def test_a_copy_gives_way_after_so_many_bytes_however_they_lie(
    dst: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copier, "_PIECE_BYTES", 12)
    source, dest = np.ones((10, 4), np.uint8), np.zeros((10, 4), np.uint8)
    num_copied = [int(dest.any(axis=1).sum()) for _ in copy_pieces(source, range(10), dest, dst)]
    assert num_copied == [3, 6, 9]
    assert dest.all()


def test_a_cancelled_run_waits_for_its_thread_however_often_it_is_cancelled() -> None:
    ended: list[float] = []

    def job(stop: threading.Event) -> None:
        stop.wait(10)
        time.sleep(0.1)
        ended.append(time.monotonic())

    async def body() -> None:
        worker = Copier("test")
        task = asyncio.create_task(worker.run(job))
        await asyncio.sleep(0.01)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended
        worker.close()

    asyncio.run(body())


def test_a_cancelled_run_that_has_not_begun_never_begins() -> None:
    ran: list[int] = []

    async def body() -> None:
        worker, gate = Copier("test", num_threads=1), threading.Event()
        first = asyncio.create_task(worker.run(lambda _: gate.wait(10)))
        second = asyncio.create_task(worker.run(lambda _: ran.append(1)))
        await asyncio.sleep(0.01)
        second.cancel()
        with pytest.raises(asyncio.CancelledError):
            await second
        gate.set()
        await first
        worker.close()

    asyncio.run(body())
    assert not ran


def test_an_error_of_the_job_reaches_the_awaiter() -> None:
    def job(_: threading.Event) -> None:
        raise OSError("bus")

    async def body() -> None:
        worker = Copier("test")
        with pytest.raises(OSError, match="bus"):
            await worker.run(job)
        worker.close()
        with pytest.raises(RuntimeError):
            await worker.run(job)

    asyncio.run(body())


def test_a_job_that_fails_after_its_awaiter_was_cancelled_is_no_warning() -> None:
    begun, go_on = threading.Event(), threading.Event()
    told: list[dict[str, object]] = []

    def job(_: threading.Event) -> None:
        begun.set()
        go_on.wait(30)
        raise RuntimeError("wrong bytes")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        worker = Copier("test")
        task = asyncio.create_task(worker.run(job))
        await asyncio.to_thread(begun.wait, 30)
        task.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        worker.close()
        gc.collect()

    asyncio.run(run())
    assert told == []
