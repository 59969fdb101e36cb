"""Where a decode node has a prompt's blocks from: peers that hold them, a prefill node, or its own steps.

What few tokens are left after a pull of cached blocks is computed here; more is asked of a prefill node, which pulls
what it lacks by itself. Whatever goes wrong with a peer, the next one is asked, and then the prompt is computed here.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from kvferry.common.config import DECODE_MAX_STEP_MS
from kvferry.common.errors import BadRequest, KvferryError
from kvferry.common.nodes import Role
from kvferry.common.requests import Holder
from kvferry.services.decode.request import Request
from kvferry.services.engine.sequence import Sequence
from kvferry.services.node.cached_pull import promising, pull_cached
from kvferry.services.node.context import NodeContext
from kvferry.services.node.reader import BlockReader, Received, Timeouts, Wanted

log = logging.getLogger("kvferry.decode")

UNMEASURED_LOCAL_PREFILL_TOKENS = 64
"""What a decode node computes itself before it has measured how long that takes."""


def plan_receive(node: NodeContext, request: Request, seq: Sequence) -> None:
    """Says in `seq.receive` whether blocks shall come from others, before it is submitted."""
    spec = request.spec
    if not spec.prefill:
        _note_if_alone(node, request, seq)
    if not (spec.prefill or spec.holders):
        return
    cached = node.require_loaded().engine.num_cached_tokens(seq)
    num_held, num_wanted = cached // seq.block_size, seq.num_cacheable_blocks
    request.holders = promising(node, spec.holders, num_held, num_wanted)
    is_long = bool(spec.prefill) and seq.num_tokens - cached > local_prefill_limit(node)
    seq.receive = num_held < num_wanted and (is_long or bool(request.holders))


def _note_if_alone(node: NodeContext, request: Request, seq: Sequence) -> None:
    """Counts a prompt that a prefill node would have been asked for, had there been one."""
    is_short = seq.num_tokens <= local_prefill_limit(node)
    if node.role is Role.DECODE and not (is_short or request.spec.local_by_choice):
        node.require_loaded().metrics.local_fallbacks.labels("no_candidate").inc()


def local_prefill_limit(node: NodeContext) -> int:
    """Uncached tokens up to which a prompt is computed here: what fits into one step beside the prompt tokens that wait
    here already, unless configured. Behind a long prompt a short one would wait for all of it."""
    loaded, config = node.require_loaded(), node.config
    if config.node.local_prefill_max_tokens is not None:
        return config.node.local_prefill_max_tokens
    step_ms = config.engine.max_step_ms or DECODE_MAX_STEP_MS
    measured = loaded.engine.scheduler.times.prompt_tokens_within(step_ms, decoding=False)
    if measured is None:
        return UNMEASURED_LOCAL_PREFILL_TOKENS
    return max(measured - loaded.engine.num_waiting_tokens, loaded.card.block_size)


async def receive(node: NodeContext, request: Request, wanted: Wanted) -> int:
    """Fills the wanted blocks as far as peers can; how many of the prompt's leading blocks are here then.

    However it ends, nothing writes into the blocks afterwards. Raises BadRequest when a prefill node refuses the
    prompt itself.
    """
    size, limit = node.require_loaded().card.block_size, local_prefill_limit(node)
    reachable = max((holder.num_blocks for holder in request.holders), default=0)
    pulled: list[Received] = []

    def is_long(num_blocks: int) -> bool:
        return bool(request.spec.prefill) and len(wanted.prompt_token_ids) - num_blocks * size > limit

    if not is_long(max(reachable, wanted.first_block)):
        pulled += await pull_cached(node, wanted, request.holders)
    have = wanted.first_block + sum(got.num_blocks for got in pulled)
    if have < wanted.first_block + len(wanted.block_ids) and is_long(have):
        rest = replace(wanted, first_block=have, block_ids=wanted.block_ids[have - wanted.first_block :])
        got = await _from_prefill(node, request, rest, num_held=wanted.first_block)
        pulled += [got] if got is not None else await pull_cached(node, rest, request.holders)
    if pulled:
        request.received = Received.sum(pulled)
    return wanted.first_block + sum(got.num_blocks for got in pulled)


async def _from_prefill(node: NodeContext, request: Request, wanted: Wanted, num_held: int) -> Received | None:
    """What the first candidate that can gives; None when none does. The first `num_held` blocks are here."""
    loaded, options, spec = node.require_loaded(), node.config.node, request.spec
    timeouts = Timeouts(options.prefill_timeout_s, options.peer_timeout_s, options.lease_renew_s)
    reader = BlockReader(loaded.puller, loaded.card, timeouts, node.fail_points)
    others = (holder for holder in spec.holders if holder.instance_id != node.instance_id)
    own = (Holder(node.instance_id, node.address, num_held),) if num_held else ()
    wanted = replace(wanted, holders=(*own, *others))
    for candidate in spec.prefill:
        try:
            received = await reader.receive_blocks(candidate.address, candidate.instance_id, wanted)
        except BadRequest:
            raise
        except KvferryError as exc:
            log.warning("prefill of %s on %s failed: %s", spec.request_id, candidate.address, exc.message)
            loaded.metrics.transfer_failures.labels(exc.code).inc()
            continue
        request.prefilled_by = candidate.instance_id
        loaded.metrics.transfer_exposed.inc(received.transfer_s)
        return received
    loaded.metrics.local_fallbacks.labels("all_candidates_failed").inc()
    return None
