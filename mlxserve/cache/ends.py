"""Ends: page boundaries where conversations can be continued, and which of them is dropped first.

An end is a full page after which the units of a kind are kept: the window before it, or the state after it. Full
pages are usable only up to an end, so one end of a few units saves all the tokens before it. The cost of an end is

    tokens that would be computed again / memory that is freed / how long ago it was used

Time is counted in requests that have ended. Dropping an end frees the units that no other end has, and the full
pages that lead only to it. An end saves only the tokens after the end before it:

    0 ──────── end of a shared beginning ──────── end of a prompt ── end of its answer
               saves all tokens before it         saves these        saves a few
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# The conversation has continued to a later end: only an edit of an earlier message comes back to this one. With
# 0.1, two alternating chats computed 1.7 times their new tokens instead of 1.04.
_PASSED = 0.01
_LAST = 2.0  # no later end is known: the newest turn of a conversation
_SHARED = 2.0  # several requests have continued there
_MOST_STALE = 64  # stale entries to tolerate beside twice the number of ends


@dataclass(slots=True)
class End:
    """A page boundary where a conversation can be continued.

    hashes: those of the pages of its window, or of the state's page; its own last
    num_tokens: length of the prefix
    used: time of the last use, as `EvictionOrder.clock` counts it
    before: hash of an earlier end of the same prefix; None if no such end is known
    is_passed: the conversation has continued to a later end
    """

    hashes: Sequence[bytes]
    num_tokens: int
    used: int
    number: int
    before: bytes | None = None
    num_uses: int = 0
    is_passed: bool = False

    @property
    def likelihood(self) -> float:
        """How likely the end is used again, relative to another one with the same last use."""
        if self.num_uses > 1:
            return _SHARED
        return _PASSED if self.is_passed else 1.0


class Ends:
    """Ends by the hash of their last page."""

    def __init__(self) -> None:
        self._ends: dict[bytes, End] = {}
        self._num_ends: Counter[bytes] = Counter()  # of each page in a window
        self._after: dict[bytes, set[bytes]] = {}  # the ends whose `before` is this one
        self._num_added = 0  # so far, for an order among ends of the same cost
        # (used, number, hash) of the ends that are not passed and of those that are, the earliest first; entries
        # of ends that were used later, or are in the other list or gone, are stale.
        self._by_use: tuple[list[tuple[int, int, bytes]], ...] = ([], [])

    def __contains__(self, hash_: bytes) -> bool:
        return hash_ in self._ends

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._ends)

    def __len__(self) -> int:
        return len(self._ends)

    def add(
        self, hashes: Sequence[bytes], num_tokens: int, now: int, before: bytes | None = None
    ) -> None:
        """Add the end of a prefix of `num_tokens` tokens, or mark a known one as used.

        hashes: those of the pages of its window
        before: the last end before it, as `last_before` returns it; by default, the last one in its window
        """
        hash_ = hashes[-1]
        if (end := self._ends.get(hash_)) is not None:
            end.used, end.is_passed = now, False
            self._file(end)
            return
        before = before or self.last_before(hashes)
        self._num_added += 1
        self._ends[hash_] = end = End(hashes, num_tokens, now, self._num_added, before)
        if before is not None:
            self._after.setdefault(before, set()).add(hash_)
        self._file(end)
        self._num_ends.update(hashes)

    def last_before(self, path: Sequence[bytes]) -> bytes | None:
        """Return the last end before the last page of `path`; None if there is none.

        path: hashes of the pages of a prefix
        """
        return next((hash_ for hash_ in reversed(path[:-1]) if hash_ in self._ends), None)

    def touch(self, hash_: bytes, now: int) -> None:
        """Mark an end as used, because a request waits to continue from it; no-op if it is unknown."""
        if (end := self._ends.get(hash_)) is not None:
            end.used = now
            self._file(end)

    def use(self, hash_: bytes, now: int) -> None:
        """Count a request that continues from an end; no-op if it is unknown."""
        self.touch(hash_, now)
        if (end := self._ends.get(hash_)) is not None:
            end.num_uses += 1

    def pass_by(self, hash_: bytes) -> None:
        """Mark an end and those before it as passed: the conversation has a later one.

        No-op if the end is unknown. Ends before a passed one were passed with it.
        """
        end = self._ends.get(hash_)
        for each in end.hashes[:-1] if end is not None else ():
            if (earlier := self._ends.get(each)) is not None:
                self._pass(earlier)
        while end is not None and not end.is_passed:
            self._pass(end)
            end = None if end.before is None else self._ends[end.before]

    def _pass(self, end: End) -> None:
        end.is_passed = True
        self._file(end)

    def hashes_of(self, hash_: bytes) -> Sequence[bytes]:
        """Return the hashes of the pages in the window of an end."""
        return self._ends[hash_].hashes

    def has_unit(self, hash_: bytes) -> bool:
        """Return True if the page with this hash is in the window of an end."""
        return hash_ in self._num_ends

    def drop(self, hash_: bytes) -> list[bytes]:
        """Drop an end, and return the hashes of the pages that no other end has."""
        end = self._ends.pop(hash_)
        self._unlink(hash_, end.before)
        self._num_ends.subtract(end.hashes)
        alone = [each for each in end.hashes if not self._num_ends[each]]
        for each in alone:
            del self._num_ends[each]
        return alone

    def _unlink(self, hash_: bytes, before: bytes | None) -> None:
        """Link the ends after a dropped one to the end before it."""
        after = self._after.pop(hash_, set())
        for each in after:
            self._ends[each].before = before
        if before is not None:
            siblings = self._after[before]
            siblings.discard(hash_)
            siblings |= after
            if not siblings:
                del self._after[before]

    def with_any(self, matches: Callable[[bytes], bool]) -> list[bytes]:
        """Return the ends that have a matching page in their window."""
        return [hash_ for hash_, end in self._ends.items() if any(map(matches, end.hashes))]

    def cheapest(
        self,
        now: int,
        num_freed: Callable[[bytes, End, bool], float],
        least: float = 0.0,
    ) -> tuple[float, bytes] | None:
        """Return (cost, hash) of the end to drop first; None if none frees anything."""
        return next(iter(self.first_by_cost(1, now, num_freed, least)), None)

    def first_by_cost(
        self,
        count: int,
        now: int,
        num_freed: Callable[[bytes, End, bool], float],
        least: float = 0.0,
    ) -> list[tuple[float, bytes]]:
        """Return (cost, hash) of up to `count` ends, the cheapest first, by their costs as of now.

        Examines only ends that were used long enough ago to cost less than the best ones so far.

        num_freed: takes the hash of an end, the end, and True if no later end is known; returns the full pages
            that dropping it frees, or 0 to keep it
        least: minimum tokens that an end saves for each unit that is freed with it
        """
        best: list[tuple[float, int, bytes]] = []
        for entries, likelihood in zip(self._by_use, (1.0, _PASSED), strict=True):
            for used, number, hash_ in entries:
                is_full = len(best) == count
                if is_full and least * likelihood / (1 + now - used) > best[-1][0]:
                    break
                end = self._ends.get(hash_)
                if end is None or (end.number, end.used) != (number, used):
                    continue
                if entries is not self._by_use[end.is_passed]:
                    continue
                cost = self._cost(hash_, end, now, num_freed)
                if cost is not None and (not is_full or (cost, number) < best[-1][:2]):
                    insort(best, (cost, number, hash_))
                    del best[count:]
        return [(cost, hash_) for cost, _, hash_ in best]

    def _cost(
        self, hash_: bytes, end: End, now: int, num_freed: Callable[[bytes, End, bool], float]
    ) -> float | None:
        is_leaf = self._num_ends[hash_] == 1 and hash_ not in self._after
        if not (count := num_freed(hash_, end, is_leaf)):
            return None
        likelihood = end.likelihood * (_LAST if is_leaf else 1)
        return self.num_saved(end) * likelihood / count / (1 + now - end.used)

    def _file(self, end: End) -> None:
        """File an end that is new, was used or has been passed."""
        entries = self._by_use[end.is_passed]
        entry = end.used, end.number, end.hashes[-1]
        index = bisect_left(entries, entry)
        if index < len(entries) and entries[index] == entry:
            return
        entries.insert(index, entry)
        if len(entries) > 2 * len(self._ends) + _MOST_STALE:
            entries[:] = sorted(
                (end.used, end.number, hash_)
                for hash_, end in self._ends.items()
                if end.is_passed == (entries is self._by_use[True])
            )

    def alone(self, end: End) -> list[bytes]:
        """Return the hashes of the pages in an end's window that no other end has."""
        return [each for each in end.hashes if self._num_ends[each] == 1]

    def num_saved(self, end: End) -> int:
        """Return the tokens that would be computed again without this end."""
        for hash_ in reversed(end.hashes[:-1]):
            if (earlier := self._ends.get(hash_)) is not None:
                return end.num_tokens - earlier.num_tokens
        earlier = None if end.before is None else self._ends[end.before]
        return end.num_tokens - (0 if earlier is None else earlier.num_tokens)

    def clear(self) -> None:
        self._ends.clear()
        self._num_ends.clear()
        self._after.clear()
        for entries in self._by_use:
            entries.clear()

    def check(self) -> None:
        """Audit the invariants. Raises AssertionError."""
        counted = Counter(each for end in self._ends.values() for each in end.hashes)
        assert counted == self._num_ends, "the pages of ends are miscounted"
        for hash_, end in self._ends.items():
            entry = end.used, end.number, hash_
            assert entry in self._by_use[end.is_passed], "an end is not found by its last use"
            if end.before is not None:
                earlier = self._ends.get(end.before)
                assert earlier is not None, "the end before another one is gone"
                assert earlier.num_tokens < end.num_tokens, "an end comes before an earlier one"
                assert hash_ in self._after[end.before], "an end is not found after another one"
        num_linked = sum(end.before is not None for end in self._ends.values())
        assert sum(map(len, self._after.values())) == num_linked, "an end is linked that is gone"
        assert all(entries == sorted(entries) for entries in self._by_use), "ends are out of order"
