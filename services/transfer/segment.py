"""The memory of a pool: a file in shared memory that readers on the same host map, or plain memory. Knows no peer.

The file is one header page (or more), then the blocks. Its owner holds a file lock on it for life, so anyone can tell a
dead owner's file from a live one's, in other pid namespaces (containers that share /dev/shm), too. Nobody ever shortens
it: with the space reserved before the first touch, and its size checked before mapping, no access can fault (SIGBUS).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kvferry.common.errors import ConfigError, TransferFailed
from kvferry.services.transfer.copier import Blocks

_MAGIC = b"kvferry\0"
_VERSION = 1
_HEADER = struct.Struct("<8sIQQQ16s64s")
"""magic, version, num_blocks, block_bytes, blocks_offset, nonce, instance id. Little-endian, at offset 0."""

_PREFIX, _SUFFIX = "kvferry-", ".pool"
_MiB = 2**20
_MADV_POPULATE_WRITE = 23
_libc = ctypes.CDLL(None)


class PoolSegment:
    """`buffer` is the pool, [num_blocks, block_bytes] uint8, without a copy; the engine makes its tensors of it."""

    def __init__(
        self, buffer: Blocks, *, path: str | None = None, nonce: bytes = b"", blocks_offset: int = 0, fd: int = -1
    ) -> None:
        self.buffer = buffer
        self.path = path  # None: not shared, readers use another transport
        self.nonce = nonce
        self.blocks_offset = blocks_offset
        self._fd = fd  # holds the owner's lock
        self._is_entered = np.zeros(len(buffer), dtype=bool)

    @property
    def num_blocks(self) -> int:
        return int(self.buffer.shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self.buffer.shape[1])

    @property
    def size_bytes(self) -> int:
        """Of the whole file."""
        return self.blocks_offset + self.buffer.nbytes

    def prefault(self, block_ids: Sequence[int]) -> None:
        """Enters the pages of these blocks, so that who first writes there need not wait for the kernel.

        Gives up the interpreter lock, changes no byte, and does nothing on Linux before 5.14.
        """
        todo = np.unique(np.asarray(block_ids, dtype=np.intp))
        todo = todo[~self._is_entered[todo]]
        for run in np.split(todo, np.flatnonzero(np.diff(todo) != 1) + 1) if len(todo) else ():
            start = self.buffer.ctypes.data + int(run[0]) * self.block_bytes
            _enter(start, len(run) * self.block_bytes)
        self._is_entered[todo] = True

    @classmethod
    def anonymous(cls, num_blocks: int, block_bytes: int) -> PoolSegment:
        """Memory that only this process sees."""
        memory = mmap.mmap(-1, num_blocks * block_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return cls(_blocks(memory, 0, num_blocks, block_bytes))

    @classmethod
    def create(cls, shm_dir: str, instance_id: str, num_blocks: int, block_bytes: int) -> PoolSegment:
        """The file `kvferry-<pid>-<instance id>.pool` in `shm_dir`, its space reserved.

        Raises ConfigError that says what is lacking and how to mend it; then nothing is left behind, and the caller
        goes on with `anonymous`.
        """
        path = os.path.join(shm_dir, f"{_PREFIX}{os.getpid()}-{instance_id}{_SUFFIX}")
        offset = -(-_HEADER.size // mmap.PAGESIZE) * mmap.PAGESIZE
        nonce = secrets.token_bytes(16)
        header = _HEADER.pack(_MAGIC, _VERSION, num_blocks, block_bytes, offset, nonce, _id_field(instance_id))
        size = offset + num_blocks * block_bytes
        try:
            with _directory_lock(shm_dir):
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _reserve(fd, shm_dir, size)
                    memory = mmap.mmap(fd, size)
                except BaseException:
                    os.unlink(path)
                    os.close(fd)
                    raise
        except OSError as exc:
            raise ConfigError(f"no shared pool in {shm_dir}: {exc.strerror or exc}") from exc
        memory[: len(header)] = header
        return cls(
            _blocks(memory, offset, num_blocks, block_bytes), path=path, nonce=nonce, blocks_offset=offset, fd=fd
        )

    @classmethod
    def attach(cls, path: str, *, nonce: bytes, instance_id: str, num_blocks: int, block_bytes: int) -> PoolSegment:
        """A reader's view of an owner's file, read-only, alive even when the owner is gone.

        Raises TransferFailed unless it is exactly the announced segment: then the owner is on another host (or lies).
        """
        try:
            fd = _open_pool_file(path)
        except OSError as exc:
            raise TransferFailed(f"cannot open {path}: {exc.strerror}") from exc
        try:
            raw = os.pread(fd, _HEADER.size, 0)
            if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
                raise TransferFailed(f"{path} is not a pool of kvferry")
            _, version, *shape, offset, found, owner = _HEADER.unpack(raw)
            if version != _VERSION:
                raise TransferFailed(f"{path} has format {version}, this node reads {_VERSION}")
            if found != nonce or owner != _id_field(instance_id):
                raise TransferFailed(f"{path} here is not the pool of {instance_id}: not the same host")
            if shape != [num_blocks, block_bytes]:
                raise TransferFailed(f"{path} has {shape[0]} x {shape[1]} B, announced {num_blocks} x {block_bytes} B")
            size = offset + num_blocks * block_bytes
            if os.fstat(fd).st_size < size:
                raise TransferFailed(f"{path} is shorter than the {size} bytes it should have")
            memory = mmap.mmap(fd, size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        return cls(_blocks(memory, offset, num_blocks, block_bytes), nonce=nonce, blocks_offset=offset)

    @staticmethod
    def sweep(shm_dir: str) -> list[str]:
        """Removes pool files whose owner is dead (their lock is free); returns their paths."""
        removed = []
        with contextlib.suppress(FileNotFoundError), _directory_lock(shm_dir):
            for path in sorted(map(str, Path(shm_dir).glob(f"{_PREFIX}*{_SUFFIX}"))):
                with contextlib.suppress(OSError):  # vanished, another user's, or locked by a live owner
                    fd = _open_pool_file(path)
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        os.unlink(path)
                        removed.append(path)
                    finally:
                        os.close(fd)
        return removed

    def close(self) -> None:
        """Removes the file. The memory itself goes with the last array that looks into it. Idempotent."""
        if self._fd >= 0:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path or "")
            os.close(self._fd)
            self._fd = -1


def _blocks(memory: mmap.mmap, offset: int, num_blocks: int, block_bytes: int) -> Blocks:
    flat = np.frombuffer(memory, dtype=np.uint8, count=num_blocks * block_bytes, offset=offset)
    return flat.reshape(num_blocks, block_bytes)


def _enter(start: int, num_bytes: int) -> None:
    first_page = start // mmap.PAGESIZE * mmap.PAGESIZE
    length = start + num_bytes - first_page
    _libc.madvise(ctypes.c_void_p(first_page), ctypes.c_size_t(length), ctypes.c_int(_MADV_POPULATE_WRITE))


def _id_field(instance_id: str) -> bytes:
    raw = instance_id.encode()
    if len(raw) > 64:
        raise ConfigError(f"instance id {instance_id!r} is longer than 64 bytes")
    return raw.ljust(64, b"\0")


@contextlib.contextmanager
def _directory_lock(shm_dir: str) -> Iterator[None]:
    """One process at a time creates or sweeps: no sweep sees a half-made file, no two reservations starve each other.

    Held for as long as the kernel takes to reserve one pool.
    """
    fd = os.open(shm_dir, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _open_pool_file(path: str) -> int:
    """Read-only. The path comes from a peer: it must not follow links, wait on a pipe, or open a device."""
    name = os.path.basename(path)
    if not (name.startswith(_PREFIX) and name.endswith(_SUFFIX)):
        raise OSError(errno.EINVAL, "not the name of a pool file")
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a file")
    return fd


def _reserve(fd: int, shm_dir: str, size: int) -> None:
    """Takes the space now. The look at what is free only spares the kernel from filling memory in vain."""
    try:
        if _free_bytes(shm_dir) < size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.posix_fallocate(fd, 0, size)
    except OSError as exc:
        if exc.errno != errno.ENOSPC:
            raise
        raise ConfigError(
            f"{shm_dir} is too small for a shared pool: {size} bytes ({size / _MiB:.0f} MiB) needed, "
            f"{_free_bytes(shm_dir)} free. Enlarge it (docker: --shm-size; kubernetes: an emptyDir with medium Memory "
            f"at {shm_dir}), or lower --kv-cache-memory, or point --shm-dir at another tmpfs"
        ) from exc


def _free_bytes(shm_dir: str) -> int:
    info = os.statvfs(shm_dir)
    return info.f_bavail * info.f_frsize
