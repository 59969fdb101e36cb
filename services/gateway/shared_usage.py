"""What an API key uses of its limits on all gateways together: one round trip to Redis for each request, one behind it.

Each gateway tells how many requests of the key it has in flight, under a lease: those of one that dies are given back
when that ends. Where Redis is slow or away, and for keys without limits, a gateway's own count decides, as it would
alone; what was used meanwhile is told later.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvferry.common.config import Config
from kvferry.common.errors import IndexUnavailable
from kvferry.services.gateway.api_keys import Tenant
from kvferry.services.index.open import open_asker

if TYPE_CHECKING:
    from kvferry.services.index.ask import Asker

log = logging.getLogger("kvferry.gateway")

LEASE_S = 9.0
PAUSE_S = 1.0  # Redis is not asked for so long after it has failed to answer
REASONS = ("", "in_flight", "requests", "tokens")

# KEYS what a key uses, a hash: `g:` and a gateway -> "turn count until" of its requests in flight; `requests`, `tokens`
# -> "level at", the bucket. All times in ms of Redis' own clock.
# ARGV gateway, turn, its requests in flight (a new one too), lease in ms, 1 for a new one, requests and tokens used
# besides, then the limits, 0 where there is none: in flight, requests and tokens per minute.
# -> {place in REASONS of why not, in flight on all gateways, level of requests, of tokens}
_USE = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local mine, in_flight, is_late = 'g:' .. ARGV[1], tonumber(ARGV[3]), false
local found = redis.call('HGETALL', KEYS[1])
local had, last = {}, now + ARGV[4]
for i = 1, #found, 2 do
  local field, value = found[i], found[i + 1]
  local turn, count, till = string.match(value, '^(%d+) (%d+) (%d+)$')
  if string.sub(field, 1, 2) ~= 'g:' then had[field] = value
  elseif field == mine then is_late = tonumber(turn) > tonumber(ARGV[2])
  elseif tonumber(till) < now then redis.call('HDEL', KEYS[1], field)
  else
    in_flight, last = in_flight + count, math.max(last, till)
  end
end
local function level(kind, limit, used)
  if limit == 0 then return 0 end
  local at_level, at = string.match(had[kind] or '', '^(%S+) (%S+)$')
  if not at then return limit - used end
  return math.min(limit, at_level + (now - at) * limit / 60000) - used
end
local most, rpm, tpm = tonumber(ARGV[8]), tonumber(ARGV[9]), tonumber(ARGV[10])
local requests, tokens, refused = level('requests', rpm, ARGV[6]), level('tokens', tpm, ARGV[7]), 0
local mine_now = tonumber(ARGV[3])
if ARGV[5] == '1' then
  if most > 0 and in_flight > most then refused = 1
  elseif rpm > 0 and requests < 1 then refused = 2
  elseif tpm > 0 and tokens < 1 then refused = 3 end
  if refused == 0 then requests = requests - 1 else mine_now, in_flight = mine_now - 1, in_flight - 1 end
end
if not is_late and mine_now == 0 then redis.call('HDEL', KEYS[1], mine)
elseif not is_late then
  redis.call('HSET', KEYS[1], mine, string.format('%s %d %.0f', ARGV[2], mine_now, now + ARGV[4]))
end
for kind, has in pairs({requests = {rpm, requests}, tokens = {tpm, tokens}}) do
  if has[1] > 0 then
    redis.call('HSET', KEYS[1], kind, string.format('%.6f %.0f', has[2], now))
    last = math.max(last, now + math.ceil((has[1] - has[2]) * 60000 / has[1]))
  end
end
redis.call('PEXPIREAT', KEYS[1], string.format('%.0f', last))
return {refused, in_flight, string.format('%.6f', requests), string.format('%.6f', tokens)}
"""


@dataclass(slots=True)
class _Mine:
    """Of one key on this gateway: in flight, how many Redis knows of (None: who knows), what it has not heard of."""

    tenant: Tenant
    num_in_flight: int = 0
    num_told: int | None = 0
    untold_requests: int = 0
    untold_tokens: int = 0


class SharedUsage:
    """`redis` None: nothing is shared. Belongs to one event loop; `renew` runs beside."""

    def __init__(
        self,
        redis: Asker | None,
        namespace: str = "kvferry",
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._namespace = namespace
        self._lease_s = lease_s
        self._clock = clock
        self._gateway = secrets.token_hex(8)
        self._turn = 0
        self._mine: dict[str, _Mine] = {}  # by the key's digest: a tenant may be replaced while it has requests
        self._paused_until, self._is_failing = float("-inf"), False

    @classmethod
    def of(cls, config: Config) -> SharedUsage:
        url, has_keys = config.cluster.redis_url, config.gateway.asks_for_key
        redis = open_asker(url, timeout_s=config.gateway.index_timeout_s) if url and has_keys else None
        return cls(redis, config.cluster.namespace)

    async def admit(self, tenant: Tenant) -> None:
        """Counts one more request until `release`. Raises RateLimited, which says when to come again."""
        if not self._is_shared(tenant):
            tenant.admit()
            return
        mine = self._mine.setdefault(tenant.record.digest, _Mine(tenant))
        mine.tenant = tenant
        mine.num_in_flight += 1
        try:
            reply = await self._use(mine, is_new=True)
            if reply is None:
                tenant.admit()
                mine.untold_requests += 1
            else:
                refused, in_flight, *levels = reply
                tenant.admit_as_told(REASONS[refused], in_flight, *map(float, levels))
        except BaseException:
            mine.num_in_flight -= 1
            raise

    async def release(self, tenant: Tenant, num_tokens: int) -> None:
        """`num_tokens`: prompt and completion. They are known, and counted, when the request has ended."""
        tenant.release(num_tokens)
        if not self._is_shared(tenant):
            return
        mine = self._mine[tenant.record.digest]
        mine.num_in_flight -= 1
        mine.untold_tokens += num_tokens
        await self._use(mine)

    async def renew(self) -> None:
        """For ever: leases live on, and what could not be told is told."""
        while True:
            await asyncio.sleep(self._lease_s / 3)
            for digest, mine in list(self._mine.items()):
                if mine.num_in_flight or mine.num_told != 0 or mine.untold_requests or mine.untold_tokens:
                    await self._use(mine)
                else:
                    del self._mine[digest]

    async def aclose(self) -> None:
        if self._redis is not None:
            await self._redis.aclose()

    def _is_shared(self, tenant: Tenant) -> bool:
        return self._redis is not None and any(tenant.record.limits)

    async def _use(self, mine: _Mine, *, is_new: bool = False) -> list[Any] | None:
        """What Redis says; None where it is left alone, or does not answer. What it may have heard of is not told it
        twice."""
        if self._redis is None or self._clock() < self._paused_until:
            return None
        self._turn += 1
        digest = mine.tenant.record.digest[:32]
        told = mine.untold_requests, mine.untold_tokens
        mine.untold_requests = mine.untold_tokens = 0
        count, mine.num_told = mine.num_in_flight, None
        args = (self._gateway, self._turn, count, round(self._lease_s * 1e3), int(is_new), *told)
        try:
            reply = await self._redis.ask(
                digest, ("EVAL", _USE, 1, f"{self._namespace}:key:{{{digest}}}", *args, *mine.tenant.record.limits)
            )
        except IndexUnavailable as exc:
            level = logging.DEBUG if self._is_failing else logging.WARNING
            log.log(level, "limits of API keys hold for this gateway alone: %s", exc.message)
            self._is_failing, self._paused_until = True, self._clock() + PAUSE_S
            return None
        self._is_failing = False
        mine.num_told = count - (reply[0] != 0)
        return list(reply)
