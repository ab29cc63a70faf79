"""Ends: where conversations can be continued, and which of these places is given up first.

An end is a full page after which the units of a kind are kept: the window before it, or the state after it. Full
pages are of use only up to an end, so one end of a few units saves all the tokens before it. What an end costs is

    tokens that would be computed again / memory that is freed / how long ago it was used

Time is counted in requests that have ended. With an end go the units that no other end has, and the full pages
that lead to it alone. An end within the window of a later one saves only the tokens between the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

# A conversation went on from it to a later end: only who edits one of the earlier messages comes back. With 0.1,
# which is divided among few pages, two chats in turns computed 1.7 times their new tokens instead of 1.04.
_PASSED = 0.01
_LAST = 2.0  # no later end is known: a conversation stands there
_SHARED = 2.0  # several requests have continued there


@dataclass(slots=True)
class End:
    """hashes: of the pages of its window, its own last
    num_tokens: before it
    """

    hashes: Sequence[bytes]
    num_tokens: int
    used: int
    num_uses: int = 0
    is_passed: bool = False

    @property
    def likelihood(self) -> float:
        """How likely it is asked for, relative to another end that was used at the same time."""
        if self.num_uses > 1:
            return _SHARED
        return _PASSED if self.is_passed else 1.0


class Ends:
    """Places by the hash of their last page."""

    def __init__(self) -> None:
        self._ends: dict[bytes, End] = {}
        self._num_ends: Counter[bytes] = Counter()  # of each page in a window

    def __contains__(self, hash_: bytes) -> bool:
        return hash_ in self._ends

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._ends)

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, hashes: Sequence[bytes], num_tokens: int, now: int) -> None:
        """The units of these pages are there, after which a conversation of so many tokens goes on."""
        if (end := self._ends.get(hashes[-1])) is not None:
            end.used, end.is_passed = now, False
            return
        self._ends[hashes[-1]] = End(hashes, num_tokens, now)
        self._num_ends.update(hashes)

    def use(self, hash_: bytes, now: int) -> None:
        """A request continues there; no-op if there is no such end."""
        if (end := self._ends.get(hash_)) is not None:
            end.used = now
            end.num_uses += 1

    def pass_by(self, hash_: bytes) -> None:
        """The request that continued there has left a later end: this one, and those in its window, are behind
        the conversation. No-op if there is no such end."""
        if (end := self._ends.get(hash_)) is not None:
            for each in end.hashes:
                if (earlier := self._ends.get(each)) is not None:
                    earlier.is_passed = True

    def hashes_of(self, hash_: bytes) -> Sequence[bytes]:
        """Of the pages in the window of an end."""
        return self._ends[hash_].hashes

    def has_unit(self, hash_: bytes) -> bool:
        """Whether the unit of this page belongs to an end."""
        return hash_ in self._num_ends

    def drop(self, hash_: bytes) -> list[bytes]:
        """Give up an end: hashes of the pages that no other end has."""
        end = self._ends.pop(hash_)
        self._num_ends.subtract(end.hashes)
        alone = [each for each in end.hashes if not self._num_ends[each]]
        for each in alone:
            del self._num_ends[each]
        return alone

    def with_any(self, is_meant: Callable[[bytes], bool]) -> list[bytes]:
        """Ends with a page in their window that is meant."""
        return [hash_ for hash_, end in self._ends.items() if any(map(is_meant, end.hashes))]

    def cheapest(
        self, now: int, num_freed: Callable[[bytes, End, bool], float]
    ) -> tuple[float, bytes] | None:
        """(cost, end) of the end to give up first; None if none frees anything.

        num_freed: what is freed with an end by its hash, and whether no later end is known in whose window it is;
        0 where it is to stay
        """
        return min(self._costs(now, num_freed), default=None, key=itemgetter(0))

    def by_cost(self, now: int, num_freed: Callable[[bytes, End, bool], float]) -> list[bytes]:
        """Ends in the order in which they are given up, as far as that can be said before."""
        costs = sorted(self._costs(now, num_freed), key=itemgetter(0))
        return [hash_ for _, hash_ in costs]

    def _costs(
        self, now: int, num_freed: Callable[[bytes, End, bool], float]
    ) -> Iterator[tuple[float, bytes]]:
        for hash_, end in self._ends.items():
            if count := num_freed(hash_, end, self._num_ends[hash_] == 1):
                age = 1 + now - end.used
                likelihood = end.likelihood * (_LAST if self._num_ends[hash_] == 1 else 1)
                yield self.num_saved(end) * likelihood / count / age, hash_

    def alone(self, end: End) -> list[bytes]:
        """Hashes of the pages in the window of an end that no other end has."""
        return [each for each in end.hashes if self._num_ends[each] == 1]

    def num_saved(self, end: End) -> int:
        """Tokens that would be computed again without it."""
        for hash_ in reversed(end.hashes[:-1]):
            if (earlier := self._ends.get(hash_)) is not None:
                return end.num_tokens - earlier.num_tokens
        return end.num_tokens

    def clear(self) -> None:
        self._ends.clear()
        self._num_ends.clear()

    def check(self) -> None:
        """Audit. Raises AssertionError."""
        counted = Counter(each for end in self._ends.values() for each in end.hashes)
        assert counted == self._num_ends, "the pages of ends are miscounted"
