"""Which transport serves a pair of nodes, and why, as an operator sees it: `/cluster` and `kvferry:transfer_link`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from kvferry.common.nodes import Link
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
