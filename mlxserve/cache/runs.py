"""RunSet: free page ids as maximal runs of consecutive ids, so that neighbours can be allocated.

A sequence in consecutive pages is read as one strided view, without a copy. Knows ids only. Every
operation takes a few dictionary operations per run, however many ids there are.
"""

from __future__ import annotations


class RunSet:
    """A set of ids 0 .. n-1, stored by run.

    lengths  first id of a run -> its length        firsts  id after a run -> its first id
    by_size  runs by the bit length of their length, in dictionaries because they are ordered
    """

    def __init__(self, num_ids: int) -> None:
        self._lengths: dict[int, int] = {}
        self._firsts: dict[int, int] = {}
        self._by_size: list[dict[int, None]] = [{} for _ in range(num_ids.bit_length() + 1)]
        self.count = 0  # ids in the set
        if num_ids:
            self._insert(0, num_ids)

    def __len__(self) -> int:
        return self.count

    def add(self, page: int) -> None:
        """Add one id and join it to the runs on its left and right."""
        first, length = page, 1
        if page in self._firsts:
            first = self._firsts[page]
            length += self._remove(first)
        if page + 1 in self._lengths:
            length += self._remove(page + 1)
        self._insert(first, length)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Remove and return `count` ids: first those that follow `after`, then from the longest runs."""
        assert count <= self.count, f"{count} ids wanted, {self.count} left"
        taken: list[int] = []
        if count and after is not None and after + 1 in self._lengths:
            taken += self._cut(after + 1, after + 1, count)
        while len(taken) < count:
            taken += self._start_run(count - len(taken))
        return taken

    def extend(self, first: int, length: int) -> None:
        """Add `length` ids from `first` on, which must be above all others."""
        size = (first + length).bit_length() + 1
        self._by_size += [{} for _ in range(size - len(self._by_size))]
        if first in self._firsts:
            first = self._firsts[first]
            length += self._remove(first)
        self._insert(first, length)

    def cut_off(self, end: int) -> None:
        """Remove all ids from `end` on."""
        for first in [first for first, length in self._lengths.items() if first + length > end]:
            self._remove(first)
            if first < end:
                self._insert(first, end - first)

    def runs(self) -> list[tuple[int, int]]:
        """Return (first id, length) of every run, in order."""
        return sorted(self._lengths.items())

    def check(self) -> None:
        """Audit that runs are disjoint and maximal and that every index agrees."""
        runs = self.runs()
        assert sum(length for _, length in runs) == self.count, "count of free ids is off"
        end = -1
        for first, length in runs:
            assert length > 0, f"run at {first} is empty"
            assert first > end, f"run at {first} touches the one before it"
            assert first in self._by_size[length.bit_length()], f"run at {first} is not filed"
            end = first + length
            assert self._firsts.get(end) == first, f"run at {first} is not found by its end"
        assert len(self._firsts) == len(runs) == sum(map(len, self._by_size)), (
            "an index has a run too many"
        )

    def _start_run(self, count: int) -> list[int]:
        for size in reversed(self._by_size):
            if size:
                break
        first, _ = size.popitem()
        size[first] = None
        length = self._lengths[first]
        # From the middle of the run, so that the sequence in the page before it can grow as well.
        room = max(length - count, 0) if first > 0 else 0
        return self._cut(first, first + room // 2, count)

    def _cut(self, first: int, start: int, count: int) -> list[int]:
        """Remove and return up to `count` ids from `start` on from the run at `first`."""
        end = first + self._remove(first)
        stop = min(start + count, end)
        if first < start:
            self._insert(first, start - first)
        if stop < end:
            self._insert(stop, end - stop)
        return list(range(start, stop))

    def _insert(self, first: int, length: int) -> None:
        self._lengths[first] = length
        self._firsts[first + length] = first
        self._by_size[length.bit_length()][first] = None
        self.count += length

    def _remove(self, first: int) -> int:
        length = self._lengths.pop(first)
        del self._firsts[first + length]
        del self._by_size[length.bit_length()][first]
        self.count -= length
        return length
