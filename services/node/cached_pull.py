"""Leading blocks of a prompt from peers that have them cached, where moving them is cheaper than computing them.

Who holds what is a hint: a holder may be gone, have evicted the blocks, or refuse. Then the next one is asked, and what
nobody gave is computed. A pull is asked for only with own blocks reserved, and a holder answers at once, from what it
has: nobody waits here for another's memory, so that no circle of nodes can wait for each other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import replace

from kvferry.common.errors import KvferryError
from kvferry.common.requests import Holder
from kvferry.services.node.context import NodeContext
from kvferry.services.node.reader import BlockReader, Received, Timeouts, Wanted
from kvferry.services.transfer.cost import Estimate, estimate

log = logging.getLogger("kvferry.node")


def promising(node: NodeContext, holders: Iterable[Holder], num_held: int, num_wanted: int) -> list[Holder]:
    """Holders that are worth asking for some of the blocks `[num_held, num_wanted)`, most blocks first."""
    policy = node.config.node.cached_pull
    others = [h for h in holders if h.instance_id != node.instance_id and h.num_blocks > num_held]
    if policy == "never" or num_held >= num_wanted or not others:
        return []
    clipped = (replace(h, num_blocks=min(h.num_blocks, num_wanted)) for h in others)
    ranked = sorted(clipped, key=lambda h: -h.num_blocks)
    chosen = [h for h in ranked if policy == "always" or _estimate(node, h, num_held).moving_is_cheaper]
    if not chosen:
        node.require_loaded().metrics.cached_pulls.labels("computing_is_cheaper").inc()
        log.info("not pulled from %s: %s", ranked[0].address, _estimate(node, ranked[0], num_held))
    return chosen


async def pull_cached(node: NodeContext, wanted: Wanted, holders: Iterable[Holder]) -> list[Received]:
    """Fills leading blocks of `wanted` from `promising` holders; what came, in order, maybe nothing.

    When it returns or is cancelled, nothing writes into the blocks any more. Each holder is given as long as computing
    would take, and the longest silence of a peer on top. Never raises for what a holder does.
    """
    received: list[Received] = []
    have = wanted.first_block
    for holder in holders:
        if holder.num_blocks <= have:
            continue
        try:
            got = await _pull(node, wanted, holder, have)
        except KvferryError as exc:
            log.warning("pull for %s from %s failed: %s", wanted.request_id, holder.address, exc.message)
            node.require_loaded().metrics.transfer_failures.labels(exc.code).inc()
            node.require_loaded().metrics.cached_pulls.labels("failed").inc()
            continue
        received.append(got)
        have += got.num_blocks
    return received


async def _pull(node: NodeContext, wanted: Wanted, holder: Holder, have: int) -> Received:
    loaded, options, until = node.require_loaded(), node.config.node, holder.num_blocks
    part = replace(
        wanted,
        prompt_token_ids=wanted.prompt_token_ids[: until * loaded.card.block_size],
        first_block=have,
        block_ids=wanted.block_ids[have - wanted.first_block : until - wanted.first_block],
        holders=(),
        cached_only=True,
    )
    expected = _estimate(node, holder, have)
    timeouts = Timeouts(options.peer_timeout_s + expected.compute_s, options.peer_timeout_s, options.lease_renew_s)
    reader = BlockReader(loaded.puller, loaded.card, timeouts, node.fail_points)
    started = time.monotonic()
    got = await reader.receive_blocks(holder.address, holder.instance_id, part)
    took_ms, who = (time.monotonic() - started) * 1e3, f"{wanted.request_id}: {got.num_blocks} blocks"
    log.info("%s from %s in %.1f ms, expected %s", who, holder.address, took_ms, expected)
    loaded.metrics.cached_pulls.labels("moved").inc()
    loaded.metrics.transfer_exposed.inc(got.transfer_s)
    return got


def _estimate(node: NodeContext, holder: Holder, num_held: int) -> Estimate:
    loaded = node.require_loaded()
    return estimate(
        holder.num_blocks - num_held,
        loaded.card.block_bytes,
        loaded.card.block_size,
        loaded.puller.bandwidth.of(holder.instance_id),
        loaded.engine.scheduler.times.prefill_tokens_per_s,
    )
