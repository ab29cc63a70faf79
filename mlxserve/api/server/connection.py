"""One client's connection: uvicorn's h11 protocol with deadlines, a cap, and JSON errors.

uvicorn bounds the size of headers, but waits forever for headers, for a body, and for a client that
has stopped reading. Here each of those has a deadline, so that idle sockets cannot pile up.

    connected ──header──> request ──body──> complete ──> reply (a stalled reader: write)
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from mlxserve.api.access.same_user import CONNECTION
from mlxserve.api.config import ServerConfig
from mlxserve.api.errors import NO_SNIFF, ApiError, encode_json
from mlxserve.api.server.bounded_http import MAX_HEAD, BoundedHttp
from mlxserve.api.server.open_connections import OpenConnections
from mlxserve.api.server.retry_after import RetryAfter
from mlxserve.api.server.sse import skipped_by
from mlxserve.core.errors import InvalidConfig

logger = logging.getLogger(__name__)

_OWN_FILES = 48  # for all but connections: 9 when idle, then swap and helpers, and accepting
# A third of them for accepting: asyncio accepts as many connections again before those that make room are closed.
_FEW_AT_ONCE = _OWN_FILES // 6
_FEWEST_CONNECTIONS = 8
_FIRST_PROBE_SECONDS, _PROBE_SECONDS = 0.1, 10.0
_RAISE_IT = (
    "Raise the limit with `ulimit -n 4096` in the shell that starts it, or with LimitNOFILE in a "
    "systemd unit."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Deadlines in seconds for a client's headers, body and reading, and bounds on connections.

    connections, connections_per_address: maximum open connections, in total and by address
    backlog: maximum connections accepted at once, 10 kB each, before any is read
    """

    header: float = 10.0
    body: float = 30.0
    write: float = 20.0
    connections: int = 1_000
    connections_per_address: int = 500
    backlog: int = 512

    @classmethod
    def from_config(cls, config: ServerConfig) -> Limits:
        return cls(
            header=config.header_timeout,
            body=config.body_timeout,
            write=config.write_timeout,
            connections=config.max_connections,
            connections_per_address=config.max_connections_per_address,
        )

    def within(self, open_files: int) -> Limits:
        """Fit the limits to `open_files` open files. Raises InvalidConfig if there are too few."""
        room = open_files - _OWN_FILES
        if room < _FEWEST_CONNECTIONS:
            raise InvalidConfig(
                f"This process may have {open_files} open files, and a server needs at least "
                f"{_OWN_FILES + _FEWEST_CONNECTIONS}. {_RAISE_IT}"
            )
        if room >= self.connections:
            return self
        logger.warning(
            "This process may have %d open files, so it accepts %d connections instead of %d. %s",
            open_files,
            room,
            self.connections,
            _RAISE_IT,
        )
        return replace(self, connections=room, backlog=min(self.backlog, _FEW_AT_ONCE))


class _Waiting(Enum):
    HEADER = "header"
    BODY = "body"


class Connection(H11Protocol):
    """A connection of uvicorn, which instantiates a class made by `limited`."""

    limits: Limits
    open_connections: OpenConnections[Connection]
    retry_after: RetryAfter  # the rate at which replies end, so that connections can make room

    @classmethod
    def limited(cls, limits: Limits) -> type[Connection]:
        open_connections: OpenConnections[Connection] = OpenConnections(
            limits.connections, limits.connections_per_address
        )
        shared = {
            "limits": limits,
            "open_connections": open_connections,
            "retry_after": RetryAfter(),
        }
        return type(cls.__name__, (cls,), shared)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._http = self.conn = BoundedHttp(MAX_HEAD)
        self.app_state = {**self.app_state, CONNECTION: {}}
        self._waiting: _Waiting | None = None
        self._receive_deadline: asyncio.TimerHandle | None = None
        self._write_deadline: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None  # set once the client has sent its end

    # Called by asyncio.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for(_Waiting.HEADER)
        leaver = self.open_connections.enter(self, self.client[0] if self.client else "")
        if leaver is not None:
            leaver.make_room()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for(self._what_is_missing())
        self.open_connections.set_idle(self, self._is_idle)

    def eof_received(self) -> bool:  # type: ignore[override]  # None means False
        """Keep the connection for the reply to a complete request, as after `nc -N`.

        A client that has gone sends the same end. Writing to it tells the two apart.
        """
        if self._is_idle or self.conn.their_state is h11.SEND_BODY:
            return False
        self._probe(_FIRST_PROBE_SECONDS)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self.open_connections.leave(self)
        self._wait_for(None)
        self._end_probes()
        # First marks the client as gone; then writers may resume.
        super().connection_lost(exc)
        self.resume_writing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.call_later(self.limits.write, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None
        super().resume_writing()

    # Called by uvicorn.

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.retry_after.ended()
        self.open_connections.set_idle(self, self._is_idle)
        if self._probe_timer is not None and self._is_idle:
            self._end_probes()
            self.transport.close()  # the client can send no further request
        if not self.transport.is_closing():
            self._wait_for(self._what_is_missing())

    def send_400_response(self, msg: str) -> None:
        self._refuse(self._http.refusal or ApiError(400, msg, code="invalid_http"))

    # Ours.

    def make_room(self) -> None:
        """Close an idle connection to make room for a new one."""
        message, headers = "Too many connections are open.", self.retry_after.headers()
        self._refuse(ApiError(503, message, code="overloaded", headers=headers))

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _probe(self, seconds: float) -> None:
        """Write bytes that a waiting client skips, again after `seconds`, and then periodically.

        A machine whose program has gone answers the first write with a reset, at which the second
        one fails, and the connection is lost.
        """
        if self.transport.is_closing() or self.cycle is None:
            return
        if self.conn.our_state is h11.SEND_RESPONSE and self.cycle.scope["http_version"] == "1.1":
            going_on = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(going_on) or b"")
        elif self.conn.our_state is h11.SEND_BODY and (skipped := skipped_by(self.cycle.scope)):
            self.transport.write(self.conn.send(h11.Data(data=skipped)) or b"")
        self._probe_timer = self.loop.call_later(seconds, self._probe, _PROBE_SECONDS)

    def _end_probes(self) -> None:
        if self._probe_timer is not None:
            self._probe_timer.cancel()
            self._probe_timer = None

    def _what_is_missing(self) -> _Waiting | None:
        if self.transport.is_closing():
            return None
        if self.conn.their_state is h11.SEND_BODY:
            return _Waiting.BODY
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            return _Waiting.HEADER
        return None

    def _wait_for(self, what: _Waiting | None) -> None:
        """Set one deadline for all of it: bytes that trickle in do not extend it."""
        if what is self._waiting:
            return
        if self._receive_deadline is not None:
            self._receive_deadline.cancel()
            self._receive_deadline = None
        self._waiting = what
        if what is not None:
            seconds = getattr(self.limits, what.value)
            self._receive_deadline = self.loop.call_later(seconds, self._too_slow, what, seconds)

    def _too_slow(self, what: _Waiting, seconds: float) -> None:
        message = f"The request's {what.value} did not arrive within {seconds:g} seconds."
        self._refuse(ApiError(408, message, code="request_timeout"))

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with an error reply unless one has been started."""
        self._wait_for(None)
        if self.cycle is not None and not self.cycle.response_complete:
            # Drops the application's further writes.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._write_refusal(error)
            self.transport.close()
        else:
            self.transport.abort()

    def _write_refusal(self, error: ApiError) -> None:
        """Write an error reply. uvicorn's own `send_400_response` writes plain text only."""
        body = encode_json(error.body())
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            *(
                (name.encode(), value.encode())
                for name, value in {**NO_SNIFF, **error.headers}.items()
            ),
        ]
        response = h11.Response(
            status_code=error.status, headers=headers, reason=STATUS_PHRASES[error.status]
        )
        events = (response, h11.Data(data=body), h11.EndOfMessage())
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
