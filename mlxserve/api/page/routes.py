"""`GET /` and `/page/…`: a page with a chat and a view of the engine, for a browser on this machine.

Static files without a build step. They use the API as any client does, with the same checks of
Host, Origin and key; the files themselves need no key, as they hold no data. The content security
policy allows scripts, styles and requests of this server only, none of them inline.
"""

from __future__ import annotations

import gzip
from functools import cache
from importlib.resources import files

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxserve.api.entity_tags import is_known, tag_of
from mlxserve.api.server.compression import GZIP_HEADERS, accepts_gzip

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
)
_HEADERS = {
    "content-security-policy": "; ".join(_POLICY),
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
    "vary": "accept, accept-encoding",
}


class WebPage:
    """The page's files, read once. A browser that has one asks whether it has changed (ETag)."""

    def __init__(self) -> None:
        folder = files("mlxserve.api.page").joinpath("files")
        self._files = {file.name: file.read_bytes() for file in folder.iterdir()}
        self._tags = {name: tag_of(content) for name, content in self._files.items()}

    def routes(self) -> list[Route]:
        return [
            Route("/", self.page, methods=["GET"], include_in_schema=False),
            Route("/page/{name}", self.part, methods=["GET"], include_in_schema=False),
        ]

    async def page(self, request: Request) -> Response:
        """Shows a chat and the engine in a browser."""
        return self._reply(request, "index.html")

    async def part(self, request: Request) -> Response:
        """Sends a script or the style of the page."""
        name = request.path_params["name"]
        if name not in self._files:
            raise HTTPException(404)
        return self._reply(request, name)

    def _reply(self, request: Request, name: str) -> Response:
        """Send a file, compressed to a third for browsers, which all name gzip without a weight."""
        tag, content = self._tags[name], self._files[name]
        headers = {**_HEADERS, "etag": tag}
        if is_known(request.headers, tag):
            return Response(status_code=304, headers=headers)
        kind = _TYPES[name.rpartition(".")[2]]
        if accepts_gzip(request.headers):
            headers |= GZIP_HEADERS
            content = _compressed(content)
        return Response(content, media_type=kind, headers=headers)


@cache
def _compressed(content: bytes) -> bytes:
    """Compress a file once. Nothing of a request is in it, so its size tells nothing of one."""
    return gzip.compress(content, mtime=0)
