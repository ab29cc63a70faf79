"""The checks of Host and Origin that run before every route, and the permissions of an API key.

Listening on loopback is not a security boundary: a web page can send requests to a loopback
address, directly or after rebinding its own name to it. So the Host header must name this server,
and a browser's Origin must be allowed. They only read the head of a request.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import Scope

from mlxserve.api.access.keys import OWNER, Key
from mlxserve.api.access.keys import Scope as KeyScope
from mlxserve.api.errors import ApiError
from mlxserve.request import ANONYMOUS

_CLIENT = "mlxserve.client"  # in the scope of a request: its `client_name`
LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "[::1]")
# Ollama's client for JavaScript names itself, which a browser asks about first.
_ALLOWED_HEADERS = "authorization, content-type, user-agent"
_HOST = re.compile(r"(?P<name>[a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?", re.ASCII)


def request_id(request: Request) -> str:
    """The id sent back as `x-request-id`, which is also part of the reply's own id."""
    return str(request.scope["mlxserve.request_id"])


def cache_namespace(request: Request, cache_salt: str | None) -> str | None:
    """The salt of cached pages. It contains the API key's id, so two keys never share a page."""
    owner = key_id(request)
    return f"{owner}/{cache_salt or ''}" if owner else cache_salt


def has_key(request: Request) -> bool:
    """True if the request has an API key: its own, or the owner's by its connection."""
    return _key(request) is not None


def key_id(request: Request) -> str:
    """The id of the API key, owner of what the request creates; empty for the owner and without keys."""
    key = _key(request)
    return "" if key is None else key.id


def client_name(request: Request) -> str:
    """The client for fair scheduling: the API key or, without keys, the connection.

    Programs on one machine have one address, so the port belongs to the name.
    """
    name: str | None = request.scope.get(_CLIENT)
    if name is None:
        key, peer = _key(request), request.client
        if key is not None:
            name = key.id or f"{ANONYMOUS}{OWNER}"
        else:
            name = ANONYMOUS if peer is None else f"{ANONYMOUS}{peer.host}:{peer.port}"
        request.scope[_CLIENT] = name
    return name


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
    key = _key(request)
    return () if key is None else key.models


def _key(request: Request) -> Key | None:
    """The request's API key; None if the server needs none."""
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
    """An address or a name as in a Host header: lower case, IPv6 in brackets."""
    return f"[{host}]".lower() if ":" in host else host.lower()


class HostCheck:
    """Refuses a request whose Host header does not name this server."""

    def __init__(self, hosts: Iterable[str], *, any_address: bool = False) -> None:
        self._hosts = frozenset(hosts)
        self._any_address = any_address

    def check(self, scope: Scope) -> None:
        """Raises ApiError 403 unless the Host header names this server."""
        if not self._names_us(header_values(scope, b"host")):
            raise ApiError(
                403,
                "The Host header does not name this server. "
                "Use its address, or restart it with --allowed-host NAME.",
                code="host_not_allowed",
            )

    def _names_us(self, hosts: Sequence[str]) -> bool:
        name = host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None:
            return False
        return name in self._hosts or (self._any_address and _is_address(name))


@dataclass(frozen=True, slots=True)
class PageHeaders:
    """The CORS headers that let a web page of an allowed origin read the reply."""

    origin: str
    is_preflight: bool

    def add_to(self, headers: MutableHeaders) -> None:
        headers["access-control-allow-origin"] = self.origin
        headers["access-control-expose-headers"] = "x-request-id, x-mlxserve-warning"
        headers.append("vary", "Origin")
        if self.is_preflight:
            headers["access-control-allow-methods"] = "GET, POST"
            headers["access-control-allow-headers"] = _ALLOWED_HEADERS
            headers["access-control-max-age"] = "600"


class OriginCheck:
    """Refuses requests that a browser sends for a web page that is not allowed.

    Programs send neither Origin nor Sec-Fetch-Site.
    """

    def __init__(self, origins: Sequence[str] = ()) -> None:
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
        if not origins or origins[0] not in self._origins:
            return None
        is_preflight = scope["method"] == "OPTIONS" and bool(
            header_values(scope, b"access-control-request-method")
        )
        return PageHeaders(origins[0], is_preflight)

    def _allows(self, scope: Scope, origins: list[str]) -> bool:
        if len(origins) > 1:
            return False
        if origins:
            return origins[0] in self._origins or is_same_origin(scope, origins[0])
        return all(
            site in ("same-origin", "none") for site in header_values(scope, b"sec-fetch-site")
        )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def host_name(host: str) -> str | None:
    """Parse a Host header: its name or address, without the port; None if it is neither."""
    match = _HOST.fullmatch(host.lower())
    return match["name"] if match else None


def is_same_origin(scope: Scope, origin: str) -> bool:
    # HostCheck has required exactly one.
    host = header_values(scope, b"host")[0]
    return origin.lower() == f"{scope['scheme']}://{host}".lower()


def header_values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key.lower() == name]
