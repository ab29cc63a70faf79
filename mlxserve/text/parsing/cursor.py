"""Cursor: the text of a section of calls, which grows while a reader waits for more.

Readers are generators: they yield events, and None where they need more text. So a reader is
written as if the whole text were there, and reads it in pieces of any size alike.

    taken since the mark | not taken yet | not there yet
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import TypeAlias, TypeVar

from mlxserve.text.parsing.markers import find_marker
from mlxserve.text.parsing.turn import Event
from mlxserve.text.parsing.values import Malformed

_T = TypeVar("_T")
Reading: TypeAlias = Generator[Event | None, None, _T]
BLANKS = " \t\r\n"


class Cut(Exception):
    """The answer ended inside a call."""


class Cursor:
    def __init__(self) -> None:
        self.is_whole = False  # no more text will come
        self._text = ""
        self._at = 0
        self._taken: list[str] = []
        self.num_taken = 0  # characters, in all

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def mark(self) -> None:
        """Mark everything taken so far as understood."""
        self._taken.clear()

    def rest(self) -> str:
        """The text from the mark on."""
        return "".join(self._taken) + self._text[self._at :]

    @property
    def is_empty(self) -> bool:
        return self._at == len(self._text)

    def take(self, length: int) -> str:
        text = self._text[self._at : self._at + length]
        self._at += length
        self._taken.append(text)
        self.num_taken += len(text)
        return text

    def rewind(self, num_taken: int) -> None:
        """Give back what was taken since then, which is after the mark."""
        taken = "".join(self._taken)
        kept = len(taken) - (self.num_taken - num_taken)
        self._text = taken[kept:] + self._text[self._at :]
        self._at, self._taken, self.num_taken = 0, [taken[:kept]], num_taken

    def wait(self) -> Reading[None]:
        """Wait for more text. Raises Cut if no more will come."""
        if self.is_whole:
            raise Cut
        yield None

    def char(self, ahead: int = 0) -> Reading[str]:
        """Return the next character, or one further ahead, without taking it."""
        while self._at + ahead >= len(self._text):
            yield from self.wait()
        return self._text[self._at + ahead]

    def ahead(self, at: int, blanks: str = BLANKS) -> Reading[tuple[int, str]]:
        """Return (place, character) of the next character from `at` on that is not blank."""
        while (char := (yield from self.char(at))) in blanks:
            at += 1
        return at, char

    def skip(self, chars: str = BLANKS) -> Reading[None]:
        yield from self.word(chars)

    def sees(self, text: str, ahead: int = 0) -> Reading[bool]:
        """True if this text comes next, or so many characters further ahead."""
        while len(self._text) - self._at - ahead < len(text):
            if not text.startswith(self._text[self._at + ahead :]):
                return False
            yield from self.wait()
        return self._text.startswith(text, self._at + ahead)

    def sees_any(self, texts: Iterable[str], ahead: int = 0) -> Reading[bool]:
        for text in texts:
            if text and (yield from self.sees(text, ahead)):
                return True
        return False

    def accepts(self, text: str) -> Reading[bool]:
        """Take this text if it comes next; True if it did."""
        is_next = yield from self.sees(text)
        if is_next:
            self.take(len(text))
        return is_next

    def accepts_any(self, texts: Iterable[str]) -> Reading[bool]:
        for text in texts:
            if (yield from self.accepts(text)):
                return True
        return False

    def expect(self, text: str) -> Reading[None]:
        if not (yield from self.accepts(text)):
            raise Malformed

    def has_item(self, closer: str, *, is_first: bool) -> Reading[bool]:
        """True before an item of a list, whose comma is taken. False after the list's end."""
        yield from self.skip()
        is_next = is_first or (yield from self.accepts(","))
        yield from self.skip()
        if (yield from self.accepts(closer)):
            return False
        if not is_next:
            raise Malformed
        return True

    def until(self, *markers: str, max_length: int | None = None) -> Reading[tuple[str, str]]:
        """Take (text before the first of the markers, that marker).

        max_length: characters of the text; more are malformed
        """
        pieces: list[str] = []
        length = 0
        while True:
            at, marker = find_marker(self._text[self._at :], markers, is_whole=self.is_whole)
            pieces.append(self.take(at))
            length += len(pieces[-1])
            if max_length is not None and length > max_length:
                raise Malformed
            if marker:
                self.take(len(marker))
                return "".join(pieces), marker
            yield from self.wait()

    def extent(self, *markers: str, is_end: Callable[[str], Reading[bool | None]]) -> Reading[str]:
        """Take a value, which may hold its own closing marker, and that marker.

        is_end: called after each of the markers; True if the value ends with it, None if the value
            ends with the first such marker unless another one turns out to be its end
        """
        pieces: list[str] = []
        likely: tuple[int, int] | None = None  # number of pieces, place
        try:
            while True:
                pieces += yield from self.until(*filter(None, markers))
                is_last = yield from is_end(pieces[-1])
                if is_last:
                    break
                if is_last is None and likely is None:
                    likely = len(pieces), self.num_taken
        except Cut:
            if likely is None:
                raise
            del pieces[likely[0] :]
            self.rewind(likely[1])
        return "".join(pieces[:-1])

    def word(self, chars: str | frozenset[str]) -> Reading[str]:
        """Take the longest run of these characters."""
        pieces: list[str] = []
        while (yield from self.char()) in chars:
            pieces.append(self.take(1))
        return "".join(pieces)

    def before(self, chars: str) -> Reading[str]:
        """Take the text up to the first of these characters."""
        pieces: list[str] = []
        while (yield from self.char()) not in chars:
            pieces.append(self.take(1))
        return "".join(pieces)
