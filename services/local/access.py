"""How a command reaches a gateway: its address, an API key, whose certificates to trust and which one to show."""

from __future__ import annotations

import argparse
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvferry.common.errors import ConfigError, KvferryError, Unavailable

if TYPE_CHECKING:
    import httpx  # else only when a gateway is asked: nodes are started by the same command

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "KVFERRY_API_KEY"


class NoAccess(ConfigError):
    """The gateway is there and does not let us in."""


@dataclass(frozen=True, slots=True)
class Access:
    url: str
    api_key: str | None = field(default=None, repr=False)
    ssl_ca_certs: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None

    @classmethod
    def of(cls, args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Access:
        """Of the options that `add_options` made. A variable is better than the option: all users see command lines."""
        environ = os.environ if environ is None else environ
        keys = (args.api_key, *(environ.get(name) for name in args.key_variables))
        key = next((key for key in keys if key), None)
        return cls(args.url.rstrip("/"), key, args.ssl_ca_certs, args.ssl_certfile, args.ssl_keyfile)

    def client(self, timeout: httpx.Timeout | float) -> httpx.Client:
        """Raises ConfigError on files that cannot be used, and on what cannot be a key."""
        import httpx

        if self.api_key is not None and not re.fullmatch("[!-~]+", self.api_key):
            raise ConfigError("the API key has characters that no key has: spaces, or others than ASCII")
        headers = {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(
            base_url=self.url, headers=headers, timeout=timeout, trust_env=False, verify=self._verification()
        )

    def _verification(self) -> ssl.SSLContext | bool:
        if self.ssl_keyfile and not self.ssl_certfile:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        if not (self.ssl_ca_certs or self.ssl_certfile):
            return True
        try:
            context = ssl.create_default_context(cafile=self.ssl_ca_certs)
            if self.ssl_certfile:
                context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except OSError as exc:  # an SSLError is one
            files = ", ".join(filter(None, (self.ssl_ca_certs, self.ssl_certfile, self.ssl_keyfile)))
            raise ConfigError(f"HTTPS cannot use {files}: {exc}") from exc
        return context


def add_options(command: argparse.ArgumentParser, key_variables: Sequence[str] = (KEY_VARIABLE,)) -> None:
    add = command.add_argument
    add("--url", default=DEFAULT_URL, help="gateway (default: %(default)s)")
    add("--api-key", default=None, help=f"key that the gateway knows (default: ${', else $'.join(key_variables)})")
    add("--ssl-ca-certs", metavar="FILE", default=None, help="authorities to trust (default: the system's)")
    add("--ssl-certfile", metavar="FILE", default=None, help="certificate to show to a gateway that asks for one")
    add("--ssl-keyfile", metavar="FILE", default=None, help="its private key, if that is not in the same file")
    command.set_defaults(key_variables=tuple(key_variables))


def no_answer(access: Access, exc: Exception) -> KvferryError:
    """What to tell of a request that got no answer worth having: NoAccess with the way in, or Unavailable."""
    import httpx

    if isinstance(exc, httpx.HTTPStatusError) and exc.response.status_code == httpx.codes.UNAUTHORIZED:
        problem = "does not know this API key" if access.api_key else "asks for an API key"
        return NoAccess(f"the gateway at {access.url} {problem}: set {KEY_VARIABLE}, or --api-key")
    if "CERTIFICATE_VERIFY_FAILED" in str(exc):
        return NoAccess(f"the certificate of {access.url} is not trusted: {exc} (--ssl-ca-certs: its authority)")
    if access.url.startswith("https:") and is_certificate_refusal(exc):
        said = str(exc) or type(exc).__name__
        return NoAccess(f"{access.url} seems to ask for a client certificate that it trusts: {said} (--ssl-certfile)")
    return Unavailable(f"no gateway answers at {access.url}: {exc} (start one with `kvferry up`)")


def is_certificate_refusal(exc: Exception) -> bool:
    """Whether an HTTPS server seems to want another client certificate, or one at all.

    By TLS 1.3 the client has ended its handshake by then, and servers close the connection with an alert or without.
    """
    import httpx

    closed = isinstance(exc, httpx.ReadError | httpx.RemoteProtocolError)
    return closed or (isinstance(exc, httpx.ConnectError) and "alert" in str(exc).lower())
