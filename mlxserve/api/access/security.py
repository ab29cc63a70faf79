"""Who may talk to the server: checks that run before any route, on every route.

A web page can send requests to a loopback address, directly or after rebinding its own name to
it, so listening on loopback is not a boundary. The Host header must name this server, a browser's
Origin must be allowed, and with API keys configured one of them must be shown.
All are plain ASGI: nothing of the body is read before they have passed.
"""

from __future__ import annotations

import ipaddress
import re
import uuid
from collections.abc import Iterable, Sequence

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlxserve.api.access.keys import Key, Keyring
from mlxserve.api.access.keys import Scope as KeyScope
from mlxserve.api.errors import ApiError, error_response, speaks_anthropic

LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
OPEN_PATHS = ("/health",)  # answered without a key, for those who watch the process
_HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.ASCII)


def request_id(request: Request) -> str:
    """The id sent back as `x-request-id`, also a part of the reply's own id."""
    return str(request.scope["mlxserve.request_id"])


def cache_namespace(request: Request, cache_salt: str | None) -> str | None:
    """The salt under which pages are shared: never across API keys, whatever the client sends."""
    key = _key(request)
    return cache_salt if key is None else f"{key.id}/{cache_salt or ''}"


def client_name(request: Request) -> str:
    """Whose request it is, for a fair share of the engine: the API key's, or everybody's."""
    key = _key(request)
    return "" if key is None else key.id


def is_admin(request: Request) -> bool:
    """Whether it may see and change what belongs to others: an admin's key, or no keys at all."""
    key = _key(request)
    return key is None or key.scope is KeyScope.ADMIN


def require_admin(request: Request) -> None:
    """Raises ApiError 403."""
    if not is_admin(request):
        raise ApiError(403, "This needs an API key of the scope admin.", code="admin_required")


def in_namespace(request: Request, name: str) -> str:
    """A client's name for something, as the process knows it: two keys' names never meet."""
    key = _key(request)
    return name if key is None else f"{key.id}/{name}"


def without_namespace(request: Request, name: str) -> str | None:
    """The client's own name for something; None for what belongs to another key."""
    prefix = in_namespace(request, "")
    return name.removeprefix(prefix) if name.startswith(prefix) else None


def _key(request: Request) -> Key | None:
    """The key that was shown; None where none is needed."""
    key: Key | None = request.scope.get("mlxserve.key")
    return key


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def host_header_name(host: str) -> str:
    """An address or a name as it stands in a Host header: IPv6 in brackets, lower case."""
    return f"[{host}]".lower() if ":" in host else host.lower()


class RequestId:
    """Gives every request an id and every response the header that tells it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = scope["mlxserve.request_id"] = uuid.uuid4().hex

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if speaks_anthropic(scope):
                    headers["request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class HostCheck:
    """Refuses a request whose Host header names anything but this server."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str], *, any_address: bool = False) -> None:
        self._app = app
        self._hosts = frozenset(hosts)
        self._any_address = any_address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._names_us(scope):
            refusal = ApiError(
                403,
                "The Host header does not name this server. "
                "Use its address, or start it with --allowed-host NAME.",
                code="host_not_allowed",
            )
            await error_response(refusal)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _names_us(self, scope: Scope) -> bool:
        hosts = _header_values(scope, b"host")
        if len(hosts) != 1:
            return False
        match = _HOST.fullmatch(hosts[0].lower())
        if match is None:
            return False
        return match["name"] in self._hosts or (self._any_address and _is_address(match["name"]))


class OriginCheck:
    """Refuses what a browser sends on behalf of a page that is not allowed.

    Programs send neither Origin nor Sec-Fetch-Site. An allowed origin also gets the headers that
    let the page read the reply.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str] = ()) -> None:
        self._app = app
        self._origins = frozenset(origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        origins = _header_values(scope, b"origin")
        if not self._allows(scope, origins):
            refusal = ApiError(
                403,
                "Requests from web pages are refused. "
                "Allow this one with --allowed-origin when you trust it.",
                code="origin_not_allowed",
            )
            await error_response(refusal)(scope, receive, send)
            return
        if not origins or origins[0] not in self._origins:
            await self._app(scope, receive, send)
            return
        await self._answer_page(scope, receive, send, origins[0])

    def _allows(self, scope: Scope, origins: list[str]) -> bool:
        if len(origins) > 1:
            return False
        if origins:
            return origins[0] in self._origins or _is_same_origin(scope, origins[0])
        return all(
            site in ("same-origin", "none") for site in _header_values(scope, b"sec-fetch-site")
        )

    async def _answer_page(self, scope: Scope, receive: Receive, send: Send, origin: str) -> None:
        is_preflight = scope["method"] == "OPTIONS" and bool(
            _header_values(scope, b"access-control-request-method")
        )

        async def send_readable(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["access-control-allow-origin"] = origin
                headers["access-control-expose-headers"] = "x-request-id, x-mlxserve-warning"
                headers.append("vary", "Origin")
                if is_preflight:
                    headers["access-control-allow-methods"] = "GET, POST"
                    headers["access-control-allow-headers"] = "authorization, content-type"
                    headers["access-control-max-age"] = "600"
            await send(message)

        if is_preflight:
            await send_readable({"type": "http.response.start", "status": 204, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send_readable)


class ApiKeyCheck:
    """On a locked ring, refuses a request that shows none of its keys."""

    def __init__(self, app: ASGIApp, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] in OPEN_PATHS
        if is_open or not self._keyring.is_locked:
            await self._app(scope, receive, send)
            return
        shown = _shown_key(scope)
        key = self._keyring.find(shown) if shown is not None else None
        if key is None:
            refusal = ApiError(
                401,
                "No valid API key was sent. Send the header `Authorization: Bearer KEY` "
                "or `x-api-key: KEY`.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
            await error_response(refusal)(scope, receive, send)
            return
        scope["mlxserve.key"] = key
        await self._app(scope, receive, send)


def _shown_key(scope: Scope) -> str | None:
    """OpenAI's clients send a bearer, Anthropic's `x-api-key`, some both; two keys are none."""
    keys = {key.strip() for key in _header_values(scope, b"x-api-key")}
    for value in _header_values(scope, b"authorization"):
        scheme, _, key = value.partition(" ")
        if scheme.lower() != "bearer":
            return None
        keys.add(key.strip())
    return keys.pop() if len(keys) == 1 else None


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def _is_same_origin(scope: Scope, origin: str) -> bool:
    host = _header_values(scope, b"host")[0]  # HostCheck saw exactly one
    return origin.lower() == f"{scope['scheme']}://{host}".lower()


def _header_values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]
