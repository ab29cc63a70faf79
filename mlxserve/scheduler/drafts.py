"""Drafts: how many tokens each decode of a step drafts, and those that prompt lookup guesses.

    LookupDrafts   guesses at a request's next tokens, from its own text (prompt lookup decoding)
    DeviceDrafts   placeholders for what a drafter on the device guesses (`model/drafting/`)

    ... total = add(a, b) ... now rename b:  total = add(a, │
                └ last here ┘                 └ 3 tokens ┘  └ draft: b ) ...

An answer that copies from its prompt or from itself says what comes next: the tokens that followed
the last time. The scheduler has a decode compute them in the same forward, and the model samples
after each of them; those that it samples itself are accepted. The idea is A. Saxena's, "Prompt
Lookup Decoding" (2023).
"""

# ruff: noqa: B027 (a source overrides what concerns it)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import takewhile
from typing import Protocol

from mlxserve.request import GUESS, LiveRequest, TokenIds

# A forward of few rows waits for weights, so that more rows cost little. On a 2-core x86 machine with
# the embedded model drafts (of which 8 in 10 were accepted) made one answer 1.5 to 2.8 times as fast
# by CPU time, 2 together 1.3 to 1.4, 4 together 0.9 to 1.0 and 8 together 0.6 to 1.2. Not measured on
# a GPU.
MAX_DECODES = 2
MAX_ROWS = 16  # of a step's decodes and drafts
# The same where a drafter guesses, which guesses more than text that was seen before. On Macs since the M3
# a small product reads the weights once for each five rows, and from 13 to 32 rows about as often as for 12.
MAX_GUESSED_DECODES = 8
MAX_GUESSED_ROWS = 32

_GRAM = 3  # tokens that are looked up
_FIRST_DRAFT = 4  # tokens
_LONGEST_CONTEXT = 24  # tokens that are compared at most
_INDEXED_AT_ONCE = 4096  # tokens: about a millisecond
_BITS = 21  # of a token id in a key; vocabularies have up to 2**18 tokens


class DraftLengths(Protocol):
    """Decides how many tokens the decodes of a step draft."""

    def choose(self, decodes: Sequence[LiveRequest], num_rows: int) -> Sequence[int]:
        """Return the maximum draft of each of these decodes.

        May be called more than once for a step, and first where it is decided whether a step is read early.

        num_rows: of all decodes in the step, including those that cannot draft
        """


class FixedLengths:
    """Drafts of `max_tokens` for few decodes, and none for more of them."""

    def __init__(
        self, max_tokens: int, max_decodes: int = MAX_DECODES, max_rows: int = MAX_ROWS
    ) -> None:
        self._max_tokens = max_tokens
        self._max_decodes = max_decodes
        self._max_rows = max_rows

    def choose(self, decodes: Sequence[LiveRequest], num_rows: int) -> Sequence[int]:
        if num_rows > self._max_decodes:
            return [0] * len(decodes)
        return [min(self._max_tokens, self._max_rows // max(1, num_rows) - 1)] * len(decodes)


class Drafts(ABC):
    """The drafts of all requests of a scheduler, from one source."""

    def __init__(self, lengths: DraftLengths) -> None:
        self.lengths = lengths

    @abstractmethod
    def expects_draft(self, request: LiveRequest) -> bool:
        """Return True if the request, whose newest token is unread, will probably have a draft after it."""

    @abstractmethod
    def draft(self, request: LiveRequest, max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens that may follow the known ones; no sampled token is unread."""

    def learn(self, request: LiveRequest, num_drafted: int, num_accepted: int) -> None:
        """Adapt to a draft whose first `num_accepted` tokens the model has accepted."""

    def forget(self, request: LiveRequest) -> None:
        """Drop what is kept of a request that no longer runs."""

    def clear(self) -> None:
        """Drop what is kept of all requests."""


class DeviceDrafts(Drafts):
    """Drafts that a drafter makes on the device, of up to `max_tokens` tokens."""

    def __init__(self, max_tokens: int, lengths: DraftLengths | None = None) -> None:
        super().__init__(lengths or FixedLengths(max_tokens, MAX_GUESSED_DECODES, MAX_GUESSED_ROWS))

    def expects_draft(self, request: LiveRequest) -> bool:  # noqa: ARG002 (any request has one)
        return True

    def draft(self, request: LiveRequest, max_tokens: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return placeholders."""
        return (GUESS,) * max_tokens


class LookupDrafts(Drafts):
    """Drafts by prompt lookup, of up to `max_tokens` tokens."""

    def __init__(self, max_tokens: int, lengths: DraftLengths | None = None) -> None:
        super().__init__(lengths or FixedLengths(max_tokens))
        self._lookups: dict[LiveRequest, Lookup] = {}  # of running requests

    @property
    def num_kept(self) -> int:
        """Number of requests that have a lookup."""
        return len(self._lookups)

    def expects_draft(self, request: LiveRequest) -> bool:
        return self._lookup(request).expects_draft(request.token_ids)

    def draft(self, request: LiveRequest, max_tokens: int) -> tuple[int, ...]:
        return self._lookup(request).draft(request.token_ids, max_tokens)

    def learn(self, request: LiveRequest, num_drafted: int, num_accepted: int) -> None:
        self._lookup(request).learn(num_drafted, num_accepted)

    def forget(self, request: LiveRequest) -> None:
        self._lookups.pop(request, None)

    def clear(self) -> None:
        self._lookups.clear()

    def _lookup(self, request: LiveRequest) -> Lookup:
        if request not in self._lookups:
            self._lookups[request] = Lookup()
        return self._lookups[request]


class Lookup:
    """The last occurrence of every three tokens of one text, and the success of its drafts.

    The length of drafts is doubled after an accepted one and halved after a rejected one. A draft without any
    accepted token makes later ones need a longer match: ordinary text repeats three tokens often, and
    twelve only where it copies.
    """

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}  # from a gram to the position of its last token
        self._num_indexed = 0  # positions; never the last one of the text
        self._size = _FIRST_DRAFT
        self._context = _GRAM  # tokens that must match
        self._was_expected = False

    def expects_draft(self, token_ids: TokenIds) -> bool:
        """Return `Drafts.expects_draft` of this text, and remember it."""
        self._was_expected = self._find(token_ids) is not None
        return self._was_expected

    def draft(self, token_ids: TokenIds, max_tokens: int) -> tuple[int, ...]:
        """Return the tokens that followed the last match, repeated if the match overlaps with the end."""
        was_expected, self._was_expected = self._was_expected, False
        if max_tokens < 1:
            return ()
        at = self._find(token_ids)
        if at is None:
            if was_expected:
                self._require_more()  # a step was read early for nothing
            return ()
        period = len(token_ids) - at
        drawn = (token_ids[at + i % period] for i in range(min(self._size, max_tokens)))
        return tuple(takewhile(lambda token: token >= 0, drawn))  # no row of an image

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Adapt the length of drafts and the required match, as `Drafts.learn` says."""
        if num_accepted == num_drafted:
            self._size = max(self._size, 2 * num_drafted)
        else:
            self._size = max(1, num_drafted // 2)
        if num_accepted:
            self._context = _GRAM
        else:
            self._require_more()

    def _require_more(self) -> None:
        self._context = min(2 * self._context, _LONGEST_CONTEXT)

    def _find(self, token_ids: TokenIds) -> int | None:
        """Return the position after the last earlier match of the end of the text."""
        self._index(token_ids)
        last = len(token_ids) - 1
        if last < self._context or self._num_indexed < last:
            return None
        at = self._ends.get(_gram(token_ids, last))
        if at is None or at + 1 < self._context:
            return None
        size = self._context
        if token_ids[at + 1 - size : at + 1] != token_ids[last + 1 - size :]:
            return None
        return at + 1

    def _index(self, token_ids: TokenIds) -> None:
        end = min(len(token_ids) - 1, self._num_indexed + _INDEXED_AT_ONCE)
        for position in range(max(self._num_indexed, _GRAM - 1), end):
            self._ends[_gram(token_ids, position)] = position
        self._num_indexed = max(self._num_indexed, end)


def _gram(token_ids: TokenIds, last: int) -> int:
    """Return the three tokens up to `last` as one number."""
    first, second, third = token_ids[last - 2], token_ids[last - 1], token_ids[last]
    return (first << 2 * _BITS) | (second << _BITS) | third
