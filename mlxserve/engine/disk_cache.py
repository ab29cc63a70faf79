"""DiskCache: what the scheduler asks the disk, and whether reading pays.

    read:     bytes of the pages / measured bytes per second
    compute:  tokens * measured seconds of a prompt's token

Both are measured while the engine runs. Until then reading is believed to pay: the first load is the
measurement, and one that takes too long is given up.
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve.disk.loads import DiskAnswer
from mlxserve.disk.tier import DiskTier
from mlxserve.engine.pace import Pace

_LEAST_SECONDS = 0.5  # to wait for a read that is not longer than computing the pages


def state_name(hash_: bytes) -> bytes:
    """The record of the recurrent state behind the page of this hash."""
    return hash_ + b"s"


class DiskCache:
    """The pages of one model on disk, with the times to read and to compute them."""

    def __init__(self, tier: DiskTier, pace: Pace, *, page_bytes: int, page_size: int) -> None:
        """`page_bytes`: of the keys and values of one page of `page_size` tokens."""
        self.tier = tier
        self._pace = pace
        self.page_bytes = page_bytes
        self._page_size = page_size
        self._overdue: set[int] = set()  # tickets of loads that were given up, and not answered

    def num_leading(self, hashes: Sequence[bytes], /) -> int:
        """How many of these pages are on disk, from the first one on."""
        return self.tier.num_leading(hashes)

    def has_state(self, hash_: bytes, /) -> bool:
        """Whether the recurrent state behind this page is on disk."""
        return self.tier.num_leading([state_name(hash_)]) == 1

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
        return num_tokens / self._page_size * self.page_bytes / rate < seconds

    def patience(self, num_pages: int) -> float:
        """Seconds to wait for a read of `num_pages` before computing them instead."""
        return max(_LEAST_SECONDS, self._pace.prompt_seconds(num_pages * self._page_size) or 0.0)

    def give_up(self, ticket: int) -> None:
        """Note that this load is no longer waited for."""
        self._overdue.add(ticket)

    def poll(self) -> list[DiskAnswer]:
        """`DiskTier.poll`."""
        answers = self.tier.poll()
        self._overdue.difference_update(answer.ticket for answer in answers)
        return answers
