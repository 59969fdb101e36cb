"""The operations page: one file, and the policy that lets a browser run nothing but what stands in it."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from importlib.resources import files
from typing import Self

from starlette.responses import Response


@dataclass(frozen=True, slots=True)
class Page:
    html: bytes
    policy: str

    @classmethod
    def load(cls) -> Self:
        html = (files("kvferry.services.gateway") / "page.html").read_text(encoding="utf-8")
        sources = {tag: _sources(html, tag) for tag in ("script", "style")}
        policy = (
            f"default-src 'none'; script-src {sources['script']}; style-src {sources['style']}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return cls(html.encode(), policy)

    def response(self) -> Response:
        headers = {
            "content-security-policy": self.policy,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }
        return Response(self.html, media_type="text/html", headers=headers)


def _sources(html: str, tag: str) -> str:
    """The hash of each inline element, as a policy names it."""
    found = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in found)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
