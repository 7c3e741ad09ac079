"""GET /: the chat page and its security headers. Source: Content Security Policy Level 3 (W3C)."""

import base64
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from clocher_runtime.disk.files import read_bytes

FILE = Path(__file__).parents[1] / "assets" / "chat.html"
MAX_BYTES = 41_000
_INLINE = re.compile(rb"<(style|script)>(.*?)</\1>", re.S)


class Page(NamedTuple):
    """The page and its headers."""

    body: bytes
    headers: Mapping[str, str]

    async def show(self, request: Request) -> ASGIApp:
        """GET /: the page, or 304 if the browser has it."""
        known = request.headers.get("if-none-match", "").split(",")
        if self.headers["etag"] in (each.strip().removeprefix("W/") for each in known):
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers, media_type="text/html")


def _digest(data: bytes) -> str:
    return base64.b64encode(hashlib.sha256(data).digest()).decode()


def read_page(file: Path = FILE) -> Page:
    """Read the page, whose `<style>` and `<script>` have no attributes.

    Only those run, by their hashes, and only this server is reachable: model output can run
    nothing.
    """
    body = read_bytes(file, MAX_BYTES)
    inline: dict[bytes, list[str]] = {b"script": [], b"style": []}
    for tag, text in _INLINE.findall(body):
        inline[tag].append(f"'sha256-{_digest(text)}'")
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(inline[b"script"]),
        "style-src": " ".join(inline[b"style"]),
        "connect-src": "'self'",
        "img-src": "data:",  # an inline icon; without one browsers request a file
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {to}" for name, to in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        # Browsers prefetch DNS of links, and model output may name any host.
        "x-dns-prefetch-control": "off",
        "cache-control": "no-cache",
        "etag": f'"{_digest(body)}"',
    }
    return Page(body, headers)
