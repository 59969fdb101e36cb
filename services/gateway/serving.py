"""What all running requests share: admission, the router's inputs, and the memory of what it decided."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from kvferry.common.errors import (
    Draining,
    KvferryError,
    Overloaded,
    Unavailable,
)
from kvferry.services.gateway.intake import Job
from kvferry.services.gateway.metrics import GatewayMetrics
from kvferry.services.gateway.nodes import Ledger, NodeTable, PrefixLookup
from kvferry.services.gateway.router import Plan, RouteRequest, choose
from kvferry.services.gateway.sessions import Mailbox, SessionPool
from kvferry.services.gateway.tokenizer import Tokenizer

NUM_REMEMBERED_PLANS = 512


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
    ) -> None:
        self.tokenizer = tokenizer
        self.table = table
        self.lookup = lookup
        self.pool = pool
        self.metrics = metrics
        self.queue_timeout_s = queue_timeout_s
        self.ledger = Ledger()
        self.mailboxes: set[Mailbox] = set()  # one per request in flight
        self.draining = False
        self._max_num_requests = max_num_requests
        self._plans: OrderedDict[str, list[Plan]] = OrderedDict()

    def admit(self, mailbox: Mailbox) -> None:
        """Counts one more request in flight until `release`. Raises Draining or Overloaded."""
        if self.draining:
            raise Draining("the gateway is shutting down")
        if len(self.mailboxes) >= self._max_num_requests:
            raise Overloaded(f"the gateway has {len(self.mailboxes)} requests in flight, its limit: try again shortly")
        self.mailboxes.add(mailbox)

    def release(self, mailbox: Mailbox) -> None:
        self.mailboxes.discard(mailbox)

    def fail_all(self, error: KvferryError) -> None:
        """Ends every request in flight with `error`."""
        for mailbox in self.mailboxes:
            mailbox.fail(error)

    def remember(self, plan: Plan, job: Job) -> None:
        plans = self._plans.setdefault(job.response_id, [])
        plans.append(plan)
        self._plans[job.request_id] = plans
        while len(self._plans) > NUM_REMEMBERED_PLANS:
            self._plans.popitem(last=False)

    def reasons(self, request_id: str) -> list[dict[str, Any]] | None:
        """Why a recent request went where it went, one entry per attempt of each prompt."""
        plans = self._plans.get(request_id)
        return None if plans is None else [plan.reasons() for plan in plans]

    async def plan(self, request_id: str, num_tokens: int, matches: dict[str, int], tried: frozenset[str]) -> Plan:
        """Asks the router; looks for new nodes when there are none, and at failing ones when there are no others.

        Raises Unavailable.
        """

        def attempt(excluded: frozenset[str]) -> Plan:
            return choose(
                RouteRequest(request_id, num_tokens, self.ledger.in_flight, excluded), self.table.nodes, matches
            )

        try:
            return attempt(tried | self.pool.failing())
        except Unavailable:
            await self.table.refresh()
        try:
            return attempt(tried | self.pool.failing())
        except Unavailable:
            return attempt(tried)
