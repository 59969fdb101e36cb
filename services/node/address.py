"""Where peers reach this node and what it is called, when the configuration leaves it open.

Containers and pods are all alike configured (`--node-host 0.0.0.0`, one port), so both must come from the machine.
"""

from __future__ import annotations

import secrets
import socket
from ipaddress import ip_address
from urllib.parse import urlsplit

from kvferry.common.config import NodeConfig
from kvferry.common.nodes import Role

_REDIS_PORT = 6379


def advertised_host(node: NodeConfig, redis_url: str) -> str:
    """`advertise_host`, else `node_host`; where that is all of this machine's addresses, the one that faces Redis.

    Whoever shares a Redis shares a network with it. Its host name's lookup may block; without an answer (Redis away at
    this moment) it is this machine's name.
    """
    host = node.advertise_host or node.node_host
    if not node.advertise_host and _is_wildcard(host):
        url = urlsplit(redis_url)
        host = _source_address(url.hostname or "localhost", url.port or _REDIS_PORT) or socket.gethostname()
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def default_node_id(role: Role, node: NodeConfig) -> str:
    """Unique in the cluster: role and port, with the machine's name where the node serves other machines."""
    if not node.node_port:
        return f"{role}-{secrets.token_hex(3)}"
    if node.advertise_host is None and _is_loopback(node.node_host):
        return f"{role}-{node.node_port}"
    return f"{role}-{socket.gethostname()}-{node.node_port}"


def _source_address(host: str, port: int) -> str | None:
    """What this machine would send from to `host`; None where it has no way there. Sends nothing."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, proto, _, address in found:
        try:
            with socket.socket(family, kind, proto) as sock:
                sock.connect(address)
                return str(sock.getsockname()[0])
        except OSError:
            continue
    return None


def _is_wildcard(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return host == ""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
