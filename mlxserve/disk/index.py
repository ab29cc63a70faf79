"""DiskIndex: the records known to be on disk, in eviction order."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from pathlib import Path

from mlxserve.disk.record import FoundFile


class DiskIndex:
    """Records by file, including other models'. Sizes in bytes."""

    def __init__(self, files: Iterable[FoundFile] = ()) -> None:
        self.files: dict[Path, FoundFile] = {}
        # Own records, and their bytes.
        self.num_own = self.num_bytes = 0
        self.total = 0
        self._by_use: list[tuple[float, Path]] = []  # a heap, with entries that are out of date
        self._changes: dict[bytes, bool] = {}  # own records, and whether each is there now
        for file in files:
            self.add(file)

    def add(self, file: FoundFile) -> None:
        """Add a record that was found, written or used."""
        self.remove(file.path)
        self.files[file.path] = file
        heapq.heappush(self._by_use, (file.used, file.path))
        if len(self._by_use) > 2 * len(self.files) + 64:
            self._by_use = [(each.used, each.path) for each in self.files.values()]
            heapq.heapify(self._by_use)
        self._count(file, 1)

    def remove(self, path: Path) -> None:
        """Remove a record, if known."""
        if (file := self.files.pop(path, None)) is not None:
            self._count(file, -1)

    def coldest(self) -> FoundFile | None:
        """The least recently used record; None if there is none."""
        while self._by_use:
            used, path = self._by_use[0]
            file = self.files.get(path)
            if file is not None and file.used == used:
                return file
            heapq.heappop(self._by_use)
        return None

    def pop_changes(self) -> dict[bytes, bool]:
        """Return the names added or removed since the last call, with True for added."""
        changes, self._changes = self._changes, {}
        return changes

    def _count(self, file: FoundFile, sign: int) -> None:
        self.total += sign * file.size
        if file.name is not None:
            self.num_own += sign
            self.num_bytes += sign * file.size
            self._changes[file.name] = sign > 0
