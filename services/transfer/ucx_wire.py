"""What the two sides of transport `ucx` send each other. Bytes only: no sockets, no threads.

The reader asks by an active message; the owner answers with one tagged message per run of blocks, so that the blocks,
adjacent or not, and their checksums cross together:

    [status u32 = 0][num_blocks u32][blocks][a checksum u64 per block][tag u64]
    [status u32 = 1][length u32]["code: message"]

Run `i` of an answer carries the tag `request.tag + i`. The tag at the end shows that the message came whole: the
reader's staging buffer may still hold an old one. All numbers are of this machine's byte order, which `_MAGIC` checks.
"""

from __future__ import annotations

import math
import secrets
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvferry.common.errors import BlockCorrupt, KvferryError, TransferFailed, from_code
from kvferry.services.transfer.copier import Blocks, copy_blocks
from kvferry.services.transfer.grpc import block_checksum

WINDOW = 6
"""Runs under way per pull: the reader has posted that many receives, the owner sends no more than that ahead."""
NUM_SPARE = 2 * WINDOW
"""Staging buffers that a side keeps for its next runs."""
_RUN_BYTES = 2**20
_MIN_BYTES = 1024
_MAGIC = 0x4B56_0002
_READ, _STOP = 0, 1
_HEAD = struct.Struct("=II")
_REQUEST = struct.Struct("=IIQQIII64s64s")
"""magic, kind, tag, block_bytes, first kv-head, number of kv-heads, num_blocks, instance id, lease id; then the block
ids, u32 each."""


def new_tag() -> int:
    """Of a pull's first run; no other pull of this process is likely to come near."""
    return secrets.randbits(40) << 24


def blocks_per_run(block_bytes: int) -> int:
    return max(1, _RUN_BYTES // block_bytes)


def message_bytes(num_blocks: int, block_bytes: int) -> int:
    """Room for a run, or for an error in its place."""
    return max(_MIN_BYTES, _HEAD.size + num_blocks * (block_bytes + 8) + 8)


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Blocks of `instance_id` to be sent. Without blocks it asks whether that instance is there: one empty run."""

    tag: int
    block_bytes: int  # of a block on the wire
    instance_id: str
    lease_id: str
    block_ids: tuple[int, ...]
    heads: range = range(0)  # of the model's kv-heads; none: whole blocks

    @property
    def num_runs(self) -> int:
        return max(1, -(-len(self.block_ids) // blocks_per_run(self.block_bytes)))

    def run(self, index: int) -> slice:
        """Which of `block_ids` are in that run."""
        size = blocks_per_run(self.block_bytes)
        return slice(index * size, min((index + 1) * size, len(self.block_ids)))

    def to_bytes(self) -> bytes:
        ids = np.asarray(self.block_ids, dtype=np.uint32)
        names = self.instance_id.encode(), self.lease_id.encode()
        heads = self.heads.start, len(self.heads)
        return _REQUEST.pack(_MAGIC, _READ, self.tag, self.block_bytes, *heads, len(ids), *names) + ids.tobytes()


def stop_message(tag: int) -> bytes:
    """The reader no longer wants the runs that are not sent yet; errors may come in their place."""
    return _REQUEST.pack(_MAGIC, _STOP, tag, 0, 0, 0, 0, b"", b"")


def parse_message(message: bytes) -> ReadRequest | int:
    """A request, or the tag of one to be stopped. Raises TransferFailed."""
    if len(message) < _REQUEST.size:
        raise TransferFailed(f"a message of {len(message)} bytes is no request")
    magic, kind, tag, block_bytes, head, num_heads, num_blocks, *names = _REQUEST.unpack_from(message)
    rest = memoryview(message)[_REQUEST.size :]
    if magic != _MAGIC or kind not in (_READ, _STOP) or len(rest) != 4 * num_blocks:
        raise TransferFailed("the reader speaks another format")
    if kind == _STOP:
        return int(tag)
    ids = tuple(np.frombuffer(rest, dtype=np.uint32).tolist())
    return ReadRequest(tag, block_bytes, _name(names[0]), _name(names[1]), ids, range(head, head + num_heads))


def _name(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def new_buffer(block_bytes: int) -> Blocks:
    """Room for any message about blocks of this size."""
    return np.empty(message_bytes(blocks_per_run(block_bytes), block_bytes), dtype=np.uint8)


class Buffers:
    """Staging memory, kept from one run to the next. For one thread."""

    def __init__(self) -> None:
        self._spare: list[Blocks] = []

    def take(self, block_bytes: int) -> Blocks:
        """Room for any message about blocks of this size."""
        size = message_bytes(blocks_per_run(block_bytes), block_bytes)
        for i in reversed(range(len(self._spare))):  # the last one used is the likeliest to be in the cache
            if len(self._spare[i]) >= size:  # the other side's degree may be any: not all are of one size
                return self._spare.pop(i)
        return np.empty(size, dtype=np.uint8)

    def give(self, message: Blocks) -> None:
        """Takes back the buffer whose first part the message is; anything else is let go."""
        if isinstance(message.base, np.ndarray) and len(self._spare) < NUM_SPARE:
            self._spare.append(message.base)


def write_run(pool: Blocks, block_ids: Sequence[int], tag: int, buffer: Blocks) -> Blocks:
    """The message with these rows of the pool, whole or of some heads, copied out of it: the first part of `buffer`."""
    num_blocks = len(block_ids)
    end = _HEAD.size + num_blocks * math.prod(pool.shape[1:])
    memory = buffer[: end + 8 * num_blocks + 8]
    _HEAD.pack_into(memory.data, 0, 0, num_blocks)
    rows = memory[_HEAD.size : end].reshape(num_blocks, *pool.shape[1:])
    if num_blocks:
        copy_blocks(pool, block_ids, rows, range(num_blocks))
    checksums = [block_checksum(row.data, block_id) for row, block_id in zip(rows, block_ids, strict=True)]
    memory[end:] = np.frombuffer(struct.pack(f"={num_blocks + 1}Q", *checksums, tag), dtype=np.uint8)
    return memory


def write_error(error: KvferryError) -> Blocks:
    text = f"{error.code}: {error.message}".encode()[: _MIN_BYTES - _HEAD.size]
    return np.frombuffer(_HEAD.pack(1, len(text)) + text, dtype=np.uint8)


def read_error(memory: Blocks) -> KvferryError | None:
    """What the owner sent instead of the run, if it did."""
    status, length = _HEAD.unpack_from(memory.data)
    if status != 1:
        return None
    code, _, message = memory[_HEAD.size : _HEAD.size + length].tobytes().decode(errors="replace").partition(": ")
    return from_code(code, message)


def read_run(memory: Blocks, block_ids: Sequence[int], block_bytes: int, tag: int) -> Blocks:
    """The blocks in a received message, [len(block_ids), block_bytes]: views of `memory`, their checksums right.

    Raises BlockCorrupt or TransferFailed.
    """
    status, count = _HEAD.unpack_from(memory.data)
    end = _HEAD.size + len(block_ids) * block_bytes
    *checksums, last = struct.unpack_from(f"={len(block_ids) + 1}Q", memory.data, end)
    if status != 0 or count != len(block_ids) or last != tag:
        raise TransferFailed(f"sent {count} of {len(block_ids)} blocks, or another run than that asked for")
    rows = memory[_HEAD.size : end].reshape(len(block_ids), block_bytes)
    for row, block_id, checksum in zip(rows, block_ids, checksums, strict=True):
        if block_checksum(row.data, block_id) != checksum:
            raise BlockCorrupt(f"block {block_id} arrived with a wrong checksum")
    return rows
