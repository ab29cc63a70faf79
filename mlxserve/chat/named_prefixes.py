"""NamedPrefixes: prefixes that are computed once and prepended to prompts by their names."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from mlxserve.chat.prefix_store import NamedPrefix, PrefixStore
from mlxserve.core.errors import EngineStopped, InvalidParameter, MlxServeError
from mlxserve.images.picture import pictures_of

if TYPE_CHECKING:  # it imports mlx, which waits for machine.prepare()
    from mlxserve.engine.async_engine import AsyncEngine

log = logging.getLogger("mlxserve.chat")

# Computes a prefix with a priority; the id of the request under which its pages are pinned.
Compute: TypeAlias = Callable[[NamedPrefix, int], Awaitable[str]]

_RESTORE_PRIORITY = 1000  # of prefixes of before the start: after what people wait for


class NamedPrefixes:
    """The prefixes of one engine, whose pages are pinned. Usable from any event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        store: PrefixStore,
        compute: Compute,
        *,
        salt_of: Callable[[str | None], bytes],
    ) -> None:
        """salt_of: maps a request's `cache_salt` to the salt of pages."""
        self._engine = engine
        self._store = store
        self._compute = compute
        self._salt_of = salt_of
        self._warned: set[str] = set()  # prefixes that requests named with another salt

    async def add(
        self,
        name: str,
        token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        client: str = "",
        max_share: float = 1.0,
    ) -> None:
        """Compute a prefix and keep its pages, for requests that begin with it.

        Only requests with the same `cache_salt` find it. It replaces a prefix of the same name once
        it is computed; until then both count against `max_pinned_fraction`. `max_share` is this
        client's maximum part of that fraction. Raises InvalidRequest for an empty name or prefix,
        PrefixQuotaExceeded, PagesPromised if it would cut a running answer, and the errors of
        `Writer.submit`.
        """
        if not name:
            raise InvalidParameter("prefix_name", "must not be empty")
        if pictures_of(token_ids):
            raise InvalidParameter("messages", "a named prefix cannot hold images; leave them out")
        prefix = NamedPrefix(tuple(token_ids), self._salt_of(cache_salt), client, max_share)
        prefix = replace(prefix, request_id=await self._compute(prefix, 0))
        self._forget(name, self._store.put(name, prefix))

    def remove(self, name: str) -> None:
        """Forget a named prefix, so that its pages may be evicted. Raises UnknownPrefix."""
        self._forget(name, self._store.remove(name))

    def sizes(self) -> dict[str, int]:
        """Number of tokens of each prefix, by name."""
        return self._store.sizes()

    def of_request(self, name: str, cache_salt: str | None) -> NamedPrefix:
        """The prefix that a request names. Raises UnknownPrefix.

        Its pages are found under the prefix's own salt, unless the request has one.
        """
        prefix = self._store.find(name)
        if cache_salt is None:
            return prefix
        salt = self._salt_of(cache_salt)
        if salt != prefix.salt and name not in self._warned:
            self._warned.add(name)
            log.warning(
                "A request names the prefix %r, but has another cache_salt than it was added with: "
                "such requests find none of its pages, and compute them. Leave cache_salt out, or "
                "add the prefix with it.",
                name,
            )
        return replace(prefix, salt=salt)

    def of_salt(self, salt: bytes) -> list[tuple[int, ...]]:
        """The token ids of all prefixes with this salt."""
        return self._store.of_salt(salt)

    async def restore(self, is_client: Callable[[str], bool] = lambda _: True) -> None:
        """Compute the prefixes of earlier processes, or read their pages from disk.

        They run after other requests. A prefix stays in the file if `is_client` does not know its
        client, which may be another server's. A prefix that no longer fits is skipped with a
        warning.
        """
        for name, prefix in self._store.missing():
            if not is_client(prefix.client):
                log.info("The prefix %r is of an API key that this server does not have", name)
                continue
            try:
                request_id = await self._compute(prefix, _RESTORE_PRIORITY)
            except EngineStopped:
                return
            except MlxServeError as error:
                log.warning("The prefix %r is not kept in memory: %s", name, error)
                continue
            if not self._store.computed(name, prefix, request_id):
                self._engine.unpin(request_id)

    def _forget(self, name: str, old: NamedPrefix | None) -> None:
        """Unpin the pages of the prefix that had the name before."""
        self._warned.discard(name)
        if old is not None and old.request_id is not None:
            self._engine.unpin(old.request_id)
