"""The address picks the backend, and nothing else does."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from kvferry.common.config import nearest
from kvferry.common.errors import ConfigError
from kvferry.services.index.base import PrefixIndex

if TYPE_CHECKING:
    from kvferry.services.index.ask import Asker

SCHEMES = ("memory", "redis", "rediss", "unix")


def open_index(url: str, namespace: str = "kvferry", *, timeout_s: float = 0.5) -> PrefixIndex:
    """`memory://` (this object only), `redis://host:port/db`, `rediss://…` (TLS), `unix:///path/to/socket`.

    `?cluster=true` makes the address one node, or a name of all nodes, of a Redis Cluster; with TLS, redis-py's options
    go the same way (`?ssl_ca_certs=/ca.pem`).

    Connects at the first call, which must come from the event loop that uses the index. Raises ConfigError on an
    address that makes no sense. `timeout_s` bounds every call (of `store` and `remove`: every batch).
    """
    if url.startswith("memory://"):
        from kvferry.services.index.memory import MemoryIndex

        return MemoryIndex()
    from kvferry.services.index.redis import RedisIndex

    plain, is_cluster = _parsed(url)
    return RedisIndex(plain, namespace, timeout_s=timeout_s, is_cluster=is_cluster)


def open_asker(url: str, *, timeout_s: float) -> Asker | None:
    """As `open_index`, for what is not the index's; None where nothing is shared (`memory://`)."""
    if url.startswith("memory://"):
        return None
    from kvferry.services.index.ask import Asker

    plain, is_cluster = _parsed(url)
    return Asker(plain, timeout_s, is_cluster=is_cluster)


def _parsed(url: str) -> tuple[str, bool]:
    """The address without `cluster=`, and whether it is one's."""
    from kvferry.services.index.wire import redacted

    scheme, sep, _ = url.partition("://")
    if not sep or scheme not in SCHEMES:
        raise ConfigError(
            f"index address {url!r}: expected {', '.join(f'{s}://' for s in SCHEMES)}{nearest(scheme, SCHEMES)}"
        )
    parts = urlsplit(url)
    options = parse_qsl(parts.query)
    asked = dict(options).get("cluster", "false")
    if asked not in ("true", "false"):
        raise ConfigError(f"index address {redacted(url)}: cluster={asked!r} must be true or false")
    if asked == "true" and (scheme == "unix" or parts.path.strip("/") not in ("", "0")):
        raise ConfigError(f"index address {redacted(url)}: a cluster has database 0 only, and no unix socket")
    query = urlencode([option for option in options if option[0] != "cluster"])
    plain = urlunsplit(parts._replace(query=query)) if "cluster" in dict(options) else url
    return plain, asked == "true"
