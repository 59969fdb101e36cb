"""A run of kernels recorded once and replayed by one call, as CUDA graphs do for a GPU.

A decode step of one sequence is some 240 short kernels; starting each from Python takes longer than many of them run.
A recording holds their arguments, and all memory that they name. Replaying reads what lies in the tensors of then, now.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvferry.kernels.cpu.native import Call, kernels

_ALLOCATIONS = frozenset(("aten::empty", "aten::empty_like", "aten::new_empty"))

MAX_ARGS = 24


class _Watch(TorchDispatchMode):
    """Holds every tensor that is made, and notes whether torch itself computes anything."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tensors: list[Any] = []
        self.foreign: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what keeps torch.compile out imports it first, and Triton with it: 150 MB, and a second or two

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.tensors.append(result)
        name = func._schema.name
        if name not in _ALLOCATIONS and (func._schema.is_mutable or not _is_view(result, args)):
            self.foreign.add(name)
        return result


def _is_view(result: Any, args: Any) -> bool:
    """Whether torch computed nothing: `result` is memory that the first argument had."""
    tensors = isinstance(result, torch.Tensor) and bool(args) and isinstance(args[0], torch.Tensor)
    return tensors and bool(result.untyped_storage().data_ptr() == args[0].untyped_storage().data_ptr())


class Recording:
    """What `record` has seen. Not for two threads at once."""

    def __init__(self, calls: list[Call], result: torch.Tensor, held: list[Any], num_threads: int) -> None:
        self._result, self._held = result, held
        self._table = torch.zeros(len(calls), 1 + MAX_ARGS, dtype=torch.int64)
        for row, call in zip(self._table, calls, strict=True):
            row[: 3 + len(call.args)] = torch.tensor((call.address, 0, 0, *call.args))
        self._counters = self._table[:, 1:3]
        library = ctypes.CDLL(None)
        team_size = getattr(library, "omp_get_num_threads", None) if num_threads > 1 else None
        self._num_threads = 1 if team_size is None else num_threads  # a team must know how many to wait for
        self._args = (
            self._table.data_ptr(),
            len(calls),
            self._table.stride(0) * 8,
            0 if team_size is None else _address(team_size),
            _address(library.sched_yield),
        )

    def __call__(self) -> torch.Tensor:
        """The recorded function's result: the same tensor each time, valid until the next call."""
        self._counters.zero_()
        kernels().run("replay", self._num_threads, *self._args)
        return self._result


def record(function: Callable[[], torch.Tensor]) -> tuple[Recording | None, torch.Tensor]:
    """Runs `function` -> its result, and a recording unless it did more than call kernels, which would be left out."""
    num_threads = torch.get_num_threads() if kernels().has_teams else 1
    with _Watch() as watch, kernels().recorded() as calls:
        result = function()
    if watch.foreign or any(len(call.args) + 2 > MAX_ARGS for call in calls):
        return None, result
    return Recording(calls, result, watch.tensors, num_threads), result


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0
