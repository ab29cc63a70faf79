"""Server-sent events: bytes in, events out (WHATWG HTML, section 9.2.6).

Buffers at most one unfinished event.
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_EVENT_SIZE = 16 * 1024 * 1024
_BOM = b"\xef\xbb\xbf"


class EventTooLarge(ValueError):
    """The stream sent more than `MAX_EVENT_SIZE` bytes without ending an event."""


@dataclass(frozen=True, slots=True)
class ServerEvent:
    """One dispatched event. `name` is "message" unless the stream named it.

    id: the id of the last event that had one; empty before
    """

    data: str
    name: str = "message"
    id: str = ""


class EventReader:
    """Splits a byte stream, in chunks of any size, into events."""

    def __init__(self) -> None:
        self._rest = b""  # the unfinished line
        self._is_first_line = True
        # The last line ended in "\r", which may be half of "\r\n".
        self._skip_line_feed = False
        self._name = self._id = ""
        self._data: list[str] = []
        self._data_size = 0

    def feed(self, data: bytes) -> list[ServerEvent]:
        """Return the events completed by these bytes. Raises EventTooLarge."""
        if self._skip_line_feed and data:
            data = data.removeprefix(b"\n")
            self._skip_line_feed = False
        if data.endswith(b"\r"):
            self._skip_line_feed = True
        *lines, last = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        events = []
        for line in lines:
            event = self._take_line(self._rest + line)
            self._rest = b""
            if event is not None:
                events.append(event)
        self._rest += last
        if self._data_size + len(self._rest) > MAX_EVENT_SIZE:
            raise EventTooLarge(f"an event of more than {MAX_EVENT_SIZE} bytes")
        return events

    def _take_line(self, line: bytes) -> ServerEvent | None:
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(_BOM)
        if not line:
            return self._dispatch()
        field, _, value = line.decode("utf-8", "replace").partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            self._data.append(value)
            self._data_size += len(line)
        elif field == "event":
            self._name = value
        elif field == "id" and "\0" not in value:
            self._id = value
        return None

    def _dispatch(self) -> ServerEvent | None:
        data, name = self._data, self._name
        self._data, self._name, self._data_size = [], "", 0
        return ServerEvent("\n".join(data), name or "message", self._id) if data else None
