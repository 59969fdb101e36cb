"""The address picks the backend, and nothing else does."""

from __future__ import annotations

from kvferry.common.config import nearest
from kvferry.common.errors import ConfigError
from kvferry.services.index.base import PrefixIndex

SCHEMES = ("memory", "redis", "rediss", "unix")


def open_index(url: str, namespace: str = "kvferry", *, timeout_s: float = 0.5) -> PrefixIndex:
    """`memory://` (this object only), `redis://host:port/db`, `rediss://…` (TLS), `unix:///path/to/socket`.

    Connects at the first call, which must come from the event loop that uses the index. Raises ConfigError on an
    address that makes no sense. `timeout_s` bounds every call (of `store` and `remove`: every batch).
    """
    scheme, sep, _ = url.partition("://")
    if not sep or scheme not in SCHEMES:
        raise ConfigError(
            f"index address {url!r}: expected {', '.join(f'{s}://' for s in SCHEMES)}{nearest(scheme, SCHEMES)}"
        )
    if scheme == "memory":
        from kvferry.services.index.memory import MemoryIndex

        return MemoryIndex()
    from kvferry.services.index.redis import RedisIndex

    return RedisIndex(url, namespace, timeout_s=timeout_s)
