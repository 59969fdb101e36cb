"""A TCP proxy that behaves like a bad network: slow, or silent with its connections open.

    peers ──▶ 127.0.0.2:PORT ──▶ 127.0.0.1:PORT

All of 127.0.0.0/8 is this machine, so a node listens on the one address and tells its peers the other.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Self

ADDRESS = "127.0.0.2"
_PIECE_BYTES = 2**16


class Proxy:
    """For one port. Its switches hold for old and new connections, from any thread."""

    def __init__(self, port: int) -> None:
        self.num_bytes = 0
        """That the node behind it has sent."""
        self.delay_s = 0.0
        """Of each piece of at most 64 KiB, in both directions."""
        self._port = port
        self._swallows = False
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._listener = socket.create_server((ADDRESS, self._port))
        self._go(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        _end(self._listener)
        self._break_all()
        for thread in self._threads:
            thread.join(10.0)

    def swallow(self) -> None:
        """From here on everything is accepted, and nothing passes."""
        self._swallows = True

    def restore(self) -> None:
        """New connections pass; those that have lost something break."""
        self._swallows = False
        self._break_all()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # when the listener is closed
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self._port))
                self._sockets += (near, far)
                self._go(self._pump, near, far, False)
                self._go(self._pump, far, near, True)

    def _pump(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                time.sleep(self.delay_s)
                if not self._swallows:
                    sink.sendall(data)
                    self.num_bytes += len(data) * counts
        _end(source)
        _end(sink)

    def _break_all(self) -> None:
        for sock in self._sockets:
            _end(sock)
        self._sockets.clear()

    def _go(self, work: object, *args: object) -> None:
        assert callable(work)
        thread = threading.Thread(target=work, args=args, name="proxy")
        self._threads.append(thread)
        thread.start()


class Balancer:
    """A plain load balancer: connections in turn to these ports, and on to the next one where nobody listens."""

    def __init__(self, ports: Sequence[int]) -> None:
        self.num_connections = Counter[int]()
        self._ports = itertools.cycle(ports)
        self._num_ports = len(ports)
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._go(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._sockets):
            _end(sock)
        for thread in self._threads:
            thread.join(10.0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # when the listener is closed
            while True:
                near, _ = self._listener.accept()
                self._sockets.append(near)
                if (far := self._connect()) is not None:
                    self._sockets.append(far)
                    self._go(_copy, near, far)
                    self._go(_copy, far, near)
                else:
                    _end(near)

    def _connect(self) -> socket.socket | None:
        for port in itertools.islice(self._ports, self._num_ports):
            with contextlib.suppress(ConnectionRefusedError):
                found = socket.create_connection(("127.0.0.1", port))
                self.num_connections[port] += 1
                return found
        return None

    def _go(self, work: Callable[..., None], *args: socket.socket) -> None:
        thread = threading.Thread(target=work, args=args, name="balancer")
        self._threads.append(thread)
        thread.start()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(_PIECE_BYTES):
            sink.sendall(data)
    _end(source)
    _end(sink)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)  # wakes who waits in it
    sock.close()
