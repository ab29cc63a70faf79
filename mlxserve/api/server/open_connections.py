"""Crowd: the open connections of a server, counted by address, and those that ask for nothing.

Anybody can open sockets and say nothing. When there is no more room, the one that has been idle
longest makes some: a crowd of the silent then costs those who ask nothing. Knows no socket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class Crowd(Generic[C]):
    """Of at most `most` connections, and `most_per_address` from one address."""

    def __init__(self, most: int, most_per_address: int) -> None:
        self._most = most
        self._most_per_address = most_per_address
        self._addresses: dict[C, str] = {}
        self._counts: Counter[str] = Counter()
        self._idle: dict[C, None] = {}  # in the order in which they fell silent

    def enter(self, connection: C, address: str) -> C | None:
        """Count one more, idle as yet; returns which has to leave for that, perhaps this one."""
        leaver = self._leaver(connection, address)
        self._addresses[connection] = address
        self._counts[address] += 1
        self._idle[connection] = None
        if leaver is not None:
            self.leave(leaver)
        return leaver

    def leave(self, connection: C) -> None:
        """No-op for one that has left."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        self._idle.pop(connection, None)
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    def set_idle(self, connection: C, is_idle: bool) -> None:
        """Whether it waits for nothing of ours; idle again, it is the last to make room."""
        if not is_idle:
            self._idle.pop(connection, None)
        elif connection in self._addresses:
            self._idle.setdefault(connection, None)

    def _leaver(self, connection: C, address: str) -> C | None:
        if self._counts[address] >= self._most_per_address:
            # The first, where one address has all; else a walk over at most `most`.
            return next((c for c in self._idle if self._addresses[c] == address), connection)
        if len(self._addresses) >= self._most:
            return next(iter(self._idle), connection)
        return None
