"""`GET /`: a page with a chat and a view of the engine, for a browser on this machine.

One static file without a build step. It uses the API as any client does, under the same checks of
Host, Origin and key; the file itself needs no key, as it holds no data. Its content security policy
allows its own script and style, by their digests, and requests to this server only.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_PARTS = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


class WebPage:
    """The page, read once."""

    def __init__(self) -> None:
        text = files("mlxserve.api.page").joinpath("index.html").read_text(encoding="utf-8")
        self._content = text.encode()
        self._headers = {
            "content-security-policy": _policy(text),
            "x-content-type-options": "nosniff",
            "x-frame-options": "DENY",
            "referrer-policy": "no-referrer",
            "cache-control": "no-cache",
        }

    def routes(self) -> list[Route]:
        return [Route("/", self.page, methods=["GET"], include_in_schema=False)]

    async def page(self, _request: Request) -> Response:
        """Shows a chat and the engine in a browser."""
        return Response(self._content, media_type="text/html", headers=self._headers)


def _policy(text: str) -> str:
    digests = {kind: _digest(content) for kind, content in _PARTS.findall(text)}
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src '{digests['script']}'",
            f"style-src '{digests['style']}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )


def _digest(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
