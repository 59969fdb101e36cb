"""gRPC without sockets or time: every message waits in flight until the test delivers, loses or repeats it.

`Wire.channel` stands for a channel, `Host` for a server. They do what grpc.aio does, also where that is awkward: a read
that is cancelled cancels its call, and a write on a call that has ended raises InvalidStateError.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import grpc

NODE: contextvars.ContextVar[str] = contextvars.ContextVar("node", default="")
"""The running node instance that the current task belongs to."""

Item = tuple[Any, ...]
OPEN, CANCEL = ("open",), ("cancel",)


def error(code: grpc.StatusCode, details: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@dataclass(eq=False)
class Lane:
    """One direction of a call: what is in flight, then what has arrived and waits to be read."""

    in_flight: deque[Item] = field(default_factory=deque)
    arrived: asyncio.Queue[Item] = field(default_factory=asyncio.Queue)


@dataclass(eq=False)
class Call:
    """One RPC, seen by its client; `Context` is what the servicer sees of it."""

    path: str
    wire: Wire
    address: str
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]
    client: str
    server: str = ""
    up: Lane = field(default_factory=Lane)
    down: Lane = field(default_factory=Lane)
    handler: asyncio.Task[None] | None = None
    ended: Item | None = None  # as the client has read it: ("end", code, details)
    is_done: bool = False  # its end has arrived, read or not

    def __post_init__(self) -> None:
        self.wire.calls.append(self)
        self.send(self.up, OPEN)

    def send(self, lane: Lane, item: Item) -> None:
        """The dead are silent."""
        if (self.client if lane is self.up else self.server) not in self.wire.dead:
            lane.in_flight.append(item)

    async def write(self, message: Any) -> None:
        if self.ended is not None or self.is_done:
            raise asyncio.InvalidStateError("RPC already finished.")
        self.send(self.up, ("message", self.encode(message)))

    async def read(self) -> Any:
        if self.ended is None:
            try:
                item = await self.down.arrived.get()
            except asyncio.CancelledError:
                self.cancel()
                raise
            if item[0] == "message":
                return self.decode(item[1])
            self.ended = item
        _, code, details = self.ended
        if code is grpc.StatusCode.CANCELLED:
            raise asyncio.CancelledError
        if code is not grpc.StatusCode.OK:
            raise error(code, details)
        return grpc.aio.EOF

    def cancel(self) -> None:
        if self.ended is None:
            self.ended = ("end", grpc.StatusCode.CANCELLED, "cancelled here")
            self.down.arrived.put_nowait(self.ended)
            self.send(self.up, CANCEL)

    def breaks(self) -> None:
        """The connection is gone: both ends hear of it, whatever was in flight does not arrive."""
        self.up.in_flight = deque((CANCEL,))
        self.down.in_flight = deque((("end", grpc.StatusCode.UNAVAILABLE, "connection reset"),))


class Context:
    def __init__(self, call: Call, decode: Callable[[bytes], Any], encode: Callable[[Any], bytes]) -> None:
        self._call, self._decode, self._encode = call, decode, encode

    async def read(self) -> Any:
        item = await self._call.up.arrived.get()
        return self._decode(item[1]) if item[0] == "message" else grpc.aio.EOF

    async def write(self, message: Any) -> None:
        self._call.send(self._call.down, ("message", self._encode(message)))

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self._call.send(self._call.down, ("end", code, details))
        raise grpc.aio.AbortError


class Channel:
    """As much of `grpc.aio.Channel` as the generated stubs and the puller use."""

    def __init__(self, wire: Wire, address: str) -> None:
        self._wire, self._address = wire, address

    def _new(self, path: str, encode: Any, decode: Any) -> Call:
        return Call(path, self._wire, self._address, encode, decode, NODE.get())

    def stream_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return lambda: self._new(path, request_serializer, response_deserializer)

    def unary_stream(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        def start(request: Any) -> Call:
            call = self._new(path, request_serializer, response_deserializer)
            call.send(call.up, ("message", request_serializer(request)))
            return call

        return start

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        start = self.unary_stream(path, request_serializer, response_deserializer)

        async def ask(request: Any) -> Any:
            call = start(request)
            reply = await call.read()
            if reply is grpc.aio.EOF:
                raise error(grpc.StatusCode.INTERNAL, "no message")
            call.cancel()
            return reply

        return ask

    async def close(self) -> None:
        """Calls under way are left to end by themselves."""


class Host:
    """Servicers of one node instance, behind an address."""

    def __init__(self, instance: str) -> None:
        self.instance = instance
        self.handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered ones are enough."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.handlers |= {f"/{service}/{name}": handler for name, handler in handlers.items()}


class Wire:
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.hosts: dict[str, Host] = {}
        self.dead: set[str] = set()

    def channel(self, address: str) -> Any:
        return Channel(self, address)

    def lanes(self, *paths: str) -> list[tuple[Call, Lane]]:
        """Those with something in flight, oldest call first; of these methods only, if any are named."""
        calls = [call for call in self.calls if not paths or call.path.rsplit("/", 1)[1] in paths]
        return [(call, lane) for call in calls for lane in (call.up, call.down) if lane.in_flight]

    def deliver(self, call: Call, lane: Lane) -> None:
        """Must run in the event loop."""
        item = lane.in_flight.popleft()
        if lane is call.down:
            if call.client not in self.dead:
                lane.arrived.put_nowait(item)
                call.is_done |= item[0] == "end"
        elif item == OPEN:
            self._open(call)
        elif call.server not in self.dead and call.handler is not None:
            lane.arrived.put_nowait(item)
            if item == CANCEL:
                call.handler.cancel()

    def crash(self, instance: str, *, half_open: bool) -> None:
        """Nothing of this instance is sent any more; its peers hear of it unless the network is half open."""
        self.dead.add(instance)
        for call in self.calls:
            mine, theirs = (call.up, call.down) if call.client == instance else (call.down, call.up)
            if instance in (call.client, call.server):
                theirs.in_flight.clear()
                if not half_open:
                    mine.in_flight.append(CANCEL if mine is call.up else _reset())

    def forget_ended(self) -> None:
        self.calls = [call for call in self.calls if call.up.in_flight or call.down.in_flight or _is_alive(call)]

    def _open(self, call: Call) -> None:
        host = self.hosts.get(call.address)
        if host is None or host.instance in self.dead:
            call.down.in_flight.append(_reset())
            return
        call.server = host.instance
        context = contextvars.copy_context()
        context.run(NODE.set, host.instance)
        handler = host.handlers[call.path]
        call.handler = asyncio.get_running_loop().create_task(_serve(call, handler), context=context)


def _reset() -> Item:
    return ("end", grpc.StatusCode.UNAVAILABLE, "connection refused or reset")


def _is_alive(call: Call) -> bool:
    return call.ended is None or (call.handler is not None and not call.handler.done())


async def _serve(call: Call, handler: Any) -> None:
    context = Context(call, handler.request_deserializer, handler.response_serializer)
    end: Item = ("end", grpc.StatusCode.OK, "")
    try:
        if handler.stream_stream:
            await handler.stream_stream(None, context)
        else:
            async for reply in _replies(handler, await context.read(), context):
                await context.write(reply)
    except grpc.aio.AbortError:
        return
    except asyncio.CancelledError:
        end = ("end", grpc.StatusCode.CANCELLED, "cancelled")
        raise
    except Exception as exc:
        end = ("end", grpc.StatusCode.UNKNOWN, repr(exc))
        raise
    finally:
        if not call.down.in_flight or call.down.in_flight[-1][0] != "end":
            call.send(call.down, end)


async def _replies(handler: Any, request: Any, context: Context) -> Any:
    if handler.unary_unary:
        yield await handler.unary_unary(request, context)
        return
    replies = handler.unary_stream(request, context)
    async with contextlib.aclosing(replies):
        async for reply in replies:
            yield reply


def pick(found: Iterable[Any], number: int) -> Any:
    """One of them, by a number that hypothesis can shrink."""
    options = list(found)
    return options[number % len(options)] if options else None
