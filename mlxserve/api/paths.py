"""The paths that clients request for a route: with too many or too few of `/v1`, `/api` and slashes.

A base URL with or without `/v1` is the commonest mistake in a client's settings.

    /chat/completions   /v1/v1/chat/completions   /v1//chat/completions/   ->   /v1/chat/completions
    /v1/api/chat   ->   /api/chat
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import lru_cache

from starlette.routing import Route

_SLASHES = re.compile("/{2,}")
_VERSIONS = re.compile("(?:/v1)+(?=/|$)")


class CanonicalPaths:
    """Finds the path of the route that a request means."""

    def __init__(self, routes: Iterable[Route]) -> None:
        routes = list(routes)
        self._literal = frozenset(route.path for route in routes if "{" not in route.path)
        self._patterns = tuple(route.path_regex for route in routes if "{" in route.path)
        # Paths of clients that are wrong are wrong in every request.
        self.canonical = lru_cache(maxsize=256)(self._canonical)

    def _canonical(self, path: str) -> str:
        """The path of a route; the same path if no route is meant."""
        if path in self._literal:
            return path
        return next((meant for meant in _meant(path) if self._is_known(meant)), path)

    def _is_known(self, path: str) -> bool:
        return path in self._literal or any(pattern.match(path) for pattern in self._patterns)


def _meant(path: str) -> Iterator[str]:
    """Yield the paths that a request may mean, the nearest first."""
    plain = _SLASHES.sub("/", path).rstrip("/") or "/"
    yield plain
    once = _VERSIONS.sub("/v1", plain, count=1)
    yield once
    yield f"/v1{plain}"
    yield once.removeprefix("/v1")
