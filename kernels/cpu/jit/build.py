"""Compiles all kernels and writes them to standard output, as a zip archive of object files.

Run as a program, so that the compiler and its 100 MB never enter a process that serves. For this machine's processor,
or for the one that the arguments name: `python -m kvferry.kernels.cpu.jit.build aarch64-unknown-linux-gnu neoverse-n1`.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from typing import Any

from llvmlite import binding
from numba import cfunc, types

from kvferry.kernels.cpu.jit import attention, elementwise, matmul, narrow, replay, rows, sampling
from kvferry.kernels.cpu.native import host_machine

KERNELS: tuple[Callable[..., None], ...] = (
    matmul.dense,
    narrow.narrow_dense,
    replay.replay,
    attention.paged_attention,
    elementwise.add_rms_norm,
    elementwise.rotary_and_write_kv,
    elementwise.silu_and_mul,
    rows.copy_rows,
    sampling.filter_tokens,
)


def compile_kernel(kernel: Callable[..., None], machine: binding.TargetMachine) -> tuple[str, bytes]:
    """The symbol of a C function `void (int64_t arguments)`, and the object file that holds it."""
    compiled: Any = cfunc(types.void(types.intp), error_model="numpy")(kernel)
    module = binding.parse_assembly(compiled.inspect_llvm())
    options = binding.create_pipeline_tuning_options(speed_level=3)
    options.slp_vectorization = options.loop_vectorization = options.loop_unrolling = False
    passes = binding.create_pass_builder(machine, options)
    passes.getModulePassManager().run(module, passes)
    return compiled.native_name, machine.emit_object(module)


def machine_for(triple: str, processor: str) -> binding.TargetMachine:
    """By LLVM's names. Raises RuntimeError for a triple that it does not know."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    return binding.Target.from_triple(triple).create_target_machine(cpu=processor, opt=3, jit=True)


def main() -> None:
    machine = machine_for(*sys.argv[1:]) if len(sys.argv) > 1 else host_machine()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as files:
        for kernel in KERNELS:
            symbol, code = compile_kernel(kernel, machine)
            files.writestr(f"{kernel.__name__}/{symbol}", code)
    sys.stdout.buffer.write(archive.getvalue())


if __name__ == "__main__":
    main()
