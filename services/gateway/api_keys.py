"""API keys: who they are, how they are kept, and what each may use.

A key is random, so its SHA-256 is enough to keep, and no key can be got back from a file or a configuration. One line
each: `sha256:HEX NAME`, then options: `max_in_flight=8 rpm=600 tpm=100000 cache_salt=own`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvferry.common.errors import ConfigError, KvferryError, Overloaded

log = logging.getLogger("kvferry.gateway")

PREFIX = "kvf-"
LOOK_EVERY_S = 1.0
MAX_FILE_BYTES = 16 * 2**20
_LINE = re.compile(r"sha256:([0-9a-f]{64})[ \t]+([\w.@-]{1,64})((?:[ \t]+\w+=\S+)*)")
_LIMITS = ("max_in_flight", "rpm", "tpm")


class InvalidApiKey(KvferryError):
    code = "invalid_api_key"
    http_status = 401
    type = "invalid_request_error"


class RateLimited(Overloaded):
    code = "rate_limit_exceeded"
    type = "rate_limit_error"


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """`rpm`, `tpm`: requests and tokens per minute. `cache_salt`: keeps this key's cached prompts to itself."""

    digest: str
    name: str
    max_in_flight: int | None = None
    rpm: int | None = None
    tpm: int | None = None
    cache_salt: str = ""

    @property
    def limits(self) -> tuple[int, int, int]:
        """In flight, requests and tokens per minute; 0 where there is none."""
        return self.max_in_flight or 0, self.rpm or 0, self.tpm or 0

    @classmethod
    def parse(cls, line: str, origin: str) -> KeyRecord:
        """Raises ConfigError. `cache_salt=own` is a salt that nobody else has; keys with another one share theirs."""
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigError(f"{origin}: expected `sha256:HEX NAME [option=value …]`, as `kvferry api-key new` prints")
        options = dict(part.split("=", 1) for part in match[3].split())
        salt = options.pop("cache_salt", "")
        for option, value in options.items():
            if option not in _LIMITS or not (value.isdecimal() and int(value) > 0):
                raise ConfigError(
                    f"{origin}: {option}={value}: options are cache_salt and, with a positive number, "
                    f"{', '.join(_LIMITS)}"
                )
        limits = {option: int(value) for option, value in options.items()}
        own = hashlib.sha256(f"cache salt of {match[1]}".encode()).hexdigest()
        return cls(match[1], match[2], cache_salt=own if salt == "own" else salt, **limits)


class _Bucket:
    """So much in a minute, refilled steadily. May go below zero: what was used is paid before there is more."""

    def __init__(self, per_minute: int, now_s: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._now_s = now_s
        self._level = float(per_minute)
        self._at_s = now_s()

    @property
    def level(self) -> float:
        now_s = self._now_s()
        self._level = min(self.per_minute, self._level + (now_s - self._at_s) * self.per_minute / 60)
        self._at_s = now_s
        return self._level

    @level.setter
    def level(self, level: float) -> None:
        self._level, self._at_s = level, self._now_s()

    def take(self, amount: int) -> None:
        self._level = self.level - amount

    def seconds_until(self, level: float) -> float:
        return max(0.0, level - self.level) * 60 / self.per_minute


@dataclass(slots=True)
class Tenant:
    """What a key has used, here or as this was told of all gateways. Outlives a reload of the keys, unless its own line
    changed."""

    record: KeyRecord
    now_s: Callable[[], float] = time.monotonic
    in_flight: int = 0
    _buckets: dict[str, _Bucket] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for kind, limit in (("requests", self.record.rpm), ("tokens", self.record.tpm)):
            if limit is not None:
                self._buckets[kind] = _Bucket(limit, self.now_s)

    def admit(self) -> None:
        """Counts one more request until `release`. Raises RateLimited, which says when to come again."""
        limit = self.record.max_in_flight
        if limit is not None and self.in_flight >= limit:
            raise self._refused("in_flight", self.in_flight)
        for kind, bucket in self._buckets.items():
            if bucket.level < 1:
                raise self._refused(kind, self.in_flight)
        if (requests := self._buckets.get("requests")) is not None:
            requests.take(1)
        self.in_flight += 1

    def admit_as_told(self, refused: str, in_flight: int, requests: float, tokens: float) -> None:
        """As `admit`, where another has decided and counted. `refused`: what limit is used up, or empty."""
        for kind, level in (("requests", requests), ("tokens", tokens)):
            if (bucket := self._buckets.get(kind)) is not None:
                bucket.level = level
        if refused:
            raise self._refused(refused, in_flight)
        self.in_flight += 1

    def _refused(self, kind: str, in_flight: int) -> RateLimited:
        if kind == "in_flight":
            return RateLimited(f"this API key has {in_flight} requests in flight, its limit")
        bucket = self._buckets[kind]
        wait_s = max(1, math.ceil(bucket.seconds_until(1)))
        return RateLimited(
            f"this API key has used its {bucket.per_minute} {kind} per minute: try again in {wait_s} s",
            retry_after_s=wait_s,
        )

    def release(self, num_tokens: int) -> None:
        """`num_tokens`: prompt and completion. They are known, and counted, when the request has ended."""
        self.in_flight -= 1
        if (tokens := self._buckets.get("tokens")) is not None:
            tokens.take(num_tokens)

    def headers(self) -> dict[str, str]:
        """OpenAI's, of the limits that this key has."""
        headers = {}
        for kind, bucket in self._buckets.items():
            headers[f"x-ratelimit-limit-{kind}"] = str(bucket.per_minute)
            headers[f"x-ratelimit-remaining-{kind}"] = str(max(0, math.floor(bucket.level)))
            headers[f"x-ratelimit-reset-{kind}"] = f"{bucket.seconds_until(bucket.per_minute):.3f}s"
        return headers

    def salted(self, cache_salt: str) -> str:
        """What a request's own salt comes to: no other key's requests can have the same."""
        if not self.record.cache_salt:
            return cache_salt
        return hashlib.sha256(f"{self.record.cache_salt}\n{cache_salt}".encode()).hexdigest()


class ApiKeys:
    """All keys, those of the file read again when it has changed. A file that does not parse changes nothing."""

    def __init__(self, lines: str = "", path: Path | None = None, now_s: Callable[[], float] = time.monotonic) -> None:
        """`lines`: keys besides those of the file, one a line or with `;` between them. Raises ConfigError."""
        self._fixed = _parse(lines.replace(";", "\n"), "api_keys")
        self._path = path
        self._now_s = now_s
        self._tenants: dict[str, Tenant] = {}
        self._seen: object = None
        self._looked_at_s = now_s()
        self._read()

    @classmethod
    def of(cls, lines: str | None, path: str | None) -> ApiKeys | None:
        """None where keys are not configured: everyone may come in. Configured and empty: nobody may."""
        return None if lines is None and path is None else ApiKeys(lines or "", Path(path) if path else None)

    @property
    def names(self) -> list[str]:
        return [tenant.record.name for tenant in self._tenants.values()]

    def tenant(self, key: str) -> Tenant:
        """Whose key this is, found in a time that does not tell how much of it was right. Raises InvalidApiKey."""
        self._look()
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
        found = None
        for tenant in self._tenants.values():
            if hmac.compare_digest(tenant.record.digest, digest):
                found = tenant
        if found is None:
            raise InvalidApiKey("the API key is not known to this server")
        return found

    def _look(self) -> None:
        if self._path is None or self._now_s() - self._looked_at_s < LOOK_EVERY_S:
            return
        self._looked_at_s = self._now_s()
        try:
            self._read()
        except ConfigError as exc:
            log.error("API keys stay as they were: %s", exc.message)

    def _read(self) -> None:
        records = list(self._fixed)
        if self._path is not None:
            try:
                found = os.stat(self._path)
                seen = found.st_mtime_ns, found.st_size, found.st_ino
                if seen == self._seen:
                    return
                self._seen = seen
                if not stat.S_ISREG(found.st_mode) or found.st_size > MAX_FILE_BYTES:  # a pipe would be waited for
                    raise ConfigError(f"API keys {self._path}: expected a file of at most {MAX_FILE_BYTES} bytes")
                records += _parse(self._path.read_text("utf-8"), str(self._path))
            except (OSError, UnicodeDecodeError) as exc:
                raise ConfigError(f"API keys {self._path}: {exc}", param="api_keys_file") from exc
        had = self._tenants
        same = {r.digest: had[r.digest] for r in records if r.digest in had and had[r.digest].record == r}
        self._tenants = {r.digest: same.get(r.digest) or Tenant(r, self._now_s) for r in records}
        log.info("%d API keys", len(self._tenants))


def _parse(text: str, origin: str) -> list[KeyRecord]:
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    records = [KeyRecord.parse(line, f"{origin}, line {n}") for n, line in lines if line and not line.startswith("#")]
    for what in ("digest", "name"):
        values = [getattr(record, what) for record in records]
        if len(set(values)) != len(values):
            twice = next(record.name for n, record in enumerate(records) if values[n] in values[:n])
            raise ConfigError(f"{origin}: two lines have the {what} of {twice!r}")
    return records


def new_key(name: str) -> tuple[str, str]:
    """A new key, and the line to keep of it. Raises ConfigError on a name that a line cannot have."""
    key = PREFIX + secrets.token_urlsafe(32)
    line = f"sha256:{hashlib.sha256(key.encode()).hexdigest()} {name}"
    KeyRecord.parse(line, f"API key {name!r}")
    return key, line
