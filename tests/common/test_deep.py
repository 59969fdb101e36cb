from __future__ import annotations

import threading

import pytest

from kvferry.common.deep import STACK_BYTES, with_deep_stack


def test_the_result_comes_back_and_the_stack_size_of_other_threads_stays() -> None:
    usual = threading.stack_size()
    assert with_deep_stack(lambda: threading.current_thread().name) == "deep"
    assert threading.stack_size() == usual != STACK_BYTES


def test_errors_come_out_as_they_are_and_panics_as_errors() -> None:
    class Panic(BaseException):
        """What native code raises is no Exception."""

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(ValueError, match="wrong"):
        with_deep_stack(lambda: fail(ValueError("wrong")))
    with pytest.raises(RuntimeError, match="native code failed: boom"):
        with_deep_stack(lambda: fail(Panic("boom")))
