"""StoreRecords: the records of a Redis server (Redis, Valkey, Dragonfly), which several mlxserve servers share.

    mlxserve/<identity>/<name>     header and payload of a record, as in a file of the disk cache
    mlxserve/<identity>/model      the model's name, for people
    mlxserve/written/<day>         bytes written on this day, by all servers; expires
    channel mlxserve/<identity>    size and name of each record when it is written

What the store evicts is its own decision (`maxmemory-policy allkeys-lru`). Which records there are is listed at the
start and told by the channel afterwards, so that the engine finds pages without asking the store.

Every operation is one round trip with a time-out. After one that fails nothing is asked of the store until it has
answered `StoreWatch` again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from mlxserve.core.errors import InvalidConfig
from mlxserve.core.store_url import shown_store
from mlxserve.disk.record import (
    HEADER_SIZE,
    FoundFile,
    Records,
    Unreachable,
    UnsoundRecord,
    Watcher,
    Wording,
)
from mlxserve.disk.store_watch import PING_SECONDS, StoreWatch

log = logging.getLogger("mlxserve.disk")

ROOT = "mlxserve"
THREAD = "mlxserve-store"  # the only one that calls `StoreRecords`
_MODEL = "model"
# Seconds of silence on a connection after which an operation has failed, beside the time of the largest record at
# 50 MB/s: the socket's time-out bounds the whole of what is sent.
SILENCE = 0.05
FIRST_PAUSE = 1.0
_SLOWEST = 50e6
_LISTED = 256  # keys that one SCAN looks at
_COUNT_SECONDS = 2 * 86_400  # after which a day's count expires

T = TypeVar("T")


def connect(url: str, seconds: float) -> redis.Redis:
    """Return a client, which is not connected yet. Raises InvalidConfig, without the address.

    seconds: time-out of connecting and of each reply
    """
    try:
        client = redis.Redis.from_url(
            url,
            socket_timeout=seconds,
            socket_connect_timeout=seconds,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
            client_name="mlxserve",
        )
        pool = client.connection_pool
        # Makes no connection, but refuses options that the address must not have.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.RedisError) as error:
        raise InvalidConfig(
            f"the page store {shown_store(url)} cannot be used: {type(error).__name__} in the address. Its options "
            "are those of redis-py.",
            option="page_store",
        ) from None
    return client


class StoreRecords(Records):
    """The records of one identity in a store.

    A record is read and checked as a file is. Only one thread may call the methods of `Records`.
    """

    def __init__(
        self,
        url: str,
        identity: bytes,
        model: str,
        payload_sizes: Collection[int],
        *,
        silence: float | None = None,
        first_pause: float | None = None,
    ) -> None:
        """Take the address of a store, to which nothing is sent yet.

        silence: seconds without a reply after which the store is given up; SILENCE by default
        first_pause: seconds after which it is asked again, FIRST_PAUSE by default; each time in a row is twice as long

        Raises InvalidConfig.
        """
        super().__init__(identity, payload_sizes)
        self._largest = HEADER_SIZE + max(payload_sizes)
        seconds = SILENCE if silence is None else silence
        self._client = connect(url, seconds + self._largest / _SLOWEST)
        self._where = shown_store(url)
        self.wording = Wording(
            "page store",
            THREAD,
            f"The page store {self._where}",
            "in the page store",
            "the page store",
            "page_store_daily_writes",
        )
        self._prefix = f"{ROOT}/{identity.hex()}"
        self._model = model
        self._written: tuple[str, int] = ("", 0)
        self._out = threading.Event()
        self._watch = StoreWatch(
            connect(url, PING_SECONDS),
            self._prefix,
            self._out,
            subject=self.wording.subject,
            first_pause=FIRST_PAUSE if first_pause is None else first_pause,
        )

    @property
    def is_out(self) -> bool:
        return self._out.is_set()

    def prepare(self) -> None:
        """Nothing is to be made: the store may be away, and come."""

    def watch(self, watcher: Watcher) -> None:
        self._watch.start(watcher)

    def close(self) -> None:
        self._watch.end()
        with suppress(OSError):
            self._call(lambda client: client.publish(self._prefix, b""))  # wakes it
        self._watch.join()
        self._client.close()

    def path(self, name: bytes) -> Path:
        return Path(self._prefix, name.hex())

    def write(self, name: bytes, payload: bytes, used: float | None = None) -> None:  # noqa: ARG002
        value = self.header(name, payload) + payload
        news = len(value).to_bytes(8, "big") + name

        def tell(client: redis.Redis) -> None:
            with client.pipeline(transaction=False) as pipeline:
                pipeline.publish(self._prefix, news)
                pipeline.set(f"{self._prefix}/{_MODEL}", self._model)
                pipeline.execute()

        # In turn: a store that is full must not tell of it.
        self._call(lambda client: client.set(str(self.path(name)), value))
        self._call(tell)

    def read(self, name: bytes) -> bytes:
        key = str(self.path(name))
        # No more than a record may have, whatever the value has.
        value = self._call(lambda client: client.getrange(key, 0, self._largest))
        if not isinstance(value, bytes):
            raise UnsoundRecord(f"{key} is not a value")
        if not value:
            raise FileNotFoundError(f"{key} is not in the page store")
        header, payload = value[:HEADER_SIZE], value[HEADER_SIZE:]
        if not self.allows(len(value) - HEADER_SIZE) or header != self.header(name, payload):
            raise UnsoundRecord(f"{key} is cut off, damaged or foreign")
        return payload

    def touch_all(self, used: Mapping[Path, float]) -> dict[Path, bool]:
        """Count all as used now, by the store's own clock; which of them are gone is not told."""

        def touch(client: redis.Redis) -> None:
            # One key at a time: those of a node of a cluster may be in several slots.
            with client.pipeline(transaction=False) as pipeline:
                for path in used:
                    pipeline.touch(str(path))
                pipeline.execute()

        if used:
            self._call(touch)
        return dict.fromkeys(used, True)

    def touch(self, path: Path, used: float) -> None:
        self.touch_all({path: used})

    def delete(self, path: Path) -> None:
        self._call(lambda client: client.unlink(str(path)))

    def batches(self) -> Iterator[list[FoundFile]]:
        cursor, pattern = 0, f"{self._prefix}/*"
        while True:
            cursor, keys = cast(
                "tuple[int, list[bytes]]",
                self._call(lambda client, at=cursor: client.scan(at, match=pattern, count=_LISTED)),  # type: ignore[misc]
            )
            yield self._found(keys)
            if not cursor:
                return

    def _found(self, keys: Sequence[bytes]) -> list[FoundFile]:
        """Return the records of these keys, with their sizes."""
        names = {key: name for key in keys if (name := self._name_of(key)) is not None}
        if not names:
            return []

        def sizes(client: redis.Redis) -> list[Any]:
            with client.pipeline(transaction=False) as pipeline:
                for key in names:
                    pipeline.strlen(key)
                return pipeline.execute(raise_on_error=False)

        now = time.time()
        return [
            FoundFile(self.path(name), size, now, name)
            for name, size in zip(names.values(), self._call(sizes), strict=True)
            if isinstance(size, int) and size
        ]

    def _name_of(self, key: bytes) -> bytes | None:
        try:
            return bytes.fromhex(key.decode().removeprefix(f"{self._prefix}/"))
        except ValueError:
            return None

    def written(self, day: str) -> int:
        return self._written[1] if self._written[0] == day else 0

    def add_written(self, day: str, num_bytes: int) -> int:
        key = f"{ROOT}/written/{day}"

        def add(client: redis.Redis) -> int:
            with client.pipeline(transaction=False) as pipeline:
                pipeline.incrby(key, num_bytes)
                pipeline.expire(key, _COUNT_SECONDS)
                total, _ = pipeline.execute()
            return int(total)

        self._written = day, self._call(add)
        return self._written[1]

    def _call(self, operation: Callable[[redis.Redis], T]) -> T:
        """Ask the store. Raises UnsoundRecord for a value of another type, OSError for what it refuses, Unreachable."""
        if self._out.is_set():
            raise Unreachable(f"{self._where} does not answer")
        try:
            return operation(self._client)
        except redis.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                raise UnsoundRecord(f"a value of {self._where} has another type") from error
            raise OSError(f"{self._where} refuses: {error}") from error
        except (redis.RedisError, OSError, ValueError) as error:
            self._watch.lose(error)
            # No reply may be taken for that to a later question.
            self._client.connection_pool.disconnect()
            raise Unreachable(f"{self._where} does not answer") from error
