"""The checks of Host and Origin that run before every route, and the permissions of an API key.

Listening on loopback is not a security boundary: a web page can send requests to a loopback
address, directly or after rebinding its own name to it. So the Host header must name this server,
and a browser's Origin must be allowed. They only read the head of a request.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import Scope

from mlxserve.api.access.keys import OWNER, Key
from mlxserve.api.access.keys import Scope as KeyScope
from mlxserve.api.access.names import HostNames, host_name, is_of_app
from mlxserve.api.errors import ApiError
from mlxserve.request import ANONYMOUS
from mlxserve.system import addresses

KEY = "mlxserve.key"  # in the scope of a request: its API key
_CLIENT = "mlxserve.client"  # in the scope of a request: its `client_name`
# Ollama's client for JavaScript names itself, which a browser asks about first.
_ALLOWED_HEADERS = "authorization, content-type, user-agent"
# Headers that a page asks for: official clients send a dozen of their own.
_HEADER_NAMES = re.compile(r"[a-z0-9-]{1,64}(?:, ?[a-z0-9-]{1,64}){0,63}", re.ASCII)


def request_id(request: Request) -> str:
    """The id sent back as `x-request-id`, which is also part of the reply's own id."""
    return str(request.scope["mlxserve.request_id"])


def cache_namespace(request: Request, cache_salt: str | None) -> str | None:
    """The salt of cached pages. It contains the API key's id, so two keys never share a page."""
    owner = key_id(request)
    return f"{owner}/{cache_salt or ''}" if owner else cache_salt


def has_key(request: Request) -> bool:
    """True if the request has an API key: its own, or the owner's by its connection."""
    return request.scope.get(KEY) is not None


def key_id(request: Request) -> str:
    """The id of the API key, owner of what the request creates; empty for the owner and without keys."""
    key: Key | None = request.scope.get(KEY)
    return "" if key is None else key.id


def client_name(request: Request) -> str:
    """The client for fair scheduling: the API key or, without keys, the connection.

    Programs on one machine have one address, so the port belongs to the name.
    """
    name: str | None = request.scope.get(_CLIENT)
    if name is None:
        key: Key | None = request.scope.get(KEY)
        name = connection_name(request) if key is None else key.id or f"{ANONYMOUS}{OWNER}"
        request.scope[_CLIENT] = name
    return name


def connection_name(request: Request) -> str:
    """The client for fair scheduling of what is done before its key is known."""
    peer = request.client
    return ANONYMOUS if peer is None else f"{ANONYMOUS}{peer.host}:{peer.port}"


def is_admin(request: Request) -> bool:
    """True if the request may see and change what belongs to other keys: by its key, or without keys."""
    key = _key(request)
    return key is None or key.scope is KeyScope.ADMIN


def may_see_totals(request: Request) -> bool:
    """True if the request may see totals over all keys."""
    key = _key(request)
    return is_admin(request) or (key is not None and key.scope is KeyScope.METRICS)


def require_totals(request: Request) -> None:
    """Raises ApiError 403 if the request may not see totals over all keys."""
    if not may_see_totals(request):
        message = "This needs an API key with the scope metrics or admin."
        raise ApiError(403, message, code="admin_required")


def require_admin(request: Request) -> None:
    """Raises ApiError 403 if the request has no key with the scope admin."""
    if not is_admin(request):
        raise ApiError(403, "This needs an API key with the scope admin.", code="admin_required")


def models_of_key(request: Request) -> tuple[str, ...]:
    """Names of the models that the request's key may use; () for all."""
    key: Key | None = request.scope.get(KEY)
    return () if key is None else key.models


def _key(request: Request) -> Key | None:
    """The request's API key; None if the server needs none."""
    key: Key | None = request.scope.get(KEY)
    return key


def is_loopback(host: str) -> bool:
    address = addresses.parse(host)
    return host == "localhost" or (address is not None and addresses.is_loopback(address))


def host_header_name(host: str) -> str:
    """An address or a name as in a Host header: lower case, IPv6 in brackets."""
    return f"[{host}]".lower() if ":" in host else host.lower()


class HostCheck:
    """Refuses a request whose Host header does not name this server."""

    def __init__(self, names: HostNames) -> None:
        self._names = names

    def check(self, scope: Scope) -> None:
        """Raises ApiError 403 unless the Host header names this server."""
        hosts = header_values(scope, b"host")
        name = host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None or not self._names.name_us(name):
            raise ApiError(
                403,
                "The Host header does not name this server. "
                "Use its address, or restart it with --allowed-host NAME.",
                code="host_not_allowed",
            )


@dataclass(frozen=True, slots=True)
class PageHeaders:
    """The CORS headers that let a page of an allowed origin read the reply.

    headers: names of the headers that it asks to send
    """

    origin: str
    is_preflight: bool
    headers: str = _ALLOWED_HEADERS

    def add_to(self, headers: MutableHeaders) -> None:
        headers["access-control-allow-origin"] = self.origin
        headers["access-control-expose-headers"] = "x-request-id, x-mlxserve-warning"
        headers.append("vary", "Origin")
        if self.is_preflight:
            headers["access-control-allow-methods"] = "GET, POST, PATCH, DELETE"
            headers["access-control-allow-headers"] = self.headers
            headers["access-control-max-age"] = "600"


class OriginCheck:
    """Refuses requests that a browser sends for a web page that is not allowed.

    Programs send neither Origin nor Sec-Fetch-Site; those with a web view send an origin of their own.
    """

    def __init__(self, names: HostNames, origins: Sequence[str] = ()) -> None:
        self._names = names
        self._origins = frozenset(origins)

    def check(self, scope: Scope) -> PageHeaders | None:
        """Return CORS headers for a page whose origin is allowed by name, else None.

        Raises ApiError 403 for any other page.
        """
        origins = header_values(scope, b"origin")
        if not self._allows(scope, origins):
            raise ApiError(
                403,
                "Requests from web pages are refused. "
                "If you trust this one, allow it with --allowed-origin.",
                code="origin_not_allowed",
            )
        if not origins or not self._is_named(origins[0]):
            return None
        is_preflight = scope["method"] == "OPTIONS" and bool(
            header_values(scope, b"access-control-request-method")
        )
        return PageHeaders(origins[0], is_preflight, _headers_to_send(scope))

    def _is_named(self, origin: str) -> bool:
        return origin in self._origins or is_of_app(origin)

    def _allows(self, scope: Scope, origins: list[str]) -> bool:
        if len(origins) > 1:
            return False
        if origins:
            return self._is_named(origins[0]) or (
                is_same_origin(scope, origins[0]) and self._is_our_page(scope)
            )
        sites = header_values(scope, b"sec-fetch-site")
        if not all(site in ("same-origin", "none") for site in sites):
            return False
        return "same-origin" not in sites or self._is_our_page(scope)

    def _is_our_page(self, scope: Scope) -> bool:
        """True if a page under the request's host is this server's."""
        # HostCheck has required exactly one.
        [host] = header_values(scope, b"host")
        name = host_name(host)
        return name is not None and self._names.cannot_be_rebound(name)


def _headers_to_send(scope: Scope) -> str:
    """Names of the headers that a page, which is trusted, asks to send; else the usual ones."""
    names = header_values(scope, b"access-control-request-headers")
    is_list = len(names) == 1 and _HEADER_NAMES.fullmatch(names[0].lower())
    return names[0] if is_list else _ALLOWED_HEADERS


def is_same_origin(scope: Scope, origin: str) -> bool:
    # HostCheck has required exactly one.
    host = header_values(scope, b"host")[0]
    return origin.lower() == f"{scope['scheme']}://{host}".lower()


def header_values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]
