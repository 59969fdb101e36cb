"""What all running requests share: admission, the router's inputs, and the memory of what it decided."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from kvferry.common.errors import (
    Draining,
    KvferryError,
    Overloaded,
    Unavailable,
)
from kvferry.common.nodes import LayoutCard
from kvferry.common.tracing import Tracing
from kvferry.services.gateway.decision import log_decision, to_json
from kvferry.services.gateway.intake import Job
from kvferry.services.gateway.lookup import PrefixLookup
from kvferry.services.gateway.mailbox import Mailbox
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.nodes import Ledger, NodeTable
from kvferry.services.gateway.plan import Plan, RouteRequest
from kvferry.services.gateway.recent import Recent
from kvferry.services.gateway.router import choose
from kvferry.services.gateway.sessions import SessionPool
from kvferry.services.gateway.tokenizer import Tokenizer

NUM_REMEMBERED_PLANS = 512
MAX_REMEMBERED_PER_REQUEST = 16
LONGEST_RETRY_S = 60


class Service:
    """What all runs share. Built by the composition root."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        table: NodeTable,
        lookup: PrefixLookup,
        pool: SessionPool,
        metrics: GatewayMetrics,
        *,
        queue_timeout_s: float,
        max_num_requests: int,
        max_resumptions: int,
        resume_timeout_s: float,
        max_ttft_s: float | None = None,
        stream_delay_weight: float,
        tracing: Tracing | None = None,
    ) -> None:
        self.tracing = tracing or Tracing()
        self.tokenizer = tokenizer
        self.table = table
        self.lookup = lookup
        self.pool = pool
        self.metrics = metrics
        self.queue_timeout_s = queue_timeout_s
        self.max_resumptions = max_resumptions
        self.resume_timeout_s = resume_timeout_s
        self.ledger = Ledger()
        self.recent = Recent()
        self.mailboxes: set[Mailbox] = set()  # one per request in flight
        self.draining = False
        self._max_num_requests = max_num_requests
        self._max_ttft_s = max_ttft_s
        self._stream_delay_weight = stream_delay_weight
        self._looked = asyncio.Event()
        self._plans: OrderedDict[str, list[Plan]] = OrderedDict()

    def admit(self, mailbox: Mailbox) -> None:
        """Counts one more request in flight until `release`. Raises Draining or Overloaded."""
        if self.draining:
            raise Draining("the gateway is shutting down")
        if len(self.mailboxes) >= self._max_num_requests:
            raise Overloaded(f"the gateway has {len(self.mailboxes)} requests in flight, its limit: try again shortly")
        self.mailboxes.add(mailbox)

    def check_wait(self, plan: Plan) -> None:
        """Raises Overloaded when the plan's first token is predicted to come later than `--max-ttft`."""
        predicted_s = plan.ttft_ms / 1e3
        if self._max_ttft_s is None or predicted_s <= self._max_ttft_s:
            return
        self.metrics.refused_late.inc()
        retry_s = min(max(math.ceil(predicted_s - self._max_ttft_s), 1), LONGEST_RETRY_S)
        raise Overloaded(
            f"the first token would come in about {predicted_s:.1f} s, the limit is {self._max_ttft_s:g} s: "
            f"try again in {retry_s} s",
            retry_after_s=retry_s,
        )

    def release(self, mailbox: Mailbox) -> None:
        self.mailboxes.discard(mailbox)

    def fail_all(self, error: KvferryError) -> None:
        """Ends every request in flight with `error`."""
        for mailbox in self.mailboxes:
            mailbox.fail(error)

    def remember(self, plan: Plan, job: Job) -> None:
        plans = self._plans.setdefault(job.response_id, [])
        if len(plans) < MAX_REMEMBERED_PER_REQUEST:
            plans.append(plan)
        log_decision(plan, job.request_id)
        self.metrics.route_decisions[plan.kind].inc()
        self._plans[job.request_id] = plans
        while len(self._plans) > NUM_REMEMBERED_PLANS:
            self._plans.popitem(last=False)

    def reasons(self, request_id: str) -> list[dict[str, Any]] | None:
        """Why a recent request went where it went, one entry per attempt of each prompt."""
        plans = self._plans.get(request_id)
        return None if plans is None else [plan.reasons() | {"decision": to_json(plan)} for plan in plans]

    def table_is_fresh(self) -> None:
        """Wakes those who wait for a node, and settles with the nodes' own reports."""
        self.ledger.note_reports(self.table.nodes)
        self._looked.set()
        self._looked = asyncio.Event()

    async def plan(
        self,
        request_id: str,
        num_tokens: int,
        matches: Mapping[str, int],
        tried: frozenset[str],
        *,
        coming: Mapping[str, int] | None = None,
        like: LayoutCard | None = None,
        patience_s: float = 0.0,
    ) -> Plan:
        """Asks the router; looks for new nodes when there are none, and at failing ones when there are no others.

        `like`: nodes that compute other bits than this one are the last resort. With patience it goes on looking, then
        also at nodes that were tried and have not failed just now. Raises Unavailable.
        """
        give_up_at = time.monotonic() + patience_s
        request = RouteRequest(
            request_id,
            num_tokens,
            self.ledger.in_flight,
            coming=coming or {},
            stream_delay_weight=self._stream_delay_weight,
        )

        def attempt(excluded: frozenset[str]) -> Plan:
            others = frozenset() if like is None else self._unlike(like)
            with suppress(Unavailable):
                return choose(replace(request, excluded=excluded | others), self.table.nodes, matches)
            return choose(replace(request, excluded=excluded), self.table.nodes, matches)

        with suppress(Unavailable):
            return attempt(tried | self.pool.failing())
        await self.table.refresh()
        with suppress(Unavailable):
            return attempt(tried | self.pool.failing())
        while (left_s := give_up_at - time.monotonic()) > 0:
            with suppress(Unavailable):
                return attempt(tried)
            with suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._looked.wait()
            with suppress(Unavailable):
                return attempt(tried | self.pool.failing())
            with suppress(Unavailable):
                return attempt(self.pool.failing())
        return attempt(tried)

    def _unlike(self, card: LayoutCard) -> frozenset[str]:
        wanted = card.model_fingerprint, card.numerics_id
        return frozenset(
            n.instance_id for n in self.table.nodes if (n.card.model_fingerprint, n.card.numerics_id) != wanted
        )
