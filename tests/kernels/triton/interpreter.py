"""Kernels in Triton's interpreter, on the CPU. For tests only."""

from __future__ import annotations

from typing import Any

import numpy as np
import triton
from triton.language import bfloat16
from triton.runtime import interpreter


def import_kernels_interpreted() -> None:
    """What a kernel becomes is settled when its module is imported. No variable is left for child processes."""
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter.InterpretedFunction.__call__ = _call
    interpreter.GridExecutor._restore_args_dev = _leave  # tensors are on the CPU already: copies onto themselves
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        from kvferry.kernels.triton import attention, dense, elementwise, sampling  # noqa: F401


_patched = set[str]()


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Of a function by a kernel. The interpreter's own patches triton.language anew each time, which takes longest."""
    if self.fn.__module__ not in _patched:
        _patched.add(self.fn.__module__)
        interpreter._patch_lang(self.fn)
    return self.rewrite()(*args, **kwargs)


def _leave(self: Any, *_: object) -> None:
    pass


def _dot(self: Any, a: Any, b: Any, acc: Any, *_: object) -> Any:
    """`acc + a @ b` term after term, every row alike, as a GPU does it.

    The interpreter's own asks BLAS, whose bits depend on the index of a row, and takes bfloat16 for integers.
    """
    left, right = (_float32(operand) for operand in (a, b))
    total = acc.data.copy()
    for i in range(left.shape[1]):
        total += left[:, i : i + 1] * right[i : i + 1]
    return interpreter.TensorHandle(total, acc.dtype.scalar)


def _float32(operand: Any) -> Any:
    if operand.dtype.scalar == bfloat16:
        return (operand.data.astype(np.uint32) << 16).view(np.float32)
    return operand.data.astype(np.float32)
