"""Mutual TLS between kvferry's processes: one certificate per process, one authority that signed them all.

Files are read again for every new connection (servers: for every handshake after one of them has changed), so that a
renewed certificate needs no restart.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from kvferry.common.config import ClusterConfig
from kvferry.common.errors import ConfigError

log = logging.getLogger("kvferry.rpc")


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files. `server_name`: the name in every node's certificate; None: each node's own address."""

    cert: Path
    key: Path
    ca: Path
    server_name: str | None = None

    @classmethod
    def of(cls, config: ClusterConfig) -> Tls | None:
        """None without TLS. Raises ConfigError when only a part is given, or a file cannot be read."""
        given = {
            "rpc-tls-cert": config.rpc_tls_cert,
            "rpc-tls-key": config.rpc_tls_key,
            "rpc-tls-ca": config.rpc_tls_ca,
        }
        paths = {name: Path(path) for name, path in given.items() if path}
        if not paths:
            if config.rpc_tls_server_name:
                raise ConfigError("rpc-tls-server-name is set without rpc-tls-cert, rpc-tls-key and rpc-tls-ca")
            return None
        if missing := given.keys() - paths.keys():
            raise ConfigError(f"TLS between nodes needs all three files: {', '.join(sorted(missing))} missing")
        cert, key, ca = (paths[name] for name in given)
        tls = cls(cert, key, ca, config.rpc_tls_server_name)
        tls.read()
        return tls

    def read(self) -> tuple[bytes, bytes, bytes]:
        """Certificate chain, key, authority: PEM. Raises ConfigError naming the file."""
        found = []
        for path in (self.cert, self.key, self.ca):
            try:
                pem = path.read_bytes()
            except OSError as exc:
                raise ConfigError(f"TLS file {path}: {exc.strerror}") from exc
            if b"-----BEGIN " not in pem:
                raise ConfigError(f"TLS file {path} is not PEM: expected a line that starts with -----BEGIN")
            found.append(pem)
        return found[0], found[1], found[2]

    def channel_credentials(self) -> grpc.ChannelCredentials:
        cert, key, ca = self.read()
        return grpc.ssl_channel_credentials(root_certificates=ca, private_key=key, certificate_chain=cert)

    def channel_options(self) -> list[tuple[str, str]]:
        return [("grpc.ssl_target_name_override", self.server_name)] if self.server_name else []

    def server_credentials(self) -> grpc.ServerCredentials:
        """Only clients with a certificate of the same authority get in."""
        watch = _Watch(self)
        return grpc.dynamic_ssl_server_credentials(watch.config(), watch.config, require_client_authentication=True)


class _Watch:
    """What gRPC asks, in threads of its own, before each handshake."""

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._lock = threading.Lock()
        self._last = tls.read()

    def config(self) -> grpc.ServerCertificateConfiguration:
        """Of the files as they are now; while one is being replaced, or is broken, of those read last."""
        with self._lock:
            try:
                found = self._tls.read()
            except ConfigError as exc:
                log.warning("TLS files not read again: %s", exc.message)
                found = self._last
            if found != self._last:
                log.info("TLS: new certificate from %s", self._tls.cert)
            self._last = found
            cert, key, ca = found
            return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)
