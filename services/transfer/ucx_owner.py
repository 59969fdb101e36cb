"""Transport `ucx`, owner's side: listens, and sends the leased blocks that readers ask for. Reads the pool unlocked."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from kvferry.common.errors import Cancelled, KvferryError, TransferFailed
from kvferry.common.fail_points import Action, FailPoints, spoilt
from kvferry.common.nodes import LayoutCard
from kvferry.services.transfer.copier import Blocks
from kvferry.services.transfer.heads import stripe_of, view
from kvferry.services.transfer.lease import LeaseTable
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.ucx_thread import Endpoint, Posted, Request, UcxThread
from kvferry.services.transfer.ucx_wire import (
    WINDOW,
    Buffers,
    ReadRequest,
    parse_message,
    write_error,
    write_run,
)

log = logging.getLogger("kvferry.transfer")

_START_S = 10.0


@dataclass(eq=False, slots=True)
class _Read:
    """A reader's request. `next_run` .. `stop_run` are to be sent."""

    request: ReadRequest
    stop_run: int
    active_at: float
    next_run: int = 0
    error: KvferryError | None = None
    sends: deque[Posted] = field(default_factory=deque)

    @property
    def is_done(self) -> bool:
        return self.next_run == self.stop_run and not self.sends

    def fail(self, error: KvferryError) -> None:
        """From here on the error is sent, and only as often as the reader has posted a receive for it."""
        if self.error is None:
            self.error = error
            self.stop_run = min(self.stop_run, self.next_run + WINDOW)


@dataclass(eq=False, slots=True)
class _Reader:
    """A connection that a reader has opened."""

    endpoint: Endpoint
    inbox: Request
    reads: dict[int, _Read] = field(default_factory=dict)  # tag -> what it asked for


class UcxOwner:
    """Up from its making on, until `close`. A reader that takes nothing for `timeout_s` is cut off.

    Its port is open on all interfaces (ucxx binds no other way): what guards the blocks is the lease's id.
    """

    def __init__(
        self,
        instance_id: str,
        card: LayoutCard,
        segment: PoolSegment,
        leases: LeaseTable,
        *,
        timeout_s: float = 10.0,
        fail_points: FailPoints | None = None,
    ) -> None:
        """Raises ConfigError without ucxx, TransferFailed when UCX does not start."""
        self._instance_id, self._card, self._segment, self._leases = instance_id, card, segment, leases
        self._timeout_s, self._fail_points = timeout_s, fail_points or FailPoints()
        self._readers: list[_Reader] = []
        self._buffers = Buffers()
        self._listener: object = None
        port = Future[int]()
        self._thread = UcxThread("ucx-owner", self)
        self._thread.call(lambda: self._listen(port))
        try:
            self.port = port.result(_START_S)
        except Exception as exc:
            self._thread.close()
            raise TransferFailed(f"ucx does not listen: {exc}") from exc

    def close(self) -> None:
        """Ends the reads under way and waits until nothing looks into the pool any more. Idempotent."""
        self._thread.close()

    # ---- in the thread

    def _listen(self, port: Future[int]) -> None:
        try:
            self._listener = listener = self._thread.listen(self._accept)
            port.set_result(int(listener.port))
        except Exception as exc:
            port.set_exception(exc)

    def _accept(self, endpoint: Endpoint) -> None:
        self._readers.append(_Reader(endpoint, endpoint.am_recv()))

    @property
    def is_open(self) -> bool:
        return any(reader.reads for reader in self._readers)

    def tick(self) -> bool:
        has_moved = False
        for reader in list(self._readers):
            try:
                has_moved |= self._serve(reader)
            except Exception as exc:  # this connection is over, whatever it was; the others are not
                log.info("ucx: a reader's connection ends: %s", exc)
                self._cut(reader)
        return has_moved

    def ended(self, why: str) -> None:
        del why
        for reader in list(self._readers):
            self._cut(reader)
        self._listener = None

    def _serve(self, reader: _Reader) -> bool:
        if not reader.endpoint.alive:
            raise TransferFailed("the reader is gone")
        has_moved = False
        while reader.inbox.completed:
            reader.inbox.check_error()
            self._take(reader, bytes(memoryview(reader.inbox.recv_buffer)))
            reader.inbox = reader.endpoint.am_recv()
            has_moved = True
        for tag, read in list(reader.reads.items()):
            has_moved |= self._go_on(reader, read)
            if read.is_done:
                del reader.reads[tag]
        return has_moved

    def _take(self, reader: _Reader, message: bytes) -> None:
        request = parse_message(message)
        if isinstance(request, ReadRequest):
            read = _Read(request, request.num_runs, time.monotonic())
            reader.reads[request.tag] = read
        elif stopped := reader.reads.get(request):
            stopped.fail(Cancelled("stopped by the reader"))

    def _go_on(self, reader: _Reader, read: _Read) -> bool:
        """Sends one run more, if the window allows. Whether anything has moved."""
        num_sent = len(read.sends)
        while read.sends and read.sends[0].has_ended():
            self._buffers.give(read.sends.popleft().memory)
        has_moved = len(read.sends) < num_sent
        if read.next_run < read.stop_run and len(read.sends) < WINDOW:
            memory = self._next_run(read)
            for message in self._with_faults(memory) if self._fail_points.are_on else (memory,):
                read.sends.append(self._thread.send(reader.endpoint, message, read.request.tag + read.next_run))
            read.next_run += 1
            has_moved = True
        now = time.monotonic()
        if has_moved:
            read.active_at = now
        elif now - read.active_at > self._timeout_s:
            raise TransferFailed(f"it took nothing for {self._timeout_s:g} s")
        return has_moved

    def _with_faults(self, message: Blocks) -> tuple[Blocks, ...]:
        """The message as often as it is to be sent. A delay holds up all reads: there is one thread."""
        fault = self._fail_points.hit("transfer.ucx.run")
        match fault and fault.action:
            case Action.DROP:
                return ()
            case Action.DUPLICATE:
                return message, message.copy()
            case Action.CORRUPT:
                return (np.frombuffer(spoilt(message.tobytes()), dtype=np.uint8),)
            case Action.DELAY if fault:
                time.sleep(fault.delay_s)
        return (message,)

    def _next_run(self, read: _Read) -> Blocks:
        """The lease is checked before and after the blocks are read: what is sent is of leased blocks only."""
        if read.error is None:
            try:
                return self._read_run(read.request, read.next_run)
            except KvferryError as exc:
                read.fail(exc)
        assert read.error is not None
        return write_error(read.error)

    def _read_run(self, request: ReadRequest, index: int) -> Blocks:
        if request.instance_id != self._instance_id:
            raise TransferFailed(f"asked for {request.instance_id}, found {self._instance_id}: it was restarted")
        size = self._segment.block_bytes
        stripe = stripe_of(self._card, request.heads, size) if request.heads else None
        if request.block_bytes != (size := stripe.num_bytes if stripe else size):
            raise TransferFailed(f"blocks have {size} B here, {request.block_bytes} B there")
        blocks = view(self._segment.buffer, stripe)
        block_ids = request.block_ids[request.run(index)]
        check = partial(self._leases.check, request.lease_id, block_ids)
        if not request.block_ids:
            return write_run(blocks, (), request.tag, self._buffers.take(size))
        if index == 0:
            self._leases.check(request.lease_id, request.block_ids)
        check()
        memory = write_run(blocks, block_ids, request.tag + index, self._buffers.take(size))
        check()
        return memory

    def _cut(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        self._thread.retire(reader.endpoint, (posted for read in reader.reads.values() for posted in read.sends))
