"""StoreWatch: hears of records that other servers write, and notices that a store is gone and comes back.

    connect ──▶ subscribe ──▶ list all again ──▶ news, and a PING in each silent second
       ▲                                              │
       └── pause: 1 s, 2 s ... 60 s ◀── out ◀─────────┴── an operation of the tier that failed

It has a thread and a connection of its own. While the store is out the tier asks nothing of it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import redis

from mlxserve.disk.record import Watcher

log = logging.getLogger("mlxserve.disk")

# For which a reply is awaited. Longer than an operation of the tier: nothing waits for it, and a store that is busy
# for a moment is not gone.
PING_SECONDS = 1.0
_SILENT_SECONDS = 1.0  # after which a reply to a PING is awaited
LONGEST_PAUSE = 60.0
_STEADY_SECONDS = 60.0  # after which the next pause is the first one again
_CLOSING_SECONDS = 0.5
_LISTED_SECONDS = (
    600.0  # after which all records are listed again: the store tells of none that it evicts
)
_MAX_NEWS = 8 + 32  # bytes: size and name of a record


class StoreWatch:
    """Watches the records of one identity. `lose` is for any thread."""

    def __init__(
        self,
        client: redis.Redis,
        channel: str,
        out: threading.Event,
        *,
        subject: str,
        first_pause: float,
    ) -> None:
        """Take a client of its own.

        channel: where records are announced
        out: set while the store does not answer
        subject: the store's name in warnings
        first_pause: seconds, as of `StoreRecords`
        """
        self._client, self._channel, self._out = client, channel, out
        self._first_pause = first_pause
        self._closing = threading.Event()
        self._watcher: Watcher
        self._subject = subject
        self._thread: threading.Thread | None = None

    def start(self, watcher: Watcher) -> None:
        """Start the thread, which tells `watcher`."""
        self._watcher = watcher
        self._thread = threading.Thread(target=self._run, name="mlxserve-store-news", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the thread end, at the next message or within its time-outs."""
        self._closing.set()

    def join(self) -> None:
        """Wait for the thread for a moment."""
        if self._thread is not None:
            self._thread.join(_CLOSING_SECONDS)

    def lose(self, error: BaseException) -> None:
        """Take the store for gone, because of this error."""
        if not self._out.is_set():
            self._out.set()
            # By its kind: a text of the library may quote the address.
            log.warning(
                "%s does not answer (%s). Until it does, its pages are computed, and none is kept there",
                self._subject,
                type(error).__name__,
            )

    # ---- the thread

    def _run(self) -> None:
        pause = self._first_pause
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                self._listen()
            except (redis.RedisError, OSError, ValueError) as error:
                self.lose(error)
            except Exception as error:
                log.exception("A fault while news of %s are heard", self._subject)
                self.lose(error)
            self._client.connection_pool.disconnect()
            if time.monotonic() - began > _STEADY_SECONDS:
                pause = self._first_pause
            self._closing.wait(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        self._client.close()

    def _listen(self) -> None:
        """Pass on the news until the store does not answer. Raises what the client raises."""
        client: Any = self._client  # `pubsub` has no annotations
        with client.pubsub() as pubsub:
            pubsub.subscribe(self._channel)
            if pubsub.get_message(timeout=PING_SECONDS) is None:
                raise TimeoutError
            if self._out.is_set():
                log.info("%s answers again", self._subject)
            self._out.clear()
            listed_at = time.monotonic()
            self._watcher.list_again()
            while not self._closing.is_set() and not self._out.is_set():
                self._hear(pubsub)
                if time.monotonic() - listed_at > _LISTED_SECONDS:
                    listed_at = time.monotonic()
                    self._watcher.list_again()

    def _hear(self, pubsub: Any) -> None:
        """Take one message; after a second without any, ask for one."""
        message = pubsub.get_message(timeout=_SILENT_SECONDS)
        if message is None:
            pubsub.ping()
            message = pubsub.get_message(timeout=PING_SECONDS)
            if message is None:
                raise TimeoutError
        data = message.get("data")
        if message["type"] == "message" and isinstance(data, bytes) and 8 < len(data) <= _MAX_NEWS:
            self._watcher.found(data[8:], int.from_bytes(data[:8], "big"))
