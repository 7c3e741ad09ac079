"""GET /: the chat page, one file, and the headers that keep it to itself.

Sources: Content Security Policy Level 3 (W3C), sections 6.1, 6.3 and 8.3; RFC 9110, section 13.
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from clocher_runtime.disk.files import read_bytes

FILE = Path(__file__).parents[1] / "assets" / "chat.html"
MAX_BYTES = 41_000
_INLINE = re.compile(rb"<(style|script)>(.*?)</\1>", re.S)


@dataclass(frozen=True, slots=True)
class Page:
    """The page as it is sent.

    Attributes:
        body: the file.
        headers: of every answer.
    """

    body: bytes
    headers: Mapping[str, str]

    async def show(self, request: Request) -> ASGIApp:
        """GET /: the page, or 304 to a browser that has it already."""
        known = request.headers.get("if-none-match", "").split(",")
        if self.headers["etag"] in (each.strip().removeprefix("W/") for each in known):
            return Response(status_code=304, headers=self.headers)
        return Response(self.body, headers=self.headers, media_type="text/html")


def read_page(file: Path = FILE) -> Page:
    """Read the page and name what it may do.

    It may run the styles and scripts that are in the file, known by their hashes, and talk to the
    server that it is from. What a model says can therefore load nothing and run nothing.

    Args:
        file: HTML whose `<style>` and `<script>` have no attributes.
    """
    body = read_bytes(file, MAX_BYTES)
    digest = base64.b64encode(hashlib.sha256(body).digest()).decode()
    policy = {
        "default-src": "'none'",
        "script-src": _hashes(body, b"script"),
        "style-src": _hashes(body, b"style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon, which is in the file; without one browsers ask for a file
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return Page(
        body,
        {
            "content-security-policy": "; ".join(f"{name} {to}" for name, to in policy.items()),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            # Browsers look up the hosts of links, and what a model says may name any.
            "x-dns-prefetch-control": "off",
            "cache-control": "no-cache",
            "etag": f'"{digest}"',
        },
    )


def _hashes(body: bytes, tag: bytes) -> str:
    """Return the sources of a policy for the elements of a file."""
    texts = [text for name, text in _INLINE.findall(body) if name == tag]
    digests = (base64.b64encode(hashlib.sha256(text).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in digests)
