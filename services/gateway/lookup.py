"""A prompt's block names, who holds or computes them already, and telling the other gateways who will.

All of it is the index's, which may be slow, gone or emptied at any time. Then prompts are matched against nothing, so
that requests go on.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from kvferry.common.errors import IndexUnavailable
from kvferry.common.hashing import block_names, root_name
from kvferry.common.nodes import LayoutCard
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.plan import Plan
from kvferry.services.index.base import Matches, PrefixIndex

log = logging.getLogger("kvferry.gateway")

INDEX_PAUSE_S = 1.0  # no lookups for so long after one failed
LONG_PROMPT_TOKENS = 4096  # longer ones are hashed off the event loop
MAX_UNTOLD = 64  # prompts on their way that the index has not been told of
EXPECTED_GRACE_S = 2.0  # a prompt is expected for so long after its first token was predicted
MAX_EXPECTED_S = 30.0

Named = Mapping[tuple[str, str, int], Sequence[bytes]]
"""The names of a prompt's full blocks, for each way of naming them."""


class PrefixLookup:
    """Prompt -> who holds how much of it, within a deadline. A failing index is left alone for a moment.

    And back: `expect` says who will hold a prompt soon, for the other gateways; `tell` runs beside and passes it on.
    """

    def __init__(
        self,
        index: PrefixIndex,
        timeout_s: float,
        metrics: GatewayMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._timeout_s = timeout_s
        self._metrics = metrics
        self._clock = clock
        self._paused_until = float("-inf")
        self._is_failing = False
        self._untold: asyncio.Queue[tuple[str, Sequence[bytes], float]] = asyncio.Queue(MAX_UNTOLD)

    async def match(self, named: Iterable[Sequence[bytes]]) -> Matches:
        """Nothing when the index does not answer in time. Never raises."""
        if self._is_paused:
            return Matches({}, {})
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await self._match_all([names for names in named if names])
        except (IndexUnavailable, TimeoutError) as exc:
            self._metrics.index_failures.inc()
            self._paused_until = self._clock() + INDEX_PAUSE_S
            level = logging.DEBUG if self._is_failing else logging.WARNING
            log.log(level, "prefix lookup failed, routing by load alone: %s", str(exc) or "timeout")
            self._is_failing = True
            return Matches({}, {})
        self._is_failing = False
        self._metrics.index_lookups.inc()
        return Matches(
            {name: count for matches in found for name, count in matches.held.items()},
            {name: count for matches in found for name, count in matches.coming.items()},
        )

    async def _match_all(self, named: Sequence[Sequence[bytes]]) -> list[Matches]:
        """At once: while a fleet changes from one version to the next its nodes name blocks in two ways."""
        if len(named) == 1:
            return [await self._index.match(named[0])]
        found = await asyncio.gather(*map(self._index.match, named), return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return [result for result in found if not isinstance(result, BaseException)]

    def expect(self, plan: Plan, named: Named) -> None:
        """The prompt has been sent as planned. Nobody waits: what comes too fast to be told is not."""
        computer = plan.computer
        names = named.get(computer.card.naming, ())
        if len(names) > plan.matches.get(computer.instance_id, 0):
            ttl_s = min(plan.ttft_ms / 1e3 + EXPECTED_GRACE_S, MAX_EXPECTED_S)
            with suppress(asyncio.QueueFull):
                self._untold.put_nowait((computer.instance_id, names, ttl_s))

    async def tell(self) -> None:
        """For ever. While the index is left alone it is not told either."""
        while True:
            instance_id, names, ttl_s = await self._untold.get()
            if self._is_paused:
                continue
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._index.expect(instance_id, names, ttl_s)
            except (IndexUnavailable, TimeoutError):
                self._metrics.index_failures.inc()
            except Exception:  # a bug in an index must not end this
                log.exception("cannot tell the index what is coming")

    @property
    def _is_paused(self) -> bool:
        return self._clock() < self._paused_until


async def prompt_names(token_ids: Sequence[int], cache_salt: str, cards: Sequence[LayoutCard]) -> Named:
    """Off the event loop where the prompt is long."""
    return {card.naming: await _names(token_ids, cache_salt, card) for card in cards}


async def _names(token_ids: Sequence[int], cache_salt: str, card: LayoutCard) -> list[bytes]:
    root = root_name(card.model_fingerprint, card.numerics_id, cache_salt)
    if len(token_ids) > LONG_PROMPT_TOKENS:
        return await asyncio.to_thread(block_names, root, token_ids, card.block_size)
    return block_names(root, token_ids, card.block_size)
