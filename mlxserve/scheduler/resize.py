"""Resize: what a new number of pages is refused for, and what it changed.

refused    nothing happened: the pins, or a live request, would not fit
make room  requests whose pages are being read return them; then victims, as in any shortage
move       the pool ends its last ids; page tables and copies follow what moved to other ids
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mlxserve.errors import PagesPromised, PrefixQuotaExceeded
from mlxserve.request import LiveRequest, Resized, check_num_pages
from mlxserve.scheduler.page_tables import PageTables


@dataclass(frozen=True, slots=True)
class PoolResize:
    """What `Resized` tells users, and where pages moved: the engine moves what they hold."""

    num_pages: int
    max_model_len: int
    num_preempted: int
    num_forgotten: int
    moves: Mapping[int, int]  # old page id -> new page id

    def public(self) -> Resized:
        """Without page ids, which mean nothing outside the engine."""
        return Resized(
            self.num_pages,
            self.max_model_len,
            self.num_preempted,
            self.num_forgotten,
            len(self.moves),
        )


def check_resize(num_pages: int, tables: PageTables, live: Iterable[LiveRequest]) -> None:
    """Raises InvalidParameter; PrefixQuotaExceeded where named prefixes have too many pages for it,
    and PagesPromised where it would cut the answer of a live request."""
    check_num_pages(num_pages)
    quota = tables.pins.quota_of(num_pages)
    if tables.pins.num_pages > quota:
        raise PrefixQuotaExceeded(
            f"named prefixes have {tables.pins.num_pages} pages, but of {num_pages} they may "
            f"have only {quota}. Remove a prefix, keep more pages, or raise max_pinned_fraction."
        )
    for request in live:
        owed = tables.owed(request)
        if not tables.can_have(request, owed, num_pages):
            raise PagesPromised(
                f"{num_pages} pages would leave {tables.capacity(request, num_pages)} tokens for a "
                f"request that has {len(request.token_ids)} and was promised {owed}: its answer "
                "would be cut. Keep more pages, abort it, or try again when it has ended."
            )
