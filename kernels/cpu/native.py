"""Machine code of the kernels in `jit/`: compiled once per machine, kept in the user's cache, run on torch's threads.

A kernel is a C function of one argument, the address of int64 arguments. The first two count: the next piece of work,
and the next share of scratch memory. Every thread of a team takes pieces until none is left, so a row's bits must not
depend on who computes it. The team is the one that torch's own operations use (libgomp keeps it with the calling
thread): a second pool of threads would take the cores from it, and from libgomp its spinning.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import io
import logging
import os
import platform
import struct
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from time import perf_counter

from llvmlite import binding

from kvferry.common.models import cache_dir

log = logging.getLogger("kvferry.kernels")

_SOURCES = Path(__file__).parent / "jit"
_COMPILE_TIMEOUT_S = 300


@dataclass(frozen=True, slots=True)
class Call:
    """A kernel's address and its arguments but for the counters."""

    address: int
    args: tuple[int, ...]


class Kernels:
    """The loaded kernels by name."""

    def __init__(self, archive: bytes) -> None:
        """Raises what zipfile, llvmlite or the linker raise on a damaged archive."""
        self._engine = binding.create_mcjit_compiler(binding.parse_assembly(""), host_machine())
        symbols: dict[str, str] = {}
        with zipfile.ZipFile(io.BytesIO(archive)) as files:
            for entry in files.namelist():
                name, symbols[name] = entry.split("/")
                self._engine.add_object_file(binding.ObjectFileRef.from_data(files.read(entry)))
        self._engine.finalize_object()
        self._address = {name: self._engine.get_function_address(symbol) for name, symbol in symbols.items()}
        kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # calls let go of the interpreter lock
        self._function = {name: kind(address) for name, address in self._address.items()}
        self._recording = threading.local()

    @cached_property
    def _parallel(self) -> ctypes._NamedFuncPointer | None:
        return _team_launcher()  # not before there is work for a team: torch is here then, and its OpenMP with it

    @property
    def has_teams(self) -> bool:
        """Whether more than one thread ever runs a kernel."""
        return self._parallel is not None

    @contextmanager
    def recorded(self) -> Iterator[list[Call]]:
        """Lists what this thread runs meanwhile."""
        calls: list[Call] = []
        self._recording.calls = calls
        try:
            yield calls
        finally:
            del self._recording.calls

    def run(self, name: str, num_threads: int, *args: int) -> None:
        """`args` are what follows the two counters: addresses, numbers, and the bits of a float32."""
        if (calls := getattr(self._recording, "calls", None)) is not None:
            calls.append(Call(self._address[name], args))
        memory = (ctypes.c_int64 * (2 + len(args)))(0, 0, *args)
        if num_threads > 1 and self._parallel is not None:
            self._parallel(self._address[name], memory, num_threads, 0)
        else:
            self._function[name](memory)


@cache
def float_bits(value: float) -> int:
    """A float32 as an argument of a kernel."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    return int(bits)


def _team_launcher() -> ctypes._NamedFuncPointer | None:
    """`GOMP_parallel(function, argument, num_threads, flags)` of torch's OpenMP; None if it has none of GNU's kind."""
    try:
        launch = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):
        return None
    launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    launch.restype = None
    return launch


def host_machine() -> binding.TargetMachine:
    """Generates code for the processor that this process runs on."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    return binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(), features=binding.get_host_cpu_features().flatten(), opt=3, jit=True
    )


def compiler_version() -> str:
    return f"numba{version('numba')}-llvmlite{version('llvmlite')}"


@cache
def kernels() -> Kernels:
    """From the cache, or compiled now, which takes seconds. Raises RuntimeError if they cannot be compiled."""
    path = cache_dir() / "kernels" / f"{_digest()}.zip"
    with suppress(Exception):  # absent, or damaged: compiled again
        return Kernels(path.read_bytes())
    with _compiling_alone(path.with_suffix(".lock")):
        with suppress(Exception):  # another process has compiled them meanwhile
            return Kernels(path.read_bytes())
        start = perf_counter()
        archive = _compile()
        log.info("compiled the CPU kernels in %.1f s", perf_counter() - start)
        loaded = Kernels(archive)
        try:
            _write(path, archive)
        except OSError as exc:
            log.warning("the compiled kernels cannot be kept, every start will compile them: %s", exc)
    return loaded


@contextmanager
def _compiling_alone(path: Path) -> Iterator[None]:
    """One process at a time, where the cache can be written; the others wait for its result."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _digest() -> str:
    """Names all that the machine code depends on."""
    digest = hashlib.blake2b(digest_size=16)
    parts = (compiler_version(), platform.python_version(), binding.get_host_cpu_name())
    digest.update("\n".join((*parts, binding.get_host_cpu_features().flatten())).encode())
    for source in sorted(_SOURCES.glob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


def _compile() -> bytes:
    # LLVM runs once, over whole kernels, in `build.py`: numba would run it for each helper of each kernel
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "NUMBA_OPT": "0"}
    command = (sys.executable, "-m", "kvferry.kernels.cpu.jit.build")
    try:
        done = subprocess.run(command, env=environ, capture_output=True, timeout=_COMPILE_TIMEOUT_S, check=True)
    except subprocess.CalledProcessError as exc:
        log.error("%s", exc.stderr.decode(errors="replace"))
        raise RuntimeError("the CPU kernels do not compile; the log says why") from exc
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise RuntimeError(f"the CPU kernels cannot be compiled: {exc}") from exc
    return done.stdout


def _write(path: Path, archive: bytes) -> None:
    """Whole or not at all: others may read it at any moment."""
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        try:
            file.write(archive)
            file.flush()
            os.replace(file.name, path)
        except OSError:
            os.unlink(file.name)
            raise
