"""DocumentReader: reads untrusted documents in processes that can be killed, as images are.

    document = await document_reader().read_sent(sent, partial(run_fairly, request))

The text of the newest documents is kept by their files' content, because a conversation sends its
documents with each turn: those of each API key for itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from hashlib import blake2b
from typing import Any, TypeVar

from mlxserve.core.errors import InvalidRequest
from mlxserve.helpers.errors import HelperKilled, JobFailed, KillReason
from mlxserve.helpers.fair_executor import MEDIUM_SECONDS, Lane, lane_of
from mlxserve.helpers.helper import BEHIND_THE_ENGINE, Helper
from mlxserve.helpers.lane_helpers import LaneHelpers
from mlxserve.helpers.work import RunFairly, RunsIn, Work
from mlxserve.images.data_urls import file_of_data_url
from mlxserve.system.owned_cache import OwnedCache
from mlxserve.text.documents.document import Document
from mlxserve.text.documents.plain_text import checked_text, decode_text
from mlxserve.text.documents.read_worker import NoText
from mlxserve.text.documents.scan import Scan
from mlxserve.text.documents.sent import TEXT_URL, SentDocument

T = TypeVar("T")

MEMORY = 1 << 30  # bytes, for one document
# The longest a job of a lane may take: a page of a PDF takes about 30 ms.
TRIES = {Lane.SHORT: 2.0, Lane.LONG: 120.0}
_SECONDS = {Lane.SHORT: 0.02, Lane.LONG: 1.01 * MEDIUM_SECONDS}
_MAX_KEPT = 64 << 20  # characters
_SCAN = "images of the pages of "  # before the name of a file whose pages are kept
_BYTES_PER_SECOND = 1_000_000  # of files whose text has to be found
_DECODED_PER_SECOND = 100_000_000  # bytes of text
_HASHED_PER_SECOND = 500_000_000  # bytes
_BASE64_PER_SECOND = 50_000_000  # characters


class ScannedDocument(InvalidRequest):
    """The document has no text: its pages are images."""


class DocumentReader:
    """Reads documents in one helper process per lane of the executor, started on first use."""

    def __init__(self, target: str = "mlxserve.text.documents.read_worker:ReadWorker") -> None:
        """Read with this worker in the helper processes."""
        self._helpers = LaneHelpers(partial(_new_helper, target))
        # By hash of name and file.
        self._kept = OwnedCache[bytes, str](_MAX_KEPT, len)

    async def read_sent(
        self, sent: SentDocument, run_fairly: RunFairly, owner: str = ""
    ) -> Document:
        """Read a document of a message. Arguments and errors are those of `read`."""
        if not sent.url:
            return Document(sent.name, sent.text)
        seconds = len(sent.url) / _BASE64_PER_SECOND
        decoding: Work[bytes] = Work(seconds, partial(file_of_data_url, sent.url))
        data = await run_fairly(decoding)
        if sent.url.startswith(TEXT_URL):
            reading: Work[str] = Work(len(data) / _DECODED_PER_SECOND, partial(_decoded, data))
            return Document(sent.name, await run_fairly(reading))
        return await self.read(sent.name, data, run_fairly, owner)

    async def read(
        self, name: str, data: bytes, run_fairly: RunFairly, owner: str = ""
    ) -> Document:
        """Read a document.

        owner: id of the API key that sent it

        Raises InvalidRequest, whose message is the end of a sentence about the document,
        HelperUnavailable, EngineStopped, and what `run_fairly` raises.
        """
        hashing: Work[bytes] = Work(len(data) / _HASHED_PER_SECOND, partial(_key, name, data))
        key = await run_fairly(hashing)
        text = self._kept.get(owner, key)
        if text is None:
            text = await self._read(name, data, run_fairly)
            self._kept.put(owner, key, text)
        return Document(name, text)

    async def read_scan(self, sent: SentDocument, run_fairly: RunFairly, owner: str = "") -> Scan:
        """Read the first pages of a document without text as images. Arguments and errors: `read`."""
        decoding: Work[bytes] = Work(
            len(sent.url) / _BASE64_PER_SECOND, partial(file_of_data_url, sent.url)
        )
        data = await run_fairly(decoding)
        hashing: Work[bytes] = Work(
            len(data) / _HASHED_PER_SECOND, partial(_key, _SCAN + sent.name, data)
        )
        key = await run_fairly(hashing)
        text = self._kept.get(owner, key)
        if text is None:
            text = (
                await self._in_lanes(len(data), partial(self._try_scan, data), run_fairly)
            ).as_text()
            self._kept.put(owner, key, text)
        return Scan.from_text(sent.name, text)

    def read_now(self, name: str, data: bytes) -> Document:
        """Read a document of this user's own, and wait. Raises as `read`."""
        text = self._try(name, data, Lane.LONG)
        assert text is not None
        return Document(name, text)

    async def _read(self, name: str, data: bytes, run_fairly: RunFairly) -> str:
        return await self._in_lanes(len(data), partial(self._try, name, data), run_fairly)

    async def _in_lanes(
        self, nbytes: int, attempt: Callable[[Lane], T | None], run_fairly: RunFairly
    ) -> T:
        """Return what the first lane in which it succeeds gives."""
        expected = nbytes / _BYTES_PER_SECOND
        for lane in TRIES:
            if lane < lane_of(expected):
                continue
            trying: Work[T | None] = Work(
                max(expected, _SECONDS[lane]), partial(attempt, lane), RunsIn.PROCESS
            )
            if (result := await run_fairly(trying)) is not None:
                return result
        raise AssertionError("the last try decides")

    def close(self) -> None:
        self._kept.clear()
        self._helpers.close()

    def _try(self, name: str, data: bytes, lane: Lane) -> str | None:
        """Try a lane; None if a lane of longer jobs may succeed."""
        text: str | None = self._job(lane, "read", name, data)
        return text

    def _try_scan(self, data: bytes, lane: Lane) -> Scan | None:
        found = self._job(lane, "page_images", data)
        return None if found is None else Scan.from_files("", found[0], found[1:])

    def _job(self, lane: Lane, method: str, *arguments: object) -> Any:
        try:
            return self._helpers.of(lane).call_twice(method, *arguments, seconds=TRIES[lane])
        except JobFailed as error:
            kind = ScannedDocument if error.type_name == NoText.__name__ else InvalidRequest
            raise kind(error.message) from error
        except HelperKilled as error:
            if error.reason is KillReason.TIME and lane is not Lane.LONG:
                return None
            blameless = error.without_blame("The process for documents", was_tried_twice=True)
            raise blameless or InvalidRequest(f"cannot be read: that {error}") from error


def _new_helper(target: str) -> Helper:
    return Helper(target, name="documents", memory=MEMORY, niceness=BEHIND_THE_ENGINE)


def _decoded(data: bytes) -> str:
    try:
        return checked_text(decode_text(data))
    except ValueError as error:
        raise InvalidRequest(str(error)) from error


def _key(name: str, data: bytes) -> bytes:
    return blake2b(name.encode(errors="replace") + b"\0" + data, digest_size=32).digest()


@cache
def document_reader() -> DocumentReader:
    """Return the process's reader."""
    return DocumentReader()
