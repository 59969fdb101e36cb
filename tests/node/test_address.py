from __future__ import annotations

import socket

import pytest

from kvferry.common.config import NodeConfig
from kvferry.common.nodes import Role
from kvferry.services.node.address import advertised_host, default_node_id

REDIS = "redis://127.0.0.1:6379/0"


@pytest.mark.parametrize(
    ("node_host", "advertise_host", "expected"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("10.1.2.3", None, "10.1.2.3"),
        ("0.0.0.0", "decode.example", "decode.example"),
        ("0.0.0.0", None, "127.0.0.1"),  # the address that faces this Redis
        ("::1", None, "[::1]"),
        ("0.0.0.0", "fd00::7", "[fd00::7]"),
    ],
)
def test_a_node_advertises_what_it_is_told_or_else_an_address_that_peers_can_reach(
    node_host: str, advertise_host: str | None, expected: str
):
    node = NodeConfig(node_host=node_host, advertise_host=advertise_host)
    assert advertised_host(node, REDIS) == expected


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::", ""])
def test_a_wildcard_is_never_advertised_though_redis_cannot_be_found(wildcard: str):
    node = NodeConfig(node_host=wildcard)
    assert advertised_host(node, "redis://no-such-host.invalid:6379/0") == socket.gethostname()


def test_nodes_alike_configured_on_two_machines_have_different_names(monkeypatch: pytest.MonkeyPatch):
    node = NodeConfig(node_host="0.0.0.0", node_port=7000)
    names = set()
    for machine in ("3f2a9c1b7d60", "77aa01cd42ef"):
        monkeypatch.setattr(socket, "gethostname", lambda machine=machine: machine)
        names.add(default_node_id(Role.DECODE, node))
    assert names == {"decode-3f2a9c1b7d60-7000", "decode-77aa01cd42ef-7000"}


def test_on_one_machine_role_and_port_are_the_name_and_without_a_port_it_is_random():
    assert default_node_id(Role.PREFILL, NodeConfig(node_port=7001)) == "prefill-7001"
    free = NodeConfig(node_host="0.0.0.0")
    assert default_node_id(Role.PREFILL, free) != default_node_id(Role.PREFILL, free)
