"""A reader that is suspended in the middle of a copy, and goes on when its lease is over and its blocks are others'."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt
import psutil

from kvferry.common.requests import GenerateRequest, SamplingParams
from kvferry.proto import kvferry_pb2 as pb
from kvferry.proto import kvferry_pb2_grpc as pb_grpc
from kvferry.services.rpc.convert import card_to_pb
from tests.e2e.cluster import Answer, DecodeClient, Node, cluster

FLAGS = ("--transports", "shm", "--lease-renew-s", "0.25")
SHORT_LEASE = ("--lease-s", "2", "--peer-timeout-s", "1")
PATIENT = ("--lease-s", "60", "--peer-timeout-s", "30")
"""The reader's own clock must not save it: only the owner's answer to its release may."""
NUM_BLOCKS = 40
PROMPT = [3 + i * 7 % 490 for i in range(250)]
"""One chunk, one pull of 15 blocks."""
WITHIN_S = 30.0


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


async def _take_all_blocks(prefill: Node) -> None:
    """Other readers' prompts, each of nearly the whole pool."""
    card = card_to_pb(prefill.record().card)
    async with grpc.aio.insecure_channel(prefill.address) as channel:
        for n in range(2):
            tokens = [3 + (i * 11 + n) % 490 for i in range((NUM_BLOCKS - 1) * 16)]
            call = pb_grpc.PrefillStub(channel).Run()
            start = pb.PrefillStart(request_id=f"other{n}", prompt_token_ids=tokens, card=card)
            await call.write(pb.PrefillRequest(start=start))
            while not (reply := await call.read()).HasField("computed"):
                assert not reply.HasField("error"), reply.error.message
            await call.write(pb.PrefillRequest(release=pb.ReleaseLease()))
            while not (reply := await call.read()).HasField("released"):
                pass
            assert reply.released.valid
            call.cancel()


def _is_at_rest(node: Node) -> bool:
    load = node.record().load
    return load.accounts.available == load.num_blocks and load.num_leases == 0


def _pool(folder: Path, node: Node) -> npt.NDArray[np.uint8]:
    """A copy of the blocks in a node's pool file, [num_blocks, block_bytes]."""
    record = node.record()
    raw = np.fromfile(next(folder.glob(f"kvferry-*-{record.instance_id}.pool")), dtype=np.uint8)
    return raw[-NUM_BLOCKS * record.card.block_bytes :].reshape(NUM_BLOCKS, -1)


async def _stopped_past_its_lease(folder: Path, prefill: Node, decode: Node) -> tuple[Answer, Answer]:
    """The answer of the request whose copy is cut in two, and the same tokens computed where nothing was received."""
    request = GenerateRequest(
        "r", tuple(PROMPT), SamplingParams(max_tokens=8, seed=1, logprobs=1), prefill=(prefill.candidate(),)
    )
    process = psutil.Process(decode.pid)
    async with DecodeClient(decode) as client:
        asked = asyncio.create_task(client.generate(request))
        stopped = partial(_wait, lambda: process.status() == psutil.STATUS_STOPPED, "the copy was never reached")
        await asyncio.to_thread(stopped)
        try:
            before = _pool(folder, prefill)
            expired = partial(_wait, lambda: prefill.metric("kvferry:leases_expired_total") == 1, "it did not expire")
            await asyncio.to_thread(expired)
            await _take_all_blocks(prefill)
            filled = before.any(axis=1)
            assert filled.sum() >= 15
            assert (before != _pool(folder, prefill)).any(axis=1)[filled].all(), "the owner did not reuse its blocks"
            assert process.status() == psutil.STATUS_STOPPED
        finally:
            decode.send(signal.SIGCONT)
        answer = await asked
        alone = await client.generate(replace(request, request_id="alone", cache_salt="alone", prefill=()))
    return answer, alone


def test_a_reader_stopped_in_mid_copy_past_its_lease_adopts_nothing_of_what_the_owner_has_reused(
    tiny_model: Path, tmp_path: Path
) -> None:
    flags = (*FLAGS, "--shm-dir", str(tmp_path))
    with cluster(tmp_path, str(tiny_model)) as nodes:
        pool = ("--num-blocks-override", str(NUM_BLOCKS), "--max-num-batched-tokens", "256")
        prefill = nodes.start_node("prefill", *flags, *SHORT_LEASE, *pool, wait=False)
        stop = ("--local-prefill-max-tokens", "16", "--fail-points", "transfer.shm.copy=stop@1")
        decode = nodes.start_node("decode", *flags, *PATIENT, *stop, wait=False)
        nodes.wait_node(prefill)
        nodes.wait_node(decode)
        answer, alone = asyncio.run(_stopped_past_its_lease(tmp_path, prefill, decode))
        assert answer.first is not None
        assert answer.first.prefilled_by == ""
        assert (answer.token_ids, answer.logprobs) == (alone.token_ids, alone.logprobs)
        assert decode.metric("kvferry:transfer_failures_total") == 1
        assert decode.metric("kvferry:transfer_blocks_total") in (0, 15), "cut short, or copied and given up"
        for node in (prefill, decode):
            _wait(partial(_is_at_rest, node), f"{node.name} did not come to rest")
