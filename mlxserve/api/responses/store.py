"""Stored responses, which can be read again and continued.

They are kept in memory, bounded in number, bytes and age. Each belongs to the API key that made it
and does not exist for any other. A response holds its own items and the id of the one before it, so
a long conversation is stored once. Continuing a response counts as a use of all before it: the end
of an unused conversation is evicted before its beginning.
"""

from __future__ import annotations

import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MAX_RESPONSES = 1_000
MAX_BYTES = 64 * 2**20
MAX_AGE = 24 * 3_600.0  # seconds after it was last used


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and the items of its conversation that it added.

    owner: the id of its API key
    response: the reply as it was sent
    items: its own input and output, without those of earlier responses
    size: size of response and items, in bytes
    previous: the id of the response that it continues
    """

    owner: str
    response: dict[str, Any]
    items: Sequence[Any]
    size: int
    previous: str | None = None


class MissingResponse(KeyError):
    """A response of the conversation is not stored."""

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id)
        self.response_id = response_id


class ResponseStore:
    """The responses of one app. Thread-safe."""

    def __init__(
        self,
        *,
        max_responses: int = MAX_RESPONSES,
        max_bytes: int = MAX_BYTES,
        max_age: float = MAX_AGE,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age = max_age
        self._clock = clock
        self._lock = threading.RLock()
        self._stored: OrderedDict[str, tuple[float, StoredResponse]] = OrderedDict()  # oldest first
        self._bytes: Counter[str] = Counter()  # by owner

    def __len__(self) -> int:
        return len(self._stored)

    @property
    def num_bytes(self) -> int:
        return self._bytes.total()

    def put(self, stored: StoredResponse) -> None:
        """Add a response, evicting the least recently used ones of the owner with the most bytes."""
        with self._lock:
            response_id = stored.response["id"]
            assert response_id not in self._stored, "a response id was used twice"
            self._stored[response_id] = (self._clock(), stored)
            self._bytes[stored.owner] += stored.size
            for each in [*self._chain(response_id, stored.owner)]:
                self._touch(each)
            self._expire()
            while len(self._stored) > self._max_responses or self.num_bytes > self._max_bytes:
                self._evict()

    def get(self, response_id: str, owner: str) -> StoredResponse | None:
        with self._lock:
            self._expire()
            entry = self._stored.get(response_id)
            return entry[1] if entry is not None and entry[1].owner == owner else None

    def delete(self, response_id: str, owner: str) -> bool:
        with self._lock:
            if self.get(response_id, owner) is None:
                return False
            self._remove(response_id)
            return True

    def conversation(self, response_id: str, owner: str) -> list[Any]:
        """Return the items of a response after those of all before it. Raises MissingResponse."""
        with self._lock:
            self._expire()
            chain = [*self._chain(response_id, owner)]
            missing = self._stored[chain[-1]][1].previous if chain else response_id
            if missing is not None:
                raise MissingResponse(missing)
            for each in chain:
                self._touch(each)
            return [item for each in reversed(chain) for item in self._stored[each][1].items]

    def items(self, item_ids: Collection[str], owner: str) -> dict[str, Any]:
        """Return the owner's stored items with these ids."""
        with self._lock:
            self._expire()
            wanted = frozenset(item_ids)
            return {
                item.id: item
                for _, stored in (self._stored.values() if wanted else ())
                if stored.owner == owner
                for item in stored.items
                if item.id in wanted
            }

    def _chain(self, response_id: str | None, owner: str) -> Iterator[str]:
        """Yield ids from a response back to the first one that is stored."""
        while response_id is not None and (stored := self.get(response_id, owner)) is not None:
            yield response_id
            response_id = stored.previous

    def _touch(self, response_id: str) -> None:
        self._stored[response_id] = (self._clock(), self._stored.pop(response_id)[1])

    def _expire(self) -> None:
        oldest = self._clock() - self._max_age
        while self._stored and next(iter(self._stored.values()))[0] < oldest:
            self._remove(next(iter(self._stored)))

    def _evict(self) -> None:
        owner = self._bytes.most_common(1)[0][0]
        self._remove(next(key for key, (_, each) in self._stored.items() if each.owner == owner))

    def _remove(self, response_id: str) -> None:
        stored = self._stored.pop(response_id)[1]
        self._bytes[stored.owner] -= stored.size
        if self._bytes[stored.owner] <= 0:
            del self._bytes[stored.owner]
