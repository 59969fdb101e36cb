"""Transport `ucx`, reader's side: RDMA, TCP or shared memory, whatever UCX finds between the two. Extra `kvferry[ucx]`.

UCX writes into staging buffers of this file alone. A run that has come is checked, then copied into its blocks by the
transport's thread, under the pull's lock; so once `stop` has had that lock, no write into the pool can happen, whatever
is still posted. A stopped pull goes on draining until the owner has answered each posted receive; an owner that stays
silent loses its connection, which cancels them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from kvferry.common.errors import KvferryError, TransferFailed
from kvferry.services.transfer.base import Peer, was_cancelled
from kvferry.services.transfer.copier import Blocks, copy_blocks
from kvferry.services.transfer.heads import view
from kvferry.services.transfer.segment import PoolSegment
from kvferry.services.transfer.ucx_thread import Endpoint, Posted, UcxThread, load_ucxx
from kvferry.services.transfer.ucx_wire import (
    WINDOW,
    Buffers,
    ReadRequest,
    message_bytes,
    new_tag,
    read_error,
    read_run,
    stop_message,
)


@dataclass(eq=False, slots=True)
class _Pull:
    """One `pull`. Its future ends in the loop; the rest belongs to the thread, except `stop`."""

    source: Peer
    request: ReadRequest
    dst_block_ids: Sequence[int]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    active_at: float
    next_run: int = 0  # to be posted
    num_landed: int = 0  # runs
    receives: deque[Posted] = field(default_factory=deque)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_stopped: bool = False

    def stop(self) -> None:
        """No write after this has returned."""
        with self.lock:
            self.is_stopped = True

    def land(self, rows: Blocks, pool: Blocks) -> None:
        part = self.source.part
        mine = view(pool, part.mine if part else None)
        with self.lock:
            if len(rows) and not self.is_stopped:
                dst = self.dst_block_ids[self.request.run(self.num_landed)]
                copy_blocks(rows.reshape(len(rows), *mine.shape[1:]), range(len(rows)), mine, dst)

    def end(self, error: KvferryError | None = None) -> None:
        """Tells the one who waits. Only the first call counts."""
        self.stop()
        with contextlib.suppress(RuntimeError):  # the loop has been closed: nobody waits
            self.loop.call_soon_threadsafe(self._tell, error)

    def _tell(self, error: KvferryError | None) -> None:
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)


@dataclass(eq=False, slots=True)
class _Connection:
    """To one instance. `pulls` are those that have receives posted, whether anybody still waits for them or not."""

    source: Peer
    endpoint: Endpoint
    pulls: list[_Pull] = field(default_factory=list)
    messages: deque[Posted] = field(default_factory=deque)  # of ours, under way
    is_dropped: bool = False


class UcxTransport:
    name = "ucx"

    def __init__(self, segment: PoolSegment, *, timeout_s: float) -> None:
        """Raises ConfigError without ucxx."""
        load_ucxx()
        self._own = segment
        self._timeout_s = timeout_s  # longest silence of the owner
        self._thread: UcxThread | None = None  # from the first pull on
        self._starting: asyncio.Task[UcxThread] | None = None
        self._is_closed = False
        self._connections: list[_Connection] = []
        self._buffers = Buffers()

    async def open(self, source: Peer) -> None:
        """Connects, and asks whether it is the instance that the handshake named."""
        await self._pull(source, "", (), ())

    async def pull(
        self, source: Peer, lease_id: str, src_block_ids: Sequence[int], dst_block_ids: Sequence[int]
    ) -> None:
        await self._pull(source, lease_id, tuple(src_block_ids), tuple(dst_block_ids))

    def drop(self, instance_id: str) -> None:
        if self._thread is not None:
            with contextlib.suppress(TransferFailed):  # closed: everything is forgotten
                self._thread.call(partial(self._drop, instance_id))

    async def aclose(self) -> None:
        self._is_closed = True
        if self._starting is not None:
            with contextlib.suppress(TransferFailed):
                thread = await self._starting
                await asyncio.to_thread(thread.close)

    async def _pull(self, source: Peer, lease_id: str, src: tuple[int, ...], dst: tuple[int, ...]) -> None:
        if source.ucx_port is None:
            raise TransferFailed(f"{source} does not listen for ucx")
        part = source.part
        size, heads = (part.mine.num_bytes, part.heads) if part else (self._own.block_bytes, range(0))
        request = ReadRequest(new_tag(), size, source.instance_id, lease_id, src, heads)
        loop, thread = asyncio.get_running_loop(), await self._started()
        pull = _Pull(source, request, dst, loop, loop.create_future(), time.monotonic())
        thread.call(partial(self._begin, thread, pull))
        try:
            await pull.future
        except asyncio.CancelledError as exc:
            pull.stop()
            with contextlib.suppress(TransferFailed):
                thread.call(partial(self._stop, thread, pull))
            if was_cancelled():
                raise
            raise TransferFailed(f"{source}: the read was stopped") from exc

    async def _started(self) -> UcxThread:
        """Made in a thread: UCX looks at all devices of the machine, which takes a tenth of a second and more."""
        if self._is_closed:
            raise TransferFailed("transport ucx is closed")
        if self._starting is None or (self._starting.done() and self._starting.exception() is not None):
            self._starting = asyncio.create_task(asyncio.to_thread(UcxThread, "ucx", self))
        self._thread = await asyncio.shield(self._starting)
        return self._thread

    # ---- in the thread

    @property
    def is_open(self) -> bool:
        return any(connection.pulls for connection in self._connections)

    def tick(self) -> bool:
        thread, has_moved = self._thread, False
        if thread is None:  # its making has not returned yet
            return False
        for connection in list(self._connections):
            try:
                has_moved |= self._go_on(thread, connection)
                if connection.is_dropped and not connection.pulls:
                    self._cut(thread, connection, TransferFailed(f"{connection.source} was dropped"))
            except Exception as exc:  # this connection is over, whatever it was; the others are not
                self._cut(thread, connection, exc)
        return has_moved

    def ended(self, why: str) -> None:
        for connection in list(self._connections):
            assert self._thread is not None
            self._cut(self._thread, connection, TransferFailed(f"transport ucx is {why}"))

    def _begin(self, thread: UcxThread, pull: _Pull) -> None:
        if pull.is_stopped:
            return
        try:
            connection = self._connection(thread, pull.source)
        except Exception as exc:
            pull.end(TransferFailed(f"{pull.source}: ucx does not connect: {exc}"))
            return
        connection.pulls.append(pull)
        try:
            for _ in range(WINDOW):
                self._post(thread, connection, pull)
            connection.messages.append(thread.send_message(connection.endpoint, pull.request.to_bytes()))
            pull.active_at = time.monotonic()  # what was done for it here is not the owner's silence
        except Exception as exc:
            self._cut(thread, connection, exc)

    def _connection(self, thread: UcxThread, source: Peer) -> _Connection:
        for connection in self._connections:
            if connection.source.instance_id == source.instance_id and not connection.is_dropped:
                return connection
        assert source.ucx_port is not None
        host = source.address.rpartition(":")[0].strip("[]")
        connection = _Connection(source, thread.connect(host, source.ucx_port))
        self._connections.append(connection)
        return connection

    def _drop(self, instance_id: str) -> None:
        for connection in self._connections:
            if connection.source.instance_id == instance_id:
                connection.is_dropped = True

    def _stop(self, thread: UcxThread, pull: _Pull) -> None:
        for connection in list(self._connections):
            if pull in connection.pulls:
                try:
                    connection.messages.append(thread.send_message(connection.endpoint, stop_message(pull.request.tag)))
                except Exception as exc:
                    self._cut(thread, connection, exc)

    def _go_on(self, thread: UcxThread, connection: _Connection) -> bool:
        if not connection.endpoint.alive:
            raise TransferFailed("the connection broke")
        while connection.messages and connection.messages[0].has_ended():
            connection.messages.popleft()
        has_moved = False
        for pull in list(connection.pulls):
            if pull.receives[0].has_ended():
                has_moved = True
                self._receive(thread, connection, pull)
                if not pull.receives:
                    connection.pulls.remove(pull)
            elif time.monotonic() - pull.active_at > self._timeout_s:
                raise TransferFailed(f"sent nothing for {self._timeout_s:g} s")
        return has_moved

    def _post(self, thread: UcxThread, connection: _Connection, pull: _Pull) -> None:
        """A receive for the next run, if there is one."""
        request, index = pull.request, pull.next_run
        if index < request.num_runs:
            num_blocks = len(request.block_ids[request.run(index)])
            size = message_bytes(num_blocks, request.block_bytes)
            memory = self._buffers.take(request.block_bytes)
            pull.receives.append(thread.receive(connection.endpoint, memory[:size], request.tag + index))
            pull.next_run += 1

    def _receive(self, thread: UcxThread, connection: _Connection, pull: _Pull) -> None:
        """The run that has come. After the owner's error no more are posted: it answers those that are."""
        request, memory = pull.request, pull.receives.popleft().memory
        pull.active_at = time.monotonic()
        index = pull.next_run - len(pull.receives) - 1
        if index == pull.num_landed:  # else an earlier one was an error
            if error := read_error(memory):
                pull.end(type(error)(f"{pull.source}: {error.message}"))
            else:
                self._land(pull, memory, index)
                self._post(thread, connection, pull)
        if pull.num_landed == request.num_runs:
            pull.end()
        self._buffers.give(memory)

    def _land(self, pull: _Pull, memory: Blocks, index: int) -> None:
        """Raises what also ends the connection: its owner goes on sending what nobody is going to receive."""
        request = pull.request
        try:
            rows = read_run(memory, request.block_ids[request.run(index)], request.block_bytes, request.tag + index)
        except TransferFailed as exc:
            pull.end(type(exc)(f"{pull.source}: {exc.message}"))
            raise
        pull.land(rows, self._own.buffer)
        pull.num_landed += 1

    def _cut(self, thread: UcxThread, connection: _Connection, error: Exception) -> None:
        self._connections.remove(connection)
        posted = [receive for pull in connection.pulls for receive in pull.receives]
        thread.retire(connection.endpoint, (*posted, *connection.messages))
        for pull in connection.pulls:
            pull.end(TransferFailed(f"{connection.source}: ucx: {error}"))
