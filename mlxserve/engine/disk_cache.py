"""DiskCache: what the scheduler asks the disk, and whether reading pays.

    read:     bytes of the pages / measured bytes per second
    compute:  tokens * measured seconds of a prompt's token

Both are measured while the engine runs. Until then reading is believed to pay: the first load is the
measurement, and one that takes too long is given up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from mlxserve.disk.loads import DiskAnswer
from mlxserve.disk.tier import DiskTier
from mlxserve.disk.unwritten import Unwritten
from mlxserve.engine.step_time_model import StepTimeModel

_MIN_SECONDS = 0.5  # to wait for a read that is not longer than computing the pages
_UNMEASURED_SECONDS = 5.0  # the same while it is unknown how long computing takes
_STEP_SECONDS = 1e-6  # by which a page counts as used before the one that it follows


def state_name(hash_: bytes) -> bytes:
    """The record of the recurrent state after the page of this hash."""
    return hash_ + b"s"


def window_name(hash_: bytes) -> bytes:
    """The record of the page with this hash of layers with a window."""
    return hash_ + b"w"


class DiskCache:
    """The pages of one model on disk, with the times to read and to compute them."""

    def __init__(
        self,
        tier: DiskTier,
        pace: StepTimeModel,
        *,
        page_bytes: int,
        page_size: int,
        state_bytes: int | None = None,
        window_bytes: int | None = None,
        num_window_pages: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """
        page_bytes: of the keys and values of one page of `page_size` tokens
        state_bytes: of a recurrent state; None for a model without them
        window_bytes: of a page of layers with a window; None where they have no pool of their own
        num_window_pages: of a window, which are read with the last page
        clock: seconds since 1970
        """
        self.tier = tier
        self._pace = pace
        self.page_bytes = page_bytes
        self._page_size = page_size
        self._clock = clock
        self._pages = Unwritten(tier, page_bytes)
        self._states = None if state_bytes is None else Unwritten(tier, state_bytes)
        self._windows = None if window_bytes is None else Unwritten(tier, window_bytes)
        self.window_bytes = window_bytes or 0
        self._end_bytes = num_window_pages * self.window_bytes
        self._overdue: set[int] = set()  # tickets of loads that were given up, and not answered

    def use(self, hashes: Sequence[bytes], /) -> None:
        """Note that a request has used these pages until now, each with those before it."""
        now, last = self._clock(), len(hashes) - 1
        pages = {hashes[depth]: now - depth * _STEP_SECONDS for depth in range(last, -1, -1)}
        self._pages.use(pages)
        self.tier.touch(pages)
        if self._states is not None:  # after all pages, which they need; the deepest one first
            states = {
                state_name(hash_): now - (2 * last - depth) * _STEP_SECONDS
                for depth, hash_ in enumerate(hashes)
            }
            self._states.use(states)
            self.tier.touch(states)

    def use_windows(self, hashes: Sequence[bytes], /) -> None:
        """Note that these pages of windows were used until now, the last one first."""
        assert self._windows is not None, "there are no windows"
        now = self._clock()
        windows = {
            window_name(hash_): now - number * _STEP_SECONDS for number, hash_ in enumerate(hashes)
        }
        self._windows.use(dict(reversed(windows.items())))
        self.tier.touch(windows)

    def unwritten(self) -> Iterator[bytes]:
        """Pages that are not on disk and would be kept there, the last used first."""
        return iter(self._pages)

    def unwritten_states(self) -> Iterator[bytes]:
        """The same of recurrent states, by the page before each."""
        return (name[:-1] for name in self._states or ())

    def unwritten_windows(self) -> Iterator[bytes]:
        """The same of pages of layers with a window."""
        return (name[:-1] for name in self._windows or ())

    def is_unwritten(self, hash_: bytes, /) -> bool:
        """Whether a page is not on disk and would be kept there."""
        return hash_ in self._pages

    def forget(self, hashes: Iterable[bytes], /) -> None:
        """These pages are no longer in memory."""
        self._pages.forget(hashes)

    def forget_states(self, hashes: Iterable[bytes], /) -> None:
        """The recurrent states after these pages are not in memory."""
        assert self._states is not None, "there are no states"
        self._states.forget(map(state_name, hashes))

    def forget_windows(self, hashes: Iterable[bytes], /) -> None:
        """These pages of layers with a window are not in memory."""
        assert self._windows is not None, "there are no windows"
        self._windows.forget(map(window_name, hashes))

    def delete(self, hashes: Iterable[bytes]) -> int:
        """Delete these pages, with the states and windows there; how many of the pages were on disk."""
        pages = list(hashes)
        self.forget(pages)
        num_deleted = self.tier.delete(pages)
        for kind, name in ((self._states, state_name), (self._windows, window_name)):
            if kind is not None:
                names = list(map(name, pages))
                kind.forget(names)
                self.tier.delete(names)
        return num_deleted

    def save(self, records: Sequence[tuple[bytes, bytes]]) -> int:
        """`DiskTier.save` of pages, states or windows, with the time when each was used last."""
        now = self._clock()
        kinds = [kind for kind in (self._pages, self._states, self._windows) if kind is not None]
        times = [
            next((time for kind in kinds if (time := kind.time(name)) is not None), now)
            for name, _ in records
        ]
        return self.tier.save(records, times)

    def num_leading(self, hashes: Sequence[bytes], /) -> int:
        """How many of these pages are on disk, from the first one on."""
        return self.tier.num_leading(hashes)

    def has_state(self, hash_: bytes, /) -> bool:
        """Whether the recurrent state after this page is on disk."""
        return self.tier.num_leading([state_name(hash_)]) == 1

    def has_window(self, hash_: bytes, /) -> bool:
        """Whether the page with this hash of layers with a window is on disk."""
        return window_name(hash_) in self.tier

    def pays(self, num_tokens: int, /) -> bool:
        """Whether reading the pages of `num_tokens` is probably faster than computing them.

        Not while the disk owes an answer that was given up.
        """
        if self._overdue:
            return False
        rate = self.tier.use().read_rate
        seconds = self._pace.prompt_seconds(num_tokens)
        if not rate or seconds is None:
            return True
        num_bytes = num_tokens / self._page_size * self.page_bytes + self._end_bytes
        return num_bytes / rate < seconds

    def patience(self, num_pages: int) -> float:
        """Seconds to wait for a read of `num_pages` before computing them instead."""
        seconds = self._pace.prompt_seconds(num_pages * self._page_size)
        return _UNMEASURED_SECONDS if seconds is None else max(_MIN_SECONDS, seconds)

    def give_up(self, ticket: int) -> None:
        """Note that this load is no longer waited for."""
        self._overdue.add(ticket)

    def poll(self) -> list[DiskAnswer]:
        """`DiskTier.poll`."""
        answers = self.tier.poll()
        self._overdue.difference_update(answer.ticket for answer in answers)
        return answers
