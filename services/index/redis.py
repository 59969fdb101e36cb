"""The prefix index in Redis (6.2 or later).

    {ns}:nodes           set of node ids
    {ns}:node:<id>       hash number, instance, record; expires with the node's lease
    {ns}:past:<id>       sorted set of the instances that ever had this node id, by number: the fence
    {ns}:number          counter that numbers the instances
    ns:b:<block name>    packed uint32 numbers of the instances that hold the block; expires BLOCK_TTL_S after a store

A node instance gets a number that is never used again, so everything a dead or replaced instance stored is dead with
its record, without touching a block. A lookup is one round trip: the live numbers and one MGET.
The node keys share one hash slot; block keys get their tag in `_Keys.blocks` when a chain must share one.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from redis.exceptions import NoScriptError, ResponseError

from kvferry.common.errors import ConfigError, IndexUnavailable, Unavailable
from kvferry.common.nodes import NodeRecord
from kvferry.services.index.wire import Command, RedisWire

log = logging.getLogger("kvferry.index")

BLOCK_TTL_S = 3600
BATCH = 1024
"""Names per script call: bounds how long one call holds Redis up (about 3 ms)."""


class _Script:
    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    def call(self, keys: Sequence[str | bytes], *args: str | bytes | int) -> Command:
        return ("EVALSHA", self.sha, len(keys), *keys, *args)


# KEYS nodes, node, past, number; ARGV node id, instance, record, ttl ms, first number.
# -> {number, 1 if new}, or {0, 0} when a newer instance has taken over.
_ANNOUNCE = _Script("""
local number = redis.call('HGET', KEYS[2], 'number')
local current = redis.call('HGET', KEYS[2], 'instance')
local fresh = 0
if current ~= ARGV[2] then
  local newest = redis.call('ZREVRANGE', KEYS[3], 0, 0)[1]
  if newest ~= ARGV[2] and redis.call('ZSCORE', KEYS[3], ARGV[2]) then return {0, 0} end
  redis.call('SETNX', KEYS[4], ARGV[5])
  number = redis.call('INCR', KEYS[4])
  redis.call('DEL', KEYS[2])
  redis.call('ZADD', KEYS[3], number, ARGV[2])
  redis.call('ZREMRANGEBYRANK', KEYS[3], 0, -101)
  fresh = 1
end
redis.call('HSET', KEYS[2], 'number', number, 'instance', ARGV[2], 'record', ARGV[3])
redis.call('PEXPIRE', KEYS[2], ARGV[4])
redis.call('PEXPIRE', KEYS[3], 86400000)
redis.call('SADD', KEYS[1], ARGV[1])
return {tonumber(number), fresh}
""")

# KEYS nodes; ARGV prefix of node keys, field. -> {number, field, number, field, ...} of the live nodes.
_LIVE = _Script("""
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local node = redis.call('HMGET', ARGV[1] .. id, 'number', ARGV[2])
  if node[1] then
    found[#found + 1] = tonumber(node[1])
    found[#found + 1] = node[2]
  else
    redis.call('SREM', KEYS[1], id)
  end
end
return found
""")

# KEYS nodes; ARGV prefix of node keys, instance.
_WITHDRAW = _Script("""
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('HGET', ARGV[1] .. id, 'instance') == ARGV[2] then
    redis.call('DEL', ARGV[1] .. id)
    redis.call('SREM', KEYS[1], id)
  end
end
""")

_FIND = """
local function find(value)
  local at = string.find(value, ARGV[1], 1, true)
  while at and at % 4 ~= 1 do at = string.find(value, ARGV[1], at + 1, true) end
  return at
end
"""

# KEYS blocks; ARGV packed number, ttl ms.
_STORE = _Script(
    _FIND
    + """
for _, key in ipairs(KEYS) do
  local value = redis.call('GET', key) or ''
  if not find(value) then value = value .. ARGV[1] end
  redis.call('SET', key, value, 'PX', ARGV[2])
end
"""
)

# KEYS blocks; ARGV packed number.
_REMOVE = _Script(
    _FIND
    + """
for _, key in ipairs(KEYS) do
  local value = redis.call('GET', key)
  local at = value and find(value)
  if at and #value == 4 then redis.call('DEL', key)
  elseif at then redis.call('SET', key, string.sub(value, 1, at - 1) .. string.sub(value, at + 4), 'KEEPTTL') end
end
"""
)

_SCRIPTS = {script.sha: script for script in (_ANNOUNCE, _LIVE, _WITHDRAW, _STORE, _REMOVE)}


class _Keys:
    """Every key name, in one place."""

    def __init__(self, namespace: str) -> None:
        if not namespace or any(c in namespace for c in "{} \n"):
            raise ConfigError(f"namespace {namespace!r}: must not be empty, and without braces and blanks")
        self.nodes = f"{{{namespace}}}:nodes"
        self.number = f"{{{namespace}}}:number"
        self.node_prefix = f"{{{namespace}}}:node:"
        self.past_prefix = f"{{{namespace}}}:past:"
        self._block_prefix = f"{namespace}:b:".encode()

    def blocks(self, names: Iterable[bytes]) -> list[bytes]:
        prefix = self._block_prefix
        return [prefix + name for name in names]


class RedisIndex:
    """A `PrefixIndex`. Belongs to one event loop."""

    def __init__(self, url: str, namespace: str = "kvferry", *, timeout_s: float = 0.5) -> None:
        self._wire = RedisWire(url, timeout_s)
        self._keys = _Keys(namespace)
        self._numbers: dict[str, int] = {}  # instances announced through this object

    async def announce(self, record: NodeRecord, ttl_s: float) -> bool:
        keys = self._keys
        reply = await self._ask(
            _ANNOUNCE.call(
                (keys.nodes, keys.node_prefix + record.node_id, keys.past_prefix + record.node_id, keys.number),
                *(record.node_id, record.instance_id, record.to_json(), max(1, round(ttl_s * 1000))),
                # After a flush numbers start somewhere else, so that none comes twice.
                secrets.randbelow(2**31),
            )
        )
        number, fresh = reply
        if not number:
            raise Unavailable(f"node {record.node_id}: a newer instance has taken over from {record.instance_id}")
        self._numbers[record.instance_id] = number
        return bool(fresh)

    async def withdraw(self, instance_id: str) -> None:
        self._numbers.pop(instance_id, None)
        await self._ask(_WITHDRAW.call((self._keys.nodes,), self._keys.node_prefix, instance_id))

    async def nodes(self) -> list[NodeRecord]:
        reply = await self._ask(_LIVE.call((self._keys.nodes,), self._keys.node_prefix, "record"))
        records = []
        for raw in reply[1::2]:
            try:
                records.append(NodeRecord.from_json(raw))
            except ValueError as exc:
                log.warning("a node of another version is in the index and is left out: %s", exc)
        return sorted(records, key=lambda record: record.node_id)

    async def store(self, instance_id: str, names: Sequence[bytes]) -> None:
        await self._update(_STORE, instance_id, names, BLOCK_TTL_S * 1000)

    async def remove(self, instance_id: str, names: Sequence[bytes]) -> None:
        await self._update(_REMOVE, instance_id, names)

    async def match(self, names: Sequence[bytes]) -> dict[str, int]:
        if not names:
            return {}
        live, values = await self._ask_all(self._live_instances(), ("MGET", *self._keys.blocks(names)))
        instances = {number: instance.decode() for number, instance in zip(live[::2], live[1::2], strict=True)}
        return {instances[number]: run for number, run in leading_runs(values, instances).items()}

    async def aclose(self) -> None:
        await self._wire.aclose()

    async def _update(self, script: _Script, instance_id: str, names: Sequence[bytes], *args: int) -> None:
        number = self._numbers.get(instance_id) or await self._number_of(instance_id)
        if number is None:
            return
        packed = struct.pack("<I", number)
        for start in range(0, len(names), BATCH):
            keys = self._keys.blocks(names[start : start + BATCH])
            await self._ask(script.call(keys, packed, *args))

    async def _number_of(self, instance_id: str) -> int | None:
        live = await self._ask(self._live_instances())
        return dict(zip((raw.decode() for raw in live[1::2]), live[::2], strict=True)).get(instance_id)

    def _live_instances(self) -> Command:
        return _LIVE.call((self._keys.nodes,), self._keys.node_prefix, "instance")

    async def _ask(self, command: Command) -> Any:
        return (await self._ask_all(command))[0]

    async def _ask_all(self, *commands: Command) -> list[Any]:
        """Replies of one round trip (two when Redis has lost our scripts). Raises IndexUnavailable on any error."""
        replies = await self._wire.send(commands)
        if any(isinstance(reply, NoScriptError) for reply in replies):
            shas = {str(command[1]) for command in commands if command[0] == "EVALSHA"}
            loads: list[Command] = [("SCRIPT", "LOAD", _SCRIPTS[sha].source) for sha in shas]
            replies = (await self._wire.send([*loads, *commands]))[len(loads) :]
        for reply in replies:
            if isinstance(reply, ResponseError):
                raise IndexUnavailable(f"Redis at {self._wire.where}: {reply}") from reply
        return replies


def leading_runs(values: Sequence[bytes | None], live: Iterable[int]) -> dict[int, int]:
    """Packed holders per block of a chain -> how many leading blocks each live number holds (none: left out)."""
    runs: dict[int, int] = {}
    running, last = set(live), None
    for position, value in enumerate(values):
        if value == last and position:
            continue  # neighbours mostly have the same holders
        last = value
        holders = struct.unpack(f"<{len(value) // 4}I", value) if value else ()
        for number in running.difference(holders):
            running.discard(number)
            if position:
                runs[number] = position
        if not running:
            return runs
    return runs | dict.fromkeys(running, len(values)) if values else runs
