"""OwnedCache: what clients sent, kept for each of them, within one bound for all.

A cache that finds values by their content alone, whoever sent them, tells by its speed what others
have sent (CVE-2025-46570). So each owner, an API key, finds its own values only. Where there are
too many, the owner that keeps most gives up the one that it used least recently: nobody can push
out what others keep by sending much.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ValueT = TypeVar("ValueT")


class OwnedCache(Generic[KeyT, ValueT]):
    """Values by owner and key. Thread-safe."""

    def __init__(self, max_size: int, size_of: Callable[[ValueT], int] = lambda _: 1) -> None:
        """max_size: of all values together, as `size_of` measures each."""
        self._max_size = max_size
        self._size_of = size_of
        self._lock = threading.Lock()
        self._kept: dict[str, OrderedDict[KeyT, ValueT]] = {}  # the last used is the last
        self._sizes: Counter[str] = Counter()

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._kept.values()))

    @property
    def size(self) -> int:
        return self._sizes.total()

    def get(self, owner: str, key: KeyT) -> ValueT | None:
        """Return the owner's value, which counts as used; None if there is none."""
        with self._lock:
            values = self._kept.get(owner)
            if values is None or key not in values:
                return None
            values.move_to_end(key)
            return values[key]

    def put(self, owner: str, key: KeyT, value: ValueT) -> None:
        """Keep a value, and give up others until all fit; a value that fits nowhere goes as well."""
        with self._lock:
            self._drop(owner, key)
            self._kept.setdefault(owner, OrderedDict())[key] = value
            self._sizes[owner] += self._size_of(value)
            while self._sizes.total() > self._max_size:
                self._evict()

    def drop(self, owner: str, key: KeyT) -> None:
        with self._lock:
            self._drop(owner, key)

    def evict(self) -> None:
        """Give up one value, if there is any."""
        with self._lock:
            if self._kept:
                self._evict()

    def clear(self) -> None:
        with self._lock:
            self._kept.clear()
            self._sizes.clear()

    def _evict(self) -> None:
        owner = max(self._kept, key=self._sizes.__getitem__)
        self._drop(owner, next(iter(self._kept[owner])))

    def _drop(self, owner: str, key: KeyT) -> None:
        values = self._kept.get(owner)
        if values is None or key not in values:
            return
        self._sizes[owner] -= self._size_of(values.pop(key))
        if not values:
            del self._kept[owner], self._sizes[owner]
