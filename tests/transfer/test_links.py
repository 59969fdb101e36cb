"""Which transport serves a pair of nodes, and why, as an operator sees it: `/cluster` and `kvferry:transfer_link`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.common.nodes import Link
from kvferry.services.transfer.conformance.owners import HAS_UCX
from tests.e2e.cluster import cluster

PROMPT = [3 + i * 7 % 490 for i in range(120)]


def _complete(url: str) -> None:
    body = {"model": "test", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert reply.status_code == httpx.codes.OK, reply.text


@pytest.mark.parametrize("case", ["both share", "one does not", "the pool file is gone"])
def test_the_transport_of_a_pair_and_why_are_shown(tiny_model: Path, tmp_path: Path, case: str) -> None:
    offers = "grpc" if case == "one does not" else "shm,grpc"
    with cluster(tmp_path, str(tiny_model)) as nodes:
        shm_dir = ("--shm-dir", str(tmp_path))
        prefill = nodes.start_node("prefill", "--transports", offers, *shm_dir, wait=False)
        decode = nodes.start_node(
            "decode", "--transports", "shm,grpc", "--local-prefill-max-tokens", "16", *shm_dir, wait=False
        )
        nodes.wait_node(prefill)
        nodes.wait_node(decode)
        gateway, owner = nodes.start_gateway(), prefill.record()
        pool = tmp_path / f"kvferry-{prefill.pid}-{owner.instance_id}.pool"
        if case == "the pool file is gone":
            pool.unlink()
        transport, reason = {
            "both share": ("shm", "first choice of both sides"),
            "one does not": ("grpc", "shm: not offered by the peer"),
            "the pool file is gone": ("grpc", f"shm: cannot open {pool}: No such file or directory"),
        }[case]
        assert decode.record().links == ()
        _complete(gateway.url)
        assert decode.metric("kvferry:transfer_blocks_total", transport=transport) == len(PROMPT) // 16
        num_blocks = len(PROMPT) // 16
        num_bytes = num_blocks * owner.card.block_bytes
        link = Link(owner.instance_id, owner.address, transport, reason, num_blocks, num_bytes)
        assert decode.record().links == (link,)
        shown: list[dict[str, Any]] = gateway.get("/cluster")["nodes"]
        links = {node["role"]: node["links"] for node in shown}
        assert links == {
            "prefill": [],
            "decode": [
                {
                    "instance_id": owner.instance_id,
                    "address": owner.address,
                    "transport": transport,
                    "reason": reason,
                    "num_blocks": num_blocks,
                    "num_bytes": num_bytes,
                }
            ],
        }
        labels = {"peer": owner.instance_id, "address": owner.address, "transport": transport, "reason": reason}
        assert decode.metric("kvferry:transfer_link", **labels) == 1


@pytest.mark.skipif(not HAS_UCX, reason="ucxx is not installed: pip install 'kvferry[ucx]'")
def test_wrong_bytes_over_one_transport_are_counted_and_the_next_one_takes_over(
    tiny_model: Path, tmp_path: Path
) -> None:
    with cluster(tmp_path, str(tiny_model)) as nodes:
        order = ("--transports", "ucx,grpc")  # the first run opens the connection, the second has blocks
        prefill = nodes.start_node("prefill", *order, "--fail-points", "transfer.ucx.run=corrupt@2", wait=False)
        decode = nodes.start_node("decode", *order, "--local-prefill-max-tokens", "16", wait=False)
        nodes.wait_node(prefill)
        nodes.wait_node(decode)
        _complete(nodes.start_gateway().url)
        assert decode.metric("kvferry:transport_failures_total", transport="ucx", cause="block_corrupt") == 1
        assert decode.metric("kvferry:transfer_blocks_total", transport="grpc") == len(PROMPT) // 16
        assert decode.metric("kvferry:prefill_fallback_total") == 0
        (link,) = decode.record().links
        assert link.transport == "grpc"
        assert link.reason.startswith("ucx: failed: ")
