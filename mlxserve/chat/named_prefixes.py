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
    """Those of one engine: their pages are pinned. Methods may be called from any event loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        store: PrefixStore,
        compute: Compute,
        *,
        salt_of: Callable[[str | None], bytes],
    ) -> None:
        """salt_of: the salt of pages for the `cache_salt` of a request"""
        self._engine = engine
        self._store = store
        self._compute = compute
        self._salt_of = salt_of
        self._warned: set[str] = set()  # prefixes that were named under another salt

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

        Only requests with the same `cache_salt` find it. It replaces a prefix of the same name
        once it is computed; until then both count against `max_pinned_fraction`. `max_share` is
        the most that this client may have of that fraction. Raises InvalidRequest for an empty
        name or prefix, PrefixQuotaExceeded, PagesPromised if it would cut a running answer, and
        what `Writer.submit` raises.
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
        """Each named prefix and its number of tokens."""
        return self._store.sizes()

    def of_request(self, name: str, cache_salt: str | None) -> NamedPrefix:
        """What a request that names a prefix begins with. Raises UnknownPrefix.

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
        """The tokens of all that were named under a salt."""
        return self._store.of_salt(salt)

    async def restore(self, is_client: Callable[[str], bool] = lambda _: True) -> None:
        """Compute the prefixes that were named before the start, or read their pages from disk.

        They go after other requests. One whose client `is_client` does not know stays in the file,
        as another server may know the client; for one that does not fit any more a warning says so.
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
        """What had the name until now."""
        self._warned.discard(name)
        if old is not None and old.request_id is not None:
            self._engine.unpin(old.request_id)
