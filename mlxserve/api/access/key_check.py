"""The check of API keys that runs before every route, once the key file or the options have keys.

A request without a key counts as one with the owner's key, if there is one and the connection shows
that a program of the server's own user on its own machine sent it.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Scope

from mlxserve.api.access.keys import Key, Keyring
from mlxserve.api.access.keys import Scope as KeyScope
from mlxserve.api.access.same_user import BEHIND_PROXY, is_from_same_user
from mlxserve.api.access.security import KEY, header_values
from mlxserve.api.errors import ApiError

# Answered without a key: for process monitors, and the page, which asks for the key it then sends.
OPEN_PATHS = ("/health", "/")
OPEN_FOLDER = "/page/"  # the page's scripts and its style
POLLED_PATHS = ("/metrics", "/ready", "/version")  # all that a key of the scope metrics may read


class KeyCheck:
    """Refuses a request without a valid key, if the ring is locked."""

    def __init__(self, keyring: Keyring, *, is_behind_proxy: bool = False) -> None:
        """is_behind_proxy: connections do not identify the sender, since a proxy shares them."""
        self._keyring = keyring
        self._is_behind_proxy = is_behind_proxy

    async def check(self, scope: Scope) -> Key | None:
        """Find the request's key and put it into the scope; None if the request needs none.

        Raises ApiError 401, and 403 for a path that the key may not read.
        """
        scope[BEHIND_PROXY] = self._is_behind_proxy
        if _is_open(scope["path"]) or not self._keyring.is_locked:
            return None
        key = self._sent(scope) if _has_credentials(scope) else await self._owner(scope)
        if key is None:
            raise ApiError(
                401,
                "No valid API key was sent. Send the header `Authorization: Bearer KEY` "
                "or `x-api-key: KEY`.",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        if key.scope is KeyScope.METRICS and scope["path"] not in POLLED_PATHS:
            raise ApiError(
                403, "This API key may only read /metrics and /ready.", code="metrics_only"
            )
        scope[KEY] = key
        return key

    def _sent(self, scope: Scope) -> Key | None:
        secret = _sent_secret(scope)
        return self._keyring.find(secret) if secret is not None else None

    async def _owner(self, scope: Scope) -> Key | None:
        """Return the owner's key if the connection stands for it, else None."""
        owner = self._keyring.owner
        is_theirs = owner is not None and await is_from_same_user(Request(scope))
        return owner if is_theirs else None


def _is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith(OPEN_FOLDER)


def _has_credentials(scope: Scope) -> bool:
    return any(header_values(scope, name) for name in (b"x-api-key", b"authorization"))


def _sent_secret(scope: Scope) -> str | None:
    """Read the key from `Authorization: Bearer` (OpenAI's clients) or `x-api-key` (Anthropic's).

    Some clients send both. Returns None if they differ.
    """
    secrets = {secret.strip() for secret in header_values(scope, b"x-api-key")}
    for value in header_values(scope, b"authorization"):
        scheme, _, secret = value.partition(" ")
        if scheme.lower() != "bearer":
            return None
        secrets.add(secret.strip())
    return secrets.pop() if len(secrets) == 1 else None
