"""Unwritten: records in memory that are not on disk, by last use."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping

from mlxserve.disk.record import HEADER_SIZE
from mlxserve.disk.tier import Tier

_MAX_NAMES = 1 << 20  # of a tier without a limit; each takes some 150 bytes


class Unwritten:
    """Names of records of one kind; at most as many as fit on disk."""

    def __init__(self, tier: Tier, num_bytes: int) -> None:
        """`num_bytes`: size of a record's payload."""
        self.tier = tier
        self._num_bytes = num_bytes
        self._most = min(_MAX_NAMES, tier.limit // (num_bytes + HEADER_SIZE))
        self._used: OrderedDict[bytes, float] = OrderedDict()  # the last used last

    def use(self, used: Mapping[bytes, float]) -> None:
        """Update last-used times of records in memory, coldest first."""
        for name, time in used.items():
            self._used[name] = time
            self._used.move_to_end(name)
        while len(self._used) > self._most:
            self._used.popitem(last=False)

    def forget(self, names: Iterable[bytes]) -> None:
        """Remove records that are no longer in memory."""
        for name in names:
            self._used.pop(name, None)

    def __contains__(self, name: bytes) -> bool:
        """True if it is not on disk, and would be kept there."""
        if (used := self._used.get(name)) is None:
            return False
        if self.tier.is_written(name):
            del self._used[name]
            return False
        return name not in self.tier and self.tier.keeps(self._num_bytes, used)

    def __iter__(self) -> Iterator[bytes]:
        """Records that would be kept on disk, most recently used first."""
        while self._used and self.tier.is_written(next(reversed(self._used))):
            self._used.popitem()
        for name, used in reversed(self._used.items()):
            if name in self.tier:
                continue
            if not self.tier.keeps(self._num_bytes, used):
                return
            yield name

    def time(self, name: bytes) -> float | None:
        """Time of last use; None if it is on disk or unknown."""
        return self._used.get(name)
