"""HTTPS: the gateway's certificate, and with authorities given, client certificates that they signed.

Files that have changed are read again at the next handshake, so that a renewed certificate, or another authority,
needs no restart. Files that do not fit together change nothing.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from kvferry.common.config import GatewayConfig
from kvferry.common.errors import ConfigError

log = logging.getLogger("kvferry.gateway")


class HttpTls:
    """`context` serves all connections; each handshake takes what is in the files by then."""

    def __init__(self, cert: Path, key: Path | None = None, ca: Path | None = None) -> None:
        """Raises ConfigError naming the files."""
        self._cert, self._key, self._ca = cert, key, ca
        self._seen = self._signature()
        self._latest = self.context = self._load()
        self.context.sni_callback = self._handshake

    @classmethod
    def of(cls, config: GatewayConfig) -> HttpTls | None:
        """None: plain HTTP. Raises ConfigError."""
        if config.ssl_certfile is None:
            if config.ssl_keyfile or config.ssl_ca_certs:
                raise ConfigError("ssl-keyfile and ssl-ca-certs need ssl-certfile", param="ssl_certfile")
            return None
        key, ca = config.ssl_keyfile, config.ssl_ca_certs
        return cls(Path(config.ssl_certfile), Path(key) if key else None, Path(ca) if ca else None)

    def _handshake(self, sock: ssl.SSLSocket | ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL asks this in every handshake, with or without a server name."""
        try:
            if (seen := self._signature()) != self._seen:
                self._seen = seen
                self._latest = self._load()
                log.info("certificate %s was read again", self._cert)
        except ConfigError as exc:
            log.error("HTTPS goes on with the certificates that it had: %s", exc.message)
        sock.context = self._latest

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self._cert, self._key)
            if self._ca is not None:
                context.load_verify_locations(self._ca)
                context.verify_mode = ssl.CERT_REQUIRED
        except (OSError, ssl.SSLError) as exc:
            files = ", ".join(str(path) for path in (self._cert, self._key, self._ca) if path is not None)
            raise ConfigError(f"HTTPS cannot use {files}: {exc}", param="ssl_certfile") from exc
        return context

    def _signature(self) -> tuple[tuple[int, int, int], ...]:
        found = []
        for path in (self._cert, self._key, self._ca):
            if path is not None:
                try:
                    stat = os.stat(path)
                except OSError as exc:
                    raise ConfigError(f"HTTPS needs {path}: {exc.strerror}", param="ssl_certfile") from exc
                found.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        return tuple(found)
