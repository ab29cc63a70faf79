"""ChatFeed: the events of one chat, and those who follow them.

    publish ──▶ [ 41 ][ 42 ][ 43 ][ 44 ]        the newest `MAX_BYTES`, once for all followers
                        ▲           ▲
              a slow follower   a fast one

Nothing is buffered for a follower by itself: one that falls behind the oldest event is ended. The id
of an event names this feed and counts, so that a follower that lost its connection goes on after the
last event that it has (`Last-Event-ID`). The text of an answer goes out in two forms, and a follower
gets the events of its own.

A slow model has one event for each token. So an event that only grows the text of the event before it
is `more`, with nothing but the new text.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from mlxserve.api.errors import ApiError, encode_json
from mlxserve.api.server.sse import Write

MAX_BYTES = 1 << 20  # of events that are kept
MAX_FOLLOWERS = 16  # of one chat
_SILENCE = 0.5  # seconds between looks at whether the server stops


class TooSlow(Exception):
    """A follower has not read events that are no longer kept."""


class TextForm(StrEnum):
    """The form in which a follower gets the text of an answer."""

    BLOCKS = "blocks"  # parsed, for the page
    TEXT = "text"  # as the model wrote it, for the terminal


@dataclass(frozen=True, slots=True)
class _Event:
    """An encoded event; `form` is None for one that all followers get."""

    content: bytes
    form: TextForm | None


@dataclass(frozen=True, slots=True)
class Growth:
    """An event that adds a text, and the place that the text is added to, which names the event."""

    name: str
    data: bytes  # JSON
    place: tuple[object, ...]
    text: str


class ChatFeed:
    """The events of one chat. Used in the event loop only."""

    def __init__(self) -> None:
        self._name = secrets.token_urlsafe(3)
        self._events: deque[_Event] = deque()
        self._num_bytes = 0
        self._waiters: dict[asyncio.Event, TextForm] = {}
        # Number of the event from which on the events of a form are complete.
        self._complete_from = dict.fromkeys(TextForm, 0)
        # Where the last event of a form has added a text; None for any other event.
        self._grown: dict[TextForm, tuple[object, ...] | None] = dict.fromkeys(TextForm)
        self.next = 1  # number of the next event
        self.is_ended = False

    @property
    def num_followers(self) -> int:
        return len(self._waiters)

    def has_followers(self, form: TextForm) -> bool:
        """True if a follower gets the text in this form."""
        return form in self._waiters.values()

    def publish(self, name: str, data: object, form: TextForm | None = None) -> None:
        """Send an event to all followers, or to those of one form."""
        self.publish_encoded(name, encode_json(data), form)

    def publish_growth(self, growth: Growth, form: TextForm) -> None:
        """Send a text that is added to the followers of one form."""
        if growth.place == self._grown[form]:
            self.publish_encoded("more", encode_json(growth.text), form)
        else:
            self.publish_encoded(growth.name, growth.data, form)
        self._grown[form] = growth.place

    def publish_encoded(self, name: str, data: bytes, form: TextForm | None = None) -> None:
        """Send an event whose JSON is encoded."""
        for each in (form,) if form is not None else TextForm:
            self._grown[each] = None
        event = _Event(self._event(name, data, self.next), form)
        self.next += 1
        self._events.append(event)
        self._num_bytes += len(event.content)
        while self._num_bytes > MAX_BYTES:
            self._num_bytes -= len(self._events.popleft().content)
        self._wake()

    def begin_state(self, form: TextForm) -> int:
        """Return the number of the event with which a follower goes on after the state of now.

        It has seen no event before, so that event is no `more`.
        """
        self._grown[form] = None
        return self.next

    def state_event(self, data: bytes, place: int) -> bytes:
        """Encode the state of the chat for one follower, who goes on with the event `place`."""
        return self._event("state", data, place - 1)

    def _event(self, name: str, data: bytes, number: int) -> bytes:
        head = f"id:{self._name}-{number}\nevent:{name}\ndata:"
        return head.encode() + data + b"\n\n"

    def forget(self) -> None:
        """Drop the events: whoever comes back begins with the state of the chat."""
        self._events.clear()
        self._num_bytes = 0

    def skip(self, form: TextForm) -> None:
        """Note that this form lacks text: whoever comes back for it begins with the state."""
        self._complete_from[form] = self.next + 1

    def end(self) -> None:
        """End all followers; what was published is still sent."""
        self.is_ended = True
        self._wake()

    def place(self, last_id: str, form: TextForm) -> int | None:
        """Return the number after the event with this id; None if events after it are gone."""
        name, _, number = last_id.rpartition("-")
        if name != self._name or not (number.isascii() and number.isdigit() and len(number) < 16):
            return None
        after = int(number) + 1
        first = max(self._first, self._complete_from[form])
        return after if first <= after <= self.next else None

    def enter(self, form: TextForm) -> asyncio.Event:
        """Count a follower until `leave`. Raises ApiError 429."""
        if len(self._waiters) >= MAX_FOLLOWERS:
            raise ApiError(
                429,
                f"This chat has {MAX_FOLLOWERS} followers already. Close one of its pages.",
                code="too_many_followers",
                headers={"retry-after": "5"},
            )
        waiter = asyncio.Event()
        self._waiters[waiter] = form
        return waiter

    def leave(self, waiter: asyncio.Event) -> None:
        self._waiters.pop(waiter, None)

    async def follow(
        self, waiter: asyncio.Event, place: int, is_over: Callable[[], bool], write: Write
    ) -> None:
        """Write events from this number on, until the feed ends. Raises TooSlow.

        is_over: tells that no more will come, which is looked at in silence
        """
        form = self._waiters[waiter]
        while True:
            waiter.clear()
            for event in self._from(place):
                place += 1
                if event.form is None or event.form is form:
                    await write(event.content)
            if place < self.next:
                continue
            if self.is_ended or is_over():
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(waiter.wait(), _SILENCE)

    @property
    def _first(self) -> int:
        return self.next - len(self._events)

    def _from(self, place: int) -> Iterator[_Event]:
        """Yield what is kept from this number on. Raises TooSlow."""
        while place < self.next:
            if place < self._first:
                raise TooSlow
            yield self._events[place - self._first]
            place += 1

    def _wake(self) -> None:
        for waiter in self._waiters:
            waiter.set()
