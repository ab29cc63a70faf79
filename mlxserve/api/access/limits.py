"""Limits of each API key: concurrent answers, and requests per minute.

They protect the users of a shared server from each other. Without keys there are no limits, since
users cannot be told apart. The owner's key has none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from mlxserve.api.access.keys import Key
from mlxserve.api.errors import ApiError
from mlxserve.system.counted import counted

_LIMITED_METHODS = ("POST", "PUT")  # the methods that give the engine work
# Not limited: the page asks for them while an answer runs, and they give the engine nothing to do.
_WITHOUT_ENGINE = ("/api/v1/render", "/api/v1/documents", "/api/v1/chats", "/api/v1/tools")


@dataclass(slots=True)
class _Account:
    """The running answers of a key, and its remaining quota."""

    num_running: int = 0
    left: float = math.inf
    updated: float = 0.0


@dataclass(slots=True)
class Lease:
    """The answers that one request counts against its key's limit, until its reply has been sent."""

    _account: _Account
    _max: int
    _taken: int = field(default=0)

    def take(self, count: int) -> None:
        """Count `count` more answers. Raises ApiError 429 without counting any."""
        if self._max and self._account.num_running + count > self._max:
            raise too_many(
                f"This API key may have {counted(self._max, 'answer')} running at the same time and has "
                f"{self._account.num_running}. Wait for one to finish.",
                code="too_many_requests",
                seconds=1.0,
            )
        self._account.num_running += count
        self._taken += count

    def close(self) -> None:
        self._account.num_running -= self._taken
        self._taken = 0


class KeyLimits:
    """The accounts of all keys. 0 means no limit; a key's own limits take precedence over these."""

    def __init__(
        self,
        max_requests: int = 0,
        requests_per_minute: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_requests = max_requests
        self._per_minute = requests_per_minute
        self._clock = clock
        self._accounts: dict[str, _Account] = {}  # by key id; never removed, as there are few keys

    def enter(self, key: Key) -> Lease:
        """Count a request with one answer. Raises ApiError 429."""
        account = self._accounts.setdefault(key.id, _Account())
        if key.is_owner:
            return Lease(account, 0)
        lease = Lease(account, _own(key.max_requests, self._max_requests))
        lease.take(1)
        try:
            self._spend(account, _own(key.requests_per_minute, self._per_minute))
        except ApiError:
            lease.close()
            raise
        return lease

    @contextmanager
    def counted(self, scope: Scope, key: Key | None) -> Iterator[None]:
        """Count one request until its reply has been sent. Raises ApiError 429."""
        if key is None or _is_free(scope):
            yield
            return
        lease = scope["mlxserve.lease"] = self.enter(key)
        try:
            yield
        finally:
            lease.close()

    def _spend(self, account: _Account, per_minute: int) -> None:
        """Take one request from a token bucket that holds a minute's worth and fills evenly."""
        if not per_minute:
            return
        now = self._clock()
        gained = (now - account.updated) * per_minute / 60
        account.left, account.updated = min(per_minute, account.left + gained), now
        if account.left < 1:
            raise too_many(
                f"This API key may send {counted(per_minute, 'request')} per minute.",
                code="rate_limit_exceeded",
                seconds=(1 - account.left) * 60 / per_minute,
            )
        account.left -= 1


def _is_free(scope: Scope) -> bool:
    return scope["method"] not in _LIMITED_METHODS or scope["path"].startswith(_WITHOUT_ENGINE)


def claim(request: Request, num_answers: int) -> None:
    """Count every answer of a request against its key's limit. Raises ApiError 429."""
    lease: Lease | None = request.scope.get("mlxserve.lease")
    if lease is not None:
        lease.take(num_answers - 1)


def too_many(message: str, *, code: str, seconds: float) -> ApiError:
    headers = {"retry-after": str(math.ceil(seconds)), "retry-after-ms": str(int(seconds * 1e3))}
    return ApiError(429, message, code=code, headers=headers)


def _own(own: int | None, common: int) -> int:
    return common if own is None else own
