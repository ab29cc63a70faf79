"""Frames between rank 0 and its workers, on TCP connections beside mx.distributed.

    frame   [ body length u32 | kind u8 | 3 bytes 0 | number u32 ] body          little-endian

A STEP's body is int32. A page table is sent as the difference to the one that the request had in
the step before; a request that was not in it sends its whole table.

    [ chunks, requests of the step before, new pages, those of windows, tokens, numbers about states, about pictures ]
    [ start, length, flags, source, request, kept, new, kept, new, drafted ] of each chunk
    [ new pages ] [ those of windows ] [ tokens of chunks that are not lazy ]
    [ restore, count, (position, id) x count ]
    [ pictures, see mlxserve/model/told_pictures.py ] of each request that has some and was not in the step before

    flags    1 samples, 2 is lazy, 4 has a plan for its recurrent state, 8 has a table for windows, 16 tells its
             request's pictures; from bit 8 on the number of its request's adapter plus 1, or 0
    source   row of the step before that samples the lazy token, else -1
    request  its number of arrival
    kept     pages taken over from its table in the step before, which new ones follow; then the same of
             its table for layers with a window
    drafted  of its tokens, the last ones; all -1 if rank 0 guesses them in the step itself
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from itertools import accumulate

import numpy as np

from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.model.told_pictures import NO_PICTURES, numbers_of, pictures_in
from mlxserve.request import Chunk, PageTable, RequestState, StatePlan

VERSION = 6
MAX_BODY = 1 << 28  # bytes
_HEADER = struct.Struct("<IBxxxI")
_PIECE = 1 << 20  # bytes read at once
_FIELDS, _COLUMNS = 7, 10  # numbers of a plan's head, and of each chunk


class FrameKind(IntEnum):
    """The kind of a frame. Comments name its body and its sender."""

    HELLO = 1  # worker: JSON, see handshake.py
    GO = 2  # lead: every rank has come
    MEMBER = 3  # worker: the 32 bytes that were said over the group
    STEP = 4  # lead: a plan
    COPY = 5  # lead: int32 source pages, target pages
    BACK = 6  # lead: int32 kind, pages that need memory, 1 if one layer at a time, ahead of need
    ASK_SIZE = 7  # lead: int32 pages; asks for MAX_PAGES
    MAX_PAGES = 8  # worker: UTF-8, empty or why it cannot have as many
    RESIZE = 9  # lead: int32 pages
    DROP = 10  # lead: int32 count of snapshots, snapshots, requests that have ended
    EMBED = 11  # lead: int32 number of the text, its next tokens; without tokens the text is done
    CLOSE = 12  # lead
    BEAT = 13  # worker, each second: BEAT_BODY
    ERROR = 14  # worker: UTF-8; it ends
    DISK = 15  # both: about records on disk, see mlxserve/disk/rank_messages.py
    BEGIN_TEXT = 16  # lead: int32 number of a text to embed, that of its adapter plus 1


POOLED_KINDS = (FullPages.name, WindowPages.name)  # numbered by their place, in BACK

BEAT_BODY = struct.Struct("<IQQ")  # frame it has reached, bytes active, peak


@dataclass(frozen=True, slots=True)
class RankFrame:
    kind: FrameKind
    number: int
    body: bytes


class ProtocolError(ConnectionError):
    """The other side sent what no rank of this version sends."""


class Channel:
    """One connection. One thread sends at a time, and another may receive."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._number = 0

    def send(self, kind: FrameKind, body: bytes = b"") -> int:
        """Send a frame and return its number. Raises OSError."""
        self._number += 1
        self._socket.sendall(_HEADER.pack(len(body), kind, self._number) + body)
        return self._number

    def receive(self) -> RankFrame:
        """Receive a frame. Raises ConnectionError at the end, and TimeoutError (`set_timeout`)."""
        length, kind, number = _HEADER.unpack(self._exactly(_HEADER.size))
        if length > MAX_BODY or kind not in FrameKind._value2member_map_:
            raise ProtocolError(f"a frame of kind {kind} with {length} bytes")
        return RankFrame(FrameKind(kind), number, self._exactly(length))

    def set_timeout(self, seconds: float | None) -> None:
        """Set the timeout of `receive` and `send`; None waits for ever."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Idempotent. A thread that waits in `receive` gets a ConnectionError."""
        with contextlib.suppress(OSError):  # it has ended already
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, length: int) -> bytes:
        parts = bytearray()
        while len(parts) < length:
            part = self._socket.recv(min(length - len(parts), _PIECE))
            if not part:
                raise ConnectionError("the connection has ended")
            parts += part
        return bytes(parts)


def as_int32(numbers: Iterable[int]) -> bytes:
    encoded = array("i", numbers)
    if sys.byteorder == "big":
        encoded.byteswap()
    return encoded.tobytes()


def from_int32(body: bytes) -> array[int]:
    """Parse int32 numbers. Raises ProtocolError."""
    decoded = array("i")
    try:
        decoded.frombytes(body)
    except ValueError as error:
        raise ProtocolError(f"a body of {len(body)} bytes") from error
    if sys.byteorder == "big":
        decoded.byteswap()
    return decoded


class _Flags(IntFlag):
    SAMPLES = 1
    IS_LAZY = 2
    HAS_STATE = 4
    HAS_WINDOWS = 8
    HAS_PICTURES = 16


_FLAG_BITS = 8


def number_of(adapter: int | None) -> int:
    """Encode an adapter's number, or that there is none."""
    return 0 if adapter is None else adapter + 1


def adapter_of(number: int) -> int | None:
    """Decode what `number_of` returns."""
    return None if number == 0 else number - 1


class _SentTables:
    """Page tables of a step's requests, as differences to those of the step before."""

    def __init__(self) -> None:
        self.last: dict[int, PageTable] = {}
        self._now: dict[int, PageTable] = {}
        self._pages = array("i")

    def add(self, number: int, table: PageTable) -> tuple[int, int]:
        """Return (pages kept from the request's previous table, new ones)."""
        old = self.last.get(number)
        kept = 0 if old is None else len(table) if old is table else _num_common(old, table)
        self._pages.extend(table[kept:])
        self._now[number] = table
        return kept, len(table) - kept

    def end_step(self) -> array[int]:
        """Return the new pages of all requests, and start the next step."""
        self.last, self._now = self._now, {}
        pages, self._pages = self._pages, array("i")
        return pages


class PlanEncoder:
    """Rank 0's side. Remembers the page tables of one step."""

    def __init__(self) -> None:
        self._tables, self._windows = _SentTables(), _SentTables()

    def encode(self, chunks: Sequence[Chunk], sources: Mapping[Chunk, int]) -> bytes:
        """`sources`: for each lazy chunk, the row of the step before that samples its token."""
        rows, tokens, states, pictures = array("i"), array("i"), array("i"), array("i")
        num_known = len(self._tables.last)
        for chunk in chunks:
            number = chunk.request.arrival
            flags = chunk.samples * _Flags.SAMPLES | chunk.is_lazy * _Flags.IS_LAZY
            flags |= number_of(chunk.request.asked.adapter) << _FLAG_BITS
            if not chunk.is_lazy:
                tokens.extend(chunk.request.token_ids[chunk.start : chunk.end - len(chunk.draft)])
                tokens.extend(chunk.draft)
            if chunk.state is not None:
                flags |= _Flags.HAS_STATE
                states.extend(_of_state(chunk.state))
            if chunk.request.asked.pictures and number not in self._tables.last:
                flags |= _Flags.HAS_PICTURES
                pictures.extend(numbers_of(chunk.request.asked.pictures))
            of_windows = 0, 0
            if chunk.window_table is not None:
                flags |= _Flags.HAS_WINDOWS
                of_windows = self._windows.add(number, chunk.window_table)
            rows.extend((chunk.start, chunk.length, flags, sources.get(chunk, -1), number))
            rows.extend((*self._tables.add(number, chunk.page_table), *of_windows))
            rows.append(len(chunk.draft))
        pages, window_pages = self._tables.end_step(), self._windows.end_step()
        lengths = map(len, (pages, window_pages, tokens, states, pictures))
        head = array("i", (len(chunks), num_known, *lengths))
        return as_int32(head + rows + pages + window_pages + tokens + states + pictures)


def _of_state(plan: StatePlan) -> list[int]:
    restore = -1 if plan.restore is None else plan.restore
    return [restore, len(plan.keeps), *(number for keep in plan.keeps for number in keep)]


class _ToldAsk:
    """A worker's stand-in for a Request."""

    __slots__ = ("adapter", "blocks", "pictures")

    def __init__(self, adapter: int | None) -> None:
        self.adapter = adapter
        self.pictures, self.blocks = NO_PICTURES


class ToldRequest:
    """A worker's stand-in for a LiveRequest: what a forward needs of it."""

    __slots__ = ("arrival", "asked", "has_ended", "id", "token_ids")

    def __init__(self, number: int, adapter: int | None = None) -> None:
        self.asked = _ToldAsk(adapter)
        self.arrival = number
        self.id = f"request {number}"
        self.token_ids = _Piece()
        self.has_ended = False

    @property
    def state(self) -> RequestState:
        return RequestState.FINISHED if self.has_ended else RequestState.RUNNING


class _Piece:
    """The tokens of one chunk, indexed by their positions in the whole text."""

    __slots__ = ("start", "tokens")

    def __init__(self) -> None:
        self.start = 0
        self.tokens = array("i")

    def __getitem__(self, where: int | slice) -> int | array[int]:
        if isinstance(where, int):
            return self.tokens[where - self.start]
        return self.tokens[where.start - self.start : where.stop - self.start]


class _ToldTables:
    """Page tables decoded from `_SentTables`."""

    def __init__(self) -> None:
        self.last: dict[int, PageTable] = {}
        self._now: dict[int, PageTable] = {}

    def add(self, number: int, kept: int, new: PageTable) -> PageTable:
        """Decode a table. Raises KeyError or ValueError if it does not continue the last one."""
        old = self.last[number] if kept else array("i")
        if kept > len(old):
            raise ValueError("a table that is shorter")
        table = old if kept == len(old) and not new else old[:kept] + new
        self._now[number] = table
        return table

    def end_step(self) -> None:
        self.last, self._now = self._now, {}


class PlanDecoder:
    """Decodes a worker's chunks, as `Batch.from_chunks` takes them."""

    def __init__(self, *, has_states: bool) -> None:
        """`has_states`: keep requests that are not in a step, with their states, until `forget`."""
        self._has_states = has_states
        self._tables, self._windows = _ToldTables(), _ToldTables()
        self._requests: dict[int, ToldRequest] = {}

    def decode(self, body: bytes) -> tuple[list[Chunk], dict[Chunk, int]]:
        """Return (chunks, the source of each lazy one).

        Raises ProtocolError for a plan that does not continue the previous one.
        """
        numbers = from_int32(body)
        try:
            return self._decoded(numbers)
        except (IndexError, KeyError, ValueError) as error:
            raise ProtocolError("a plan that does not follow the one before") from error

    def forget(self, requests: Iterable[int]) -> None:
        """Drop requests that ended, or lost their states."""
        for number in requests:
            if (request := self._requests.pop(number, None)) is not None:
                request.has_ended = True

    def _decoded(self, numbers: array[int]) -> tuple[list[Chunk], dict[Chunk, int]]:
        count, num_known, *lengths = numbers[:_FIELDS]
        begin = _FIELDS + count * _COLUMNS
        page, window, token, state, picture, end = accumulate(lengths, initial=begin)
        if num_known != len(self._tables.last) or end != len(numbers):
            raise ValueError("other lengths")
        chunks: list[Chunk] = []
        sources: dict[Chunk, int] = {}
        for at in range(_FIELDS, begin, _COLUMNS):
            start, length, bits, source, number, *of_tables, num_drafted = numbers[
                at : at + _COLUMNS
            ]
            kept, new, kept_windows, new_windows = of_tables
            if not 0 <= num_drafted < max(1, length):
                raise ValueError("a draft without a known token before it")
            flags = _Flags(bits & (1 << _FLAG_BITS) - 1)
            table = self._tables.add(number, kept, numbers[page : page + new])
            page += new
            windows = None
            if _Flags.HAS_WINDOWS in flags:
                fresh = numbers[window : window + new_windows]
                windows = self._windows.add(number, kept_windows, fresh)
                window += new_windows
            request = self._request(number, adapter_of(bits >> _FLAG_BITS))
            if _Flags.IS_LAZY not in flags:
                request.token_ids.start = start
                request.token_ids.tokens = numbers[token : token + length]
                token += length
            if _Flags.HAS_PICTURES in flags:
                told, picture = pictures_in(numbers, picture)
                request.asked.pictures, request.asked.blocks = told
            plan = None
            if _Flags.HAS_STATE in flags:
                plan, state = _state_plan(numbers, state)
            chunk = Chunk(
                request,  # type: ignore[arg-type]  # has what a forward needs
                start,
                length,
                table,
                _Flags.SAMPLES in flags,
                _Flags.IS_LAZY in flags,
                plan,
                draft=tuple(numbers[token - num_drafted : token]),
                window_table=windows,
            )
            chunks.append(chunk)
            if chunk.is_lazy:
                sources[chunk] = source
        self._tables.end_step()
        self._windows.end_step()
        if not self._has_states:
            known = self._tables.last
            self._requests = {number: self._requests[number] for number in known}
        return chunks, sources

    def _request(self, number: int, adapter: int | None) -> ToldRequest:
        if number not in self._requests:
            self._requests[number] = ToldRequest(number, adapter)
        return self._requests[number]


def _state_plan(numbers: array[int], at: int) -> tuple[StatePlan, int]:
    """Parse a state's plan; return it and the index after it."""
    restore, count = numbers[at], numbers[at + 1]
    end = at + 2 + 2 * count
    pairs = numbers[at + 2 : end]
    keeps = tuple(zip(pairs[::2], pairs[1::2], strict=True))
    return StatePlan(None if restore < 0 else restore, keeps), end


def _num_common(old: PageTable, new: PageTable) -> int:
    """Number of leading pages that both tables share."""
    length = min(len(old), len(new))
    if old[:length] == new[:length]:
        return length
    differs = np.frombuffer(old, np.int32)[:length] != np.frombuffer(new, np.int32)[:length]
    return int(np.argmax(differs))
