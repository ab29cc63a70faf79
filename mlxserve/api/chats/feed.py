"""ChatFeed: the events of one chat, and those who follow them.

    publish ──▶ [ 41 ][ 42 ][ 43 ][ 44 ]        the newest `MAX_BYTES`, once for all followers
                        ▲           ▲
              a slow follower   a fast one

Nothing is buffered for a follower by itself: one that falls behind the oldest event is ended. The id
of an event names this feed and counts, so that a follower that lost its connection goes on after the
last event that it has (`Last-Event-ID`).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator

from mlxserve.api.errors import ApiError, encode_json
from mlxserve.api.server.sse import Write

MAX_BYTES = 1 << 20  # of events that are kept
MAX_FOLLOWERS = 16  # of one chat
_SILENCE = 0.5  # seconds between looks at whether the server stops


class TooSlow(Exception):
    """A follower has not read events that are no longer kept."""


class ChatFeed:
    """The events of one chat. Used in the event loop only."""

    def __init__(self) -> None:
        self._name = secrets.token_hex(4)
        self._events: deque[bytes] = deque()
        self._num_bytes = 0
        self._waiters: set[asyncio.Event] = set()
        self.next = 1  # number of the next event
        self.is_ended = False

    @property
    def num_followers(self) -> int:
        return len(self._waiters)

    def publish(self, name: str, data: object) -> None:
        """Send an event to all followers."""
        self.publish_encoded(name, encode_json(data))

    def publish_encoded(self, name: str, data: bytes) -> None:
        """Send an event whose JSON is encoded."""
        event = self._event(name, data, self.next)
        self.next += 1
        self._events.append(event)
        self._num_bytes += len(event)
        while self._num_bytes > MAX_BYTES:
            self._num_bytes -= len(self._events.popleft())
        self._wake()

    def state_event(self, data: bytes, place: int) -> bytes:
        """Encode the state of the chat for one follower, who goes on with the event `place`."""
        return self._event("state", data, place - 1)

    def _event(self, name: str, data: bytes, number: int) -> bytes:
        head = f"id: {self._name}-{number}\nevent: {name}\ndata: "
        return head.encode() + data + b"\n\n"

    def forget(self) -> None:
        """Drop the events: whoever comes back begins with the state of the chat."""
        self._events.clear()
        self._num_bytes = 0

    def end(self) -> None:
        """End all followers; what was published is still sent."""
        self.is_ended = True
        self._wake()

    def place(self, last_id: str) -> int | None:
        """Return the number after the event with this id; None if events after it are gone."""
        name, _, number = last_id.rpartition("-")
        if name != self._name or not (number.isascii() and number.isdigit() and len(number) < 16):
            return None
        after = int(number) + 1
        return after if self._first <= after <= self.next else None

    def enter(self) -> asyncio.Event:
        """Count a follower until `leave`. Raises ApiError 429."""
        if len(self._waiters) >= MAX_FOLLOWERS:
            raise ApiError(
                429,
                f"This chat has {MAX_FOLLOWERS} followers already. Close one of its pages.",
                code="too_many_followers",
                headers={"retry-after": "5"},
            )
        waiter = asyncio.Event()
        self._waiters.add(waiter)
        return waiter

    def leave(self, waiter: asyncio.Event) -> None:
        self._waiters.discard(waiter)

    async def follow(
        self, waiter: asyncio.Event, place: int, is_over: Callable[[], bool], write: Write
    ) -> None:
        """Write events from this number on, until the feed ends. Raises TooSlow.

        is_over: tells that no more will come, which is looked at in silence
        """
        while True:
            waiter.clear()
            for event in self._from(place):
                place += 1
                await write(event)
            if place < self.next:
                continue
            if self.is_ended or is_over():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiter.wait(), _SILENCE)

    @property
    def _first(self) -> int:
        return self.next - len(self._events)

    def _from(self, place: int) -> Iterator[bytes]:
        """Yield what is kept from this number on. Raises TooSlow."""
        while place < self.next:
            if place < self._first:
                raise TooSlow
            yield self._events[place - self._first]
            place += 1

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.set()
