"""The open connections of a server: counted by address, with the idle ones in order.

Anyone can open sockets and send nothing. When the server is full, the connection that has been idle
longest is closed, so a flood of silent connections only displaces idle ones. Knows no socket.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from typing import Generic, TypeVar

C = TypeVar("C", bound=Hashable)


class OpenConnections(Generic[C]):
    """Bounds the open connections, in total and from one address."""

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self._max_connections = max_connections
        self._max_per_address = max_per_address
        self._addresses: dict[C, str] = {}
        self._counts: Counter[str] = Counter()
        self._idle: dict[C, None] = {}  # longest idle first

    def __len__(self) -> int:
        return len(self._addresses)

    def enter(self, connection: C, address: str) -> C | None:
        """Add a connection, idle at first. Returns the one to close for it, which may be itself."""
        leaver = self._leaver(connection, address)
        self._addresses[connection] = address
        self._counts[address] += 1
        self._idle[connection] = None
        if leaver is not None:
            self.leave(leaver)
        return leaver

    def leave(self, connection: C) -> None:
        """Remove a connection, if it has not left yet."""
        address = self._addresses.pop(connection, None)
        if address is None:
            return
        self._idle.pop(connection, None)
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    def set_idle(self, connection: C, is_idle: bool) -> None:
        """Mark a connection that waits for no reply. One that becomes idle again is closed last."""
        if not is_idle:
            self._idle.pop(connection, None)
        elif connection in self._addresses:
            self._idle.setdefault(connection, None)

    def _leaver(self, connection: C, address: str) -> C | None:
        if self._counts[address] >= self._max_per_address:
            # The first if one address has them all; otherwise a walk over all connections.
            return next((c for c in self._idle if self._addresses[c] == address), connection)
        if len(self._addresses) >= self._max_connections:
            return next(iter(self._idle), connection)
        return None
