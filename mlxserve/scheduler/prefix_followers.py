"""PrefixFollowers: cold requests with a common prefix, of which one computes it and the others wait.

Matching by hash finds pages only once they are published, so requests that arrive together would
each compute and hold the same prefix. Here it is known which running request is about to compute a
page. A request that needs the same pages waits, without any, until they are published or no request
computes them any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from mlxserve.request import LiveRequest
from mlxserve.stats import SchedulerStats


class PrefixFollowers:
    """Leaders are running, followers are waiting: no request is both, so no wait is circular."""

    def __init__(self, min_shared_pages: int, stats: SchedulerStats) -> None:
        """`min_shared_pages`: for fewer pages, waiting costs more than computing."""
        self._min_shared_pages = min_shared_pages
        self._leaders: dict[bytes, LiveRequest] = {}  # hash of a page -> who is computing it
        self._followers: set[LiveRequest] = set()
        self._stats = stats

    def __contains__(self, request: LiveRequest) -> bool:
        """Whether it follows, as of the last time that admission looked at it."""
        return request in self._followers

    def lead(self, request: LiveRequest, hashes: Iterable[bytes]) -> None:
        """The request starts to compute the pages of these hashes; those being computed stay with
        their leaders."""
        self._followers.discard(request)
        for hash_ in hashes:
            self._leaders.setdefault(hash_, request)

    def pages_published(self, hashes: Iterable[bytes]) -> None:
        """The pages of these hashes can be found from now on."""
        for hash_ in hashes:
            self._leaders.pop(hash_, None)

    def leave(self, request: LiveRequest) -> None:
        """The request neither computes nor waits any more."""
        self._followers.discard(request)
        # What is being computed is short beside the context of an agent.
        hashes = min(request.page_hashes, list(self._leaders), key=len)
        for hash_ in hashes:
            if self._leaders.get(hash_) is request:
                del self._leaders[hash_]

    def must_wait(self, request: LiveRequest, missing: Sequence[bytes]) -> bool:
        """Whether others are computing enough of the `missing` pages, from the first one on.

        Once it follows it waits for the whole run: its last pages are about to be published.
        """
        enough = 1 if request in self._followers else self._min_shared_pages
        if len(missing) < enough or any(h not in self._leaders for h in missing[:enough]):
            self._followers.discard(request)
            return False
        self._stats.prefix_follow_waits += request not in self._followers
        self._followers.add(request)
        return True

    def check(self, running: Sequence[LiveRequest], waiting: Sequence[LiveRequest]) -> None:
        """Audit. Raises AssertionError."""
        assert set(self._leaders.values()) <= set(running), "a leader is not running"
        for leader in set(self._leaders.values()):
            is_done = leader.num_computed >= leader.prefill_end and not leader.num_in_flight
            assert not is_done, f"{leader.id} leads, but has nothing left to compute"
        assert self._followers <= set(waiting), "a follower is not waiting"
