"""Messages between rank 0 and the other ranks about their records on disk.

    head     verb u8 | tier u8 | length of kind u16 | number i64 | counts of units, times and names, u32 each
    body     kind, units i64, times f64, a length u8 of each name, names                 little-endian

A record has a part on every rank, under one name. Rank 0 says what to save, to load and to write into memory;
the others say what they could do, and which records they have.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, pairwise
from typing import Self

_HEAD = struct.Struct("<BBHqIII")


class Verb(IntEnum):
    """Names the kinds of messages. Comments say who sends each, and its fields besides `tier`."""

    SAVE = 1  # lead: kind, and units to read; names to save them under, and the times of their last use
    LOAD = 2  # lead: number of the load; names to read, until one is missing
    WRITE = 3  # lead: kind, and units to write what was loaded under these names to
    RELEASE = 4  # lead: numbers of loads, as units, of which nothing more is written
    TOUCH = 5  # lead: names and times of their last use
    DELETE = 6  # lead: names
    CLEAR = 7  # lead
    ANSWER = 8  # other: number of the load; as its only unit how many leading records were read
    NEWS = 9  # other: number of messages taken; see `News`


@dataclass(frozen=True, slots=True)
class RankMessage:
    """One message. `tier`: 0 is the disk, 1 the page store."""

    verb: Verb
    tier: int = 0
    kind: str = ""
    number: int = 0
    units: Sequence[int] = ()
    times: Sequence[float] = ()
    names: Sequence[bytes] = ()

    def encode(self) -> bytes:
        kind = self.kind.encode()
        counts = len(self.units), len(self.times), len(self.names)
        return b"".join(
            (
                _HEAD.pack(self.verb, self.tier, len(kind), self.number, *counts),
                kind,
                struct.pack(f"<{counts[0]}q", *self.units),
                struct.pack(f"<{counts[1]}d", *self.times),
                bytes(map(len, self.names)),
                *self.names,
            )
        )

    @classmethod
    def decode(cls, body: bytes) -> Self:
        """Parse a message. Raises ValueError."""
        try:
            verb, tier, len_kind, number, *counts = _HEAD.unpack_from(body)
            sizes = (len_kind, 8 * counts[0], 8 * counts[1], counts[2])
            ends = list(accumulate(sizes, initial=_HEAD.size))
            kind, units, times, lengths = (body[begin:end] for begin, end in pairwise(ends))
            places = list(accumulate(lengths, initial=ends[-1]))
            if places[-1] != len(body):
                raise ValueError("a message of another length")
            return cls(
                Verb(verb),
                tier,
                kind.decode(),
                number,
                struct.unpack(f"<{counts[0]}q", units),
                struct.unpack(f"<{counts[1]}d", times),
                tuple(body[begin:end] for begin, end in pairwise(places)),
            )
        except struct.error as error:
            raise ValueError("a message that is cut off") from error


@dataclass(frozen=True, slots=True)
class News:
    """Tells what has changed in a tier of another rank.

    num_messages: taken before
    written, gone: names that can be read from now on, and that cannot, or were not saved
    is_idle: nothing is left to be done of these messages
    is_out: no record can be read now
    has_refused: some of `gone` were to be saved
    coldest_kept: a record that was used before this time would not be kept; -inf if any would be
    """

    num_messages: int
    written: Sequence[bytes]
    gone: Sequence[bytes]
    is_idle: bool
    is_out: bool
    has_refused: bool
    coldest_kept: float

    def message(self, tier: int) -> RankMessage:
        units = len(self.written), self.is_idle, self.is_out, self.has_refused
        names = (*self.written, *self.gone)
        return RankMessage(
            Verb.NEWS,
            tier,
            number=self.num_messages,
            units=units,
            times=(self.coldest_kept,),
            names=names,
        )

    @classmethod
    def from_message(cls, message: RankMessage) -> Self:
        """Raises ValueError."""
        num_written, *flags = message.units
        is_idle, is_out, has_refused = map(bool, flags)
        [coldest_kept] = message.times
        written, gone = message.names[:num_written], message.names[num_written:]
        return cls(message.number, written, gone, is_idle, is_out, has_refused, coldest_kept)
