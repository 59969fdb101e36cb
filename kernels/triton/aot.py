"""Compiles every kernel ahead of time, without a GPU, and tells what it takes of one.

The kernels are driven by their own launchers over small tensors on the CPU, and each launch is written down instead of
run, so that what is compiled (dtypes, tiles, warps, alignments) is what a node launches. Must not run where
TRITON_INTERPRET is set: there is nothing to compile then.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvferry.kernels.triton import attention, dense, elementwise, sampling
from kvferry.kernels.triton.launch import Launch, recording

ARCHITECTURES = (80, 90, 100)
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""Of shared memory that one program may take (CUDA C programming guide, technical specifications)."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
}

_PRODUCT = re.compile(r"\b(?:wgmma\.mma_async|mma\.sync|tcgen05\.mma)[\w.:]*")


@dataclass(frozen=True, slots=True)
class Resources:
    kernel: str
    variant: str
    architecture: int
    registers: int
    stack_bytes: int  # of a thread: where registers did not suffice, it is in memory
    shared_bytes: int  # of a program
    products: tuple[str, ...]  # the instructions of the tensor cores that it uses: they fix the order inside a tile

    @property
    def problem(self) -> str | None:
        if self.stack_bytes:
            return f"spills: {self.stack_bytes} bytes of stack"
        if self.shared_bytes > SHARED_BYTES[self.architecture]:
            return f"needs {self.shared_bytes} bytes of shared memory, sm_{self.architecture} has less"
        return None


def launches(dtype: torch.dtype, head_dim: int, group: int) -> list[Launch]:
    """Of one layer and one draw of a model whose query heads share kv heads in groups; 16 tokens in a block."""
    num_heads, num_kv_heads, width = 2 * group, 2, 4096
    pool = torch.empty(4, 2, 2, num_kv_heads, 16, head_dim, dtype=dtype)
    qkv = torch.empty(3, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    norm, cos_sin = torch.empty(head_dim, dtype=dtype), torch.empty(3, head_dim)
    slots = torch.arange(3)
    hidden = torch.empty(3, width, dtype=dtype)
    matrix = torch.empty(512, width, dtype=dtype)
    tables = torch.zeros(2, 32, dtype=torch.int64)
    with recording() as found:
        plan = attention.plan_attention(pool, tables, (0, 1, 3), (400, 0), num_heads)
        for weight in (None, norm):
            query = elementwise.rotary_and_write_kv(qkv, cos_sin, pool, 0, slots, weight, weight, 1e-5)
        attention.paged_attention(query, pool, 0, plan, 0.1)
        for rows in (hidden, torch.empty(dense.CHUNK, width, dtype=dtype)):
            for bias in (None, matrix[:, 0].clone()):
                dense.matmul(rows, matrix, bias)
        elementwise.add_rms_norm(hidden, None, hidden[0], 1e-5)
        elementwise.add_rms_norm(hidden, hidden, hidden[0], 1e-5)
        elementwise.silu_and_mul(hidden)
        elementwise.copy_blocks(pool, slots, slots)
        elementwise.scatter_blocks(elementwise.gather_blocks(pool, slots), pool, slots)
        probs = torch.empty(3, 32000)
        limit = torch.empty(3)
        sampling.draw_tokens(sampling.filter_tokens(probs, limit, limit, limit), limit.double())
    return found


def compile_all(
    architectures: Sequence[int], dtypes: Sequence[torch.dtype], head_dims: Sequence[int], groups: Sequence[int]
) -> Iterator[Resources]:
    """Each different kernel once for every architecture. Raises what the compiler raises."""
    seen = set()
    for dtype, head_dim, group in product(dtypes, head_dims, groups):
        for one in launches(dtype, head_dim, group):
            source = _source(one)
            for architecture in architectures:
                key = source.hash(), str(one.options), architecture
                if key not in seen:
                    seen.add(key)
                    yield _compile(one, source, architecture)


def _source(one: Launch) -> ASTSource:
    """What the launch would compile: equal to triton's own rules of specialisation, by value and by alignment."""
    kernel = one.kernel
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}
    values = dict(zip(kernel.arg_names, one.arguments, strict=False)) | one.constants
    for i, param in enumerate(kernel.params):
        value = values[param.name]
        is_special = not param.do_not_specialize
        if param.is_constexpr or value is None or (is_special and isinstance(value, int) and value == 1):
            signature[param.name], constants[(i,)] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[param.name] = f"*{_TYPES[value.dtype]}"
            is_aligned = True
        elif isinstance(value, int):
            signature[param.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            is_aligned = is_special and value % 16 == 0
        else:
            signature[param.name], is_aligned = "fp32", False
        if is_aligned:
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constants, attributes)


def _compile(one: Launch, source: ASTSource, architecture: int) -> Resources:
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(one.options))
    usage = _resource_usage(compiled.asm["cubin"])
    return Resources(
        kernel=one.kernel.__name__,
        variant=_variant(one, source),
        architecture=architecture,
        registers=usage["REG"],
        stack_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=max(compiled.metadata.shared, usage["SHARED"]),
        products=tuple(sorted(set(_PRODUCT.findall(compiled.asm["ptx"])))),
    )


def _variant(one: Launch, source: ASTSource) -> str:
    """What tells this launch of the kernel from others."""
    types = {type_.removeprefix("*") for type_ in source.signature.values() if type_.startswith("*")}
    words = sorted(types & {"bf16", "fp16", "fp32"})[:1] or ["words"]
    for name in ("head_dim", "group", "width"):
        if isinstance(value := one.constants.get(name), int):
            words.append(f"{name} {value}")
    if one.constants.get("is_split"):
        words.append("split")
    names = [name for name in one.kernel.arg_names if name not in one.constants]
    words += [
        name.removesuffix("_ptr")
        for name, value in zip(names, one.arguments, strict=True)
        if name in ("other_ptr", "bias_ptr", "q_norm_ptr", "sources_ptr", "targets_ptr") and value is not None
    ]
    return ", ".join(words)


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """REG, STACK, SHARED, LOCAL and so on of the one function in it, by the tool that triton brings."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    function = text[text.index(" Function ") :]
    return {name: int(value) for name, value in re.findall(r"([A-Z]+)(?:\[\d\])?:(\d+)", function)}


def table(rows: Sequence[Resources]) -> str:
    lines = [f"{'kernel':20} {'variant':34} {'sm':>4} {'registers':>9} {'stack':>6} {'shared':>7}"]
    lines += [
        f"{row.kernel:20} {row.variant:34} {row.architecture:4} {row.registers:9} {row.stack_bytes:6}"
        f" {row.shared_bytes:7}{'  ' + row.problem if row.problem else ''}"
        for row in rows
    ]
    return "\n".join(lines)
