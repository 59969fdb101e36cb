"""What runs inside Redis. Each call touches keys of one hash slot."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from kvferry.services.index.wire import Command


class Script:
    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()

    def call(self, keys: Sequence[str | bytes], *args: str | bytes | int) -> Command:
        return ("EVALSHA", self.sha, len(keys), *keys, *args)


# KEYS nodes, node, past, number, memory; ARGV node id, instance, record, ttl ms, first number, 1 to begin anew.
# -> {number, 1 if new}, or {0, 0} when a newer instance has taken over.
ANNOUNCE = Script("""
local number = redis.call('HGET', KEYS[2], 'number')
local current = redis.call('HGET', KEYS[2], 'instance')
local fresh = 0
if current ~= ARGV[2] or ARGV[6] == '1' then
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
redis.call('SETNX', KEYS[5], ARGV[5])
if redis.call('PTTL', KEYS[5]) < tonumber(ARGV[4]) then redis.call('PEXPIRE', KEYS[5], ARGV[4]) end
return {tonumber(number), fresh}
""")

# KEYS nodes, number; ARGV prefix of node keys, field, the counter if it is known.
# -> {the counter, number, field, number, field, ...} of who lives; the counter alone where it is the known one.
LIVE = Script("""
local found = {redis.call('GET', KEYS[2]) or ''}
if ARGV[3] == found[1] then return found end
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

# KEYS nodes, number; ARGV prefix of node keys, instance.
WITHDRAW = Script("""
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  if redis.call('HGET', ARGV[1] .. id, 'instance') == ARGV[2] then
    redis.call('DEL', ARGV[1] .. id)
    redis.call('SREM', KEYS[1], id)
    redis.call('INCR', KEYS[2])
  end
end
""")

# What is at most applied once, and only in its turn. KEYS at, blocks; ARGV packed number, turn, life of `at` in ms, ...
# -> the number of the last turn that was taken.
_IN_TURN = """
local at = tonumber(redis.call('GET', KEYS[1]) or 0)
if at ~= ARGV[2] - 1 then return at end
if at == 0 then redis.call('SET', KEYS[1], 1, 'PX', ARGV[3]) else redis.call('INCR', KEYS[1]) end
-- Holders are in ascending order, so that equal ones have equal strings. -> where ours is or belongs, whether it is.
local function find(value)
  local low, high = 0, #value / 4
  if high == 0 or string.sub(value, -4) < ARGV[1] then return high * 4 + 1, false end
  while low < high do
    local middle = math.floor((low + high) / 2)
    local there = string.sub(value, middle * 4 + 1, middle * 4 + 4)
    if there == ARGV[1] then return middle * 4 + 1, true end
    if there < ARGV[1] then low = middle + 1 else high = middle end
  end
  return low * 4 + 1, false
end
"""

# ... ttl of blocks in ms.
STORE = Script(
    _IN_TURN
    + """
for i = 2, #KEYS do
  local value = redis.call('GET', KEYS[i])
  if not value then value = ARGV[1]
  else
    local place, held = find(value)
    if not held then value = string.sub(value, 1, place - 1) .. ARGV[1] .. string.sub(value, place) end
  end
  redis.call('SET', KEYS[i], value, 'PX', ARGV[4])
end
return at + 1
"""
)

REMOVE = Script(
    _IN_TURN
    + """
for i = 2, #KEYS do
  local value = redis.call('GET', KEYS[i])
  local place, held = 0, false
  if value then place, held = find(value) end
  if held and #value == 4 then redis.call('DEL', KEYS[i])
  elseif held then
    redis.call('SET', KEYS[i], string.sub(value, 1, place - 1) .. string.sub(value, place + 4), 'KEEPTTL')
  end
end
return at + 1
"""
)

# KEYS the first block of a chain; ARGV prefix of block keys, all names in one, bytes per name, how many to read.
# -> {position, holders, position, holders, ...}: whoever holds a block holds those before it, so that where two blocks
# have the same holders those between them have no others, and the rest is found by halving, the widest gaps first.
MATCH = Script("""
local prefix, names, width, most = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local found, queue, at = {}, {}, 1
local function holders(i)
  local value = redis.call('GET', prefix .. string.sub(names, i * width + 1, (i + 1) * width)) or ''
  found[#found + 1] = i
  found[#found + 1] = value
  return value
end
local last = #names / width - 1
local first = holders(0)
if last == 0 or first == '' then return found end
queue[1] = {0, first, last, holders(last)}
while queue[at] and #found < 2 * most do
  local low, at_low, high, at_high = unpack(queue[at])
  at = at + 1
  if at_low ~= at_high and high - low > 1 then
    local middle = math.floor((low + high) / 2)
    local value = holders(middle)
    queue[#queue + 1] = {low, at_low, middle, value}
    if value ~= '' then queue[#queue + 1] = {middle, value, high, at_high} end
  end
end
return found
""")

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# KEYS prompts with one first block, by when they are forgotten in ms; ARGV prompt, ttl in ms, how many to remember.
EXPECT = Script(
    _NOW
    + """
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
redis.call('ZADD', KEYS[1], 'GT', now + ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -1 - ARGV[3])
redis.call('PEXPIREAT', KEYS[1], redis.call('ZREVRANGE', KEYS[1], 0, 0, 'WITHSCORES')[2])
"""
)

# KEYS as before; ARGV how many at most. -> those that are not forgotten.
EXPECTED = Script(_NOW + "return redis.call('ZREVRANGEBYSCORE', KEYS[1], '+inf', '(' .. now, 'LIMIT', 0, ARGV[1])")

# KEYS blocks; ARGV newest live number, each live number. Numbers that are not alive and older than the newest never
# come back; newer ones may belong to a node that has come since.
PRUNE = Script("""
local newest, live = tonumber(ARGV[1]), {}
for i = 2, #ARGV do live[tonumber(ARGV[i])] = true end
for _, key in ipairs(KEYS) do
  local value, kept = redis.call('GET', key), {}
  for at = 1, #(value or ''), 4 do
    local number = math.floor(struct.unpack('>I4', value, at) / 4)
    if live[number] or number > newest then kept[#kept + 1] = string.sub(value, at, at + 3) end
  end
  if #kept == 0 then redis.call('DEL', key)
  elseif #kept * 4 < #value then redis.call('SET', key, table.concat(kept), 'KEEPTTL') end
end
""")

SCRIPTS = {script.sha: script for script in (ANNOUNCE, LIVE, WITHDRAW, STORE, REMOVE, MATCH, EXPECT, EXPECTED, PRUNE)}
