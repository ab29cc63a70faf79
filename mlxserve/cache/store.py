"""PageStore: pages of preempted requests on disk, until the requests are resumed.

    swap folder/                 one per engine, 0700; its process holds the lock until it ends
        lock
        3.1.pages                one per preemption, 0600: records of one size, one per page

    record   magic | index of the page | length | page hash | model | checksum | keys and values

One named thread writes and reads, in the order of the calls. Callers wait for it only while more
than STAGED_BYTES are not yet written, and only for seconds if the disk stalls. A page is read back
exactly as it was written for this page of this model, or not at all: the first page that is lost,
cut off, damaged or foreign ends its run, and is computed again with those after it. Knows neither
arrays nor requests. The next engine that starts removes the folder of a process that has died.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import shutil
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from mlxserve.errors import InvalidConfig

log = logging.getLogger("mlxserve.swap")

STAGED_BYTES = 512 << 20  # maximum in memory, waiting to be written
STAGING_SECONDS = 5.0  # maximum wait for staged pages to be written
CLOSING_SECONDS = 5.0  # maximum wait for the thread to end
_MAGIC = b"mlxpage1"
HEADER = struct.Struct("<8sQQ16s16s16s")  # of a record
_DIGEST_SIZE = 16


@dataclass(frozen=True, slots=True)
class LoadedPages:
    """The leading pages of a run that were read intact."""

    key: str
    first: int
    payloads: tuple[bytes, ...]


class PageStore:
    """Owns a folder below `base` and a thread. Methods do not wait unless their docstring says so."""

    def __init__(self, base: Path, *, limit: int, model: str) -> None:
        """Write at most `limit` bytes. Raises InvalidConfig if the folder cannot be made."""
        self._limit = limit
        self._model = blake2b(model.encode(), digest_size=_DIGEST_SIZE).digest()
        try:
            base.mkdir(parents=True, exist_ok=True, mode=0o700)
            remove_leftovers(base)
            self.folder = Path(tempfile.mkdtemp(prefix="swap-", dir=base))  # 0700
            lock = _locked(self.folder)
        except OSError as error:
            raise InvalidConfig(
                f"the swap folder {base} cannot be used: {error}. Choose another swap_dir, or "
                "preemption_mode=recompute."
            ) from error
        assert lock is not None, "a new folder is already locked"
        self._lock = lock
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._loaded: deque[LoadedPages] = deque()
        self._change = threading.Condition()
        self._sizes: dict[str, int] = {}  # bytes of each file, including staged ones
        self._places: dict[
            str, tuple[int, int]
        ] = {}  # of each file: index of its first page, size of a record
        self._staged = 0
        self._is_full = False  # and the warning is logged
        self._is_stalled = False  # a wait timed out, and nothing has been written since
        self._is_alive = True
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="mlxserve-swap", daemon=True)
        self._thread.start()

    @property
    def num_bytes(self) -> int:
        """On disk or staged."""
        with self._change:
            return sum(self._sizes.values())

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs. A bug ends it; errors of the disk do not."""
        with self._change:
            return self._is_alive

    def save(self, key: str, first: int, hashes: Sequence[bytes], payloads: Sequence[bytes]) -> int:
        """Write a run of pages, or append to it; `first` is the index of the first page given.

        Waits while too much is staged, but after a timeout not again until the disk has written.
        How many of the pages are accepted; if not all are, the run must not be continued.
        """
        size = sum(map(len, payloads))
        with self._change:
            if self._is_stalled or not self._is_alive:
                return 0
            room = self._limit - sum(self._sizes.values())
            record = HEADER.size + len(payloads[0])
            count = min(len(payloads), room // record)
            is_ready = self._change.wait_for(
                lambda: self._staged == 0 or self._staged + size <= STAGED_BYTES, STAGING_SECONDS
            )
            if not is_ready:
                self._is_stalled = True
                self._warn_full("the disk is too slow")
                return 0
            if count < len(payloads):
                self._warn_full(f"all {self._limit} bytes of swap_space are in use")
            if count <= 0:
                return 0
            payloads = payloads[:count]
            self._sizes[key] = self._sizes.get(key, 0) + count * record
            self._places.setdefault(key, (first, record))
            self._staged += (staged := sum(map(len, payloads)))
        self._jobs.put(lambda: self._write(key, first, hashes, payloads, staged))
        return count

    def load(self, key: str, first: int, hashes: Sequence[bytes]) -> None:
        """Start to read the pages with these hashes, from index `first` on; `poll` returns them."""
        self._jobs.put(lambda: self.answer_load(key, first, hashes))

    def poll(self) -> list[LoadedPages]:
        """The runs read since the last call."""
        with self._change:
            loaded = list(self._loaded)
            self._loaded.clear()
        return loaded

    def wait(self, seconds: float) -> None:
        """Wait until `poll` has something to return, for at most `seconds`."""
        with self._change:
            self._change.wait_for(
                lambda: self._loaded or self._is_closed or not self._is_alive, seconds
            )

    def drop(self, key: str) -> None:
        """Delete a run of pages; no-op if there is none."""
        self._jobs.put(lambda: self._delete(key))

    def drop_all(self) -> None:
        """Delete every run of pages that was saved so far."""
        with self._change:
            keys = list(self._sizes)
        for key in keys:
            self.drop(key)

    def close(self) -> None:
        """End the thread, which removes the folder; waits up to CLOSING_SECONDS. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._jobs.put(None)
        self._thread.join(CLOSING_SECONDS)
        if self._thread.is_alive():
            log.warning(
                "The disk does not answer. %s is removed when it does, or at the next start.",
                self.folder,
            )

    # ---- on the thread

    def _run(self) -> None:
        try:
            while (job := self._jobs.get()) is not None:
                if not self._is_closed:
                    job()
        except Exception:
            log.exception(
                "Swapping has failed. Pages of preempted requests are computed again from now on "
                "(PreemptionMode.RECOMPUTE)"
            )
        finally:
            with self._change:
                self._is_alive = False
                self._sizes.clear()
                self._change.notify_all()
            shutil.rmtree(self.folder, ignore_errors=True)
            os.close(self._lock)

    def _write(
        self, key: str, first: int, hashes: Sequence[bytes], payloads: Sequence[bytes], staged: int
    ) -> None:
        try:
            with self._open(key) as file:
                for index, (hash_, payload) in enumerate(
                    zip(hashes, payloads, strict=False), first
                ):
                    file.write(self.page_header(index, hash_, payload))
                    file.write(payload)
        except OSError as error:
            self._delete(key)
            with self._change:
                self._warn_full(str(error))
        finally:
            with self._change:
                self._staged -= staged
                self._is_stalled = False
                self._change.notify_all()

    def answer_load(self, key: str, first: int, hashes: Sequence[bytes]) -> None:
        payloads: list[bytes] = []
        try:
            with self._change:
                start, record = self._places[key]
            with self._path(key).open("rb") as file:
                file.seek((first - start) * record)
                for index, hash_ in enumerate(hashes, first):
                    payloads.append(self._read(file, record, index, hash_))
        except KeyError:  # nothing was written, which `save` has reported
            log.debug("run %s was never written", key)
        except OSError as error:
            log.warning("Swapped pages cannot be read and are computed again: %s", error)
        with self._change:
            self._loaded.append(LoadedPages(key, first, tuple(payloads)))
            self._change.notify_all()

    def _read(self, file: BinaryIO, size: int, index: int, hash_: bytes) -> bytes:
        """The payload of the next record. Raises OSError if it is not this page's."""
        record = file.read(size)
        if len(record) < size:
            raise OSError(f"page {index} is cut off")
        payload = record[HEADER.size :]
        if record[: HEADER.size] != self.page_header(index, hash_, payload):
            raise OSError(f"page {index} is damaged or foreign")
        return payload

    def _delete(self, key: str) -> None:
        with self._change:
            self._sizes.pop(key, None)
            self._places.pop(key, None)
        self._path(key).unlink(missing_ok=True)

    def _open(self, key: str) -> BinaryIO:
        flags = os.O_CREAT | os.O_APPEND | os.O_WRONLY
        return open(os.open(self._path(key), flags, 0o600), "ab")

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.pages"

    def page_header(self, index: int, hash_: bytes, payload: bytes) -> bytes:
        identity = HEADER.pack(_MAGIC, index, len(payload), hash_, self._model, b"")
        checksum = blake2b(identity, digest_size=_DIGEST_SIZE)
        checksum.update(payload)
        return identity[:-_DIGEST_SIZE] + checksum.digest()

    def _warn_full(self, reason: str) -> None:
        """Log a warning, once per store."""
        if not self._is_full:
            self._is_full = True
            log.warning(
                "Pages of preempted requests cannot be swapped out and are computed again "
                "(PreemptionMode.RECOMPUTE): %s. Raise swap_space or free disk space.",
                reason,
            )


def remove_leftovers(base: Path) -> None:
    """Remove the folders below `base` whose processes have ended."""
    for folder in base.glob("swap-*"):
        lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            log.info("Swapped pages of a process that has ended were removed")


def _locked(folder: Path) -> int | None:
    """Lock the folder until this process ends; None if another process holds the lock."""
    try:
        lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    except FileNotFoundError:  # removed just now by another process
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
