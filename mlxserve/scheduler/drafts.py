"""Drafts: how many tokens each decode of a step drafts, and those that prompt lookup guesses.

    LookupDrafts   guesses at a request's next tokens, from its own text (prompt lookup decoding)
    DeviceDrafts   placeholders for what a drafter on the device guesses (`model/drafting/`)

    ... total = add(a, b) ... now rename b:  total = add(a, │
                └ last here ┘                 └ 3 tokens ┘  └ draft: b ) ...

An answer that copies from its prompt or from itself says what comes next: the tokens that followed
the last time. The scheduler has a decode compute them in the same forward, and the model samples
after each of them; those that it samples itself are accepted. The idea is A. Saxena's, "Prompt
Lookup Decoding" (2023). How many of them a step computes is `DraftController`'s to choose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from itertools import takewhile

from mlxserve.request import GUESS, LiveRequest, TokenIds
from mlxserve.scheduler.draft_controller import DraftController

_GRAM = 3  # tokens that are looked up
_FIRST_DRAFT = 4  # tokens
_LONGEST_DRAFT = 32
_LONGEST_CONTEXT = 24  # tokens that are compared at most
_INDEXED_AT_ONCE = 4096  # tokens: about a millisecond
_BITS = 21  # of a token id in a key; vocabularies have up to 2**18 tokens


class Drafts(ABC):
    """The drafts of all requests of a scheduler, from one source, of at most `max_tokens` tokens each."""

    guesses_in_step = False  # drafts are placeholders

    def __init__(
        self, max_tokens: int, controller: DraftController[LiveRequest] | None = None
    ) -> None:
        """Begin without requests.

        controller: chooses among the drafts; by default one that nobody tells the time
        """
        self.controller = DraftController() if controller is None else controller
        self.max_tokens = max_tokens

    @abstractmethod
    def expects_draft(self, request: LiveRequest) -> bool:
        """Return True if the request, whose newest token is unread, will probably have a draft after it."""

    @abstractmethod
    def draft(self, request: LiveRequest, max_tokens: int) -> tuple[int, ...]:
        """Return up to `max_tokens` tokens that may follow the known ones; no sampled token is unread."""

    def likely(self, request: LiveRequest) -> tuple[int, ...]:  # noqa: ARG002 (as below)
        """Return tokens that may follow the known ones, of which a guide computes masks; () if none are known here."""
        return ()

    def longest(self, request: LiveRequest) -> int:  # noqa: ARG002 (a source may know less of it)
        """Return the most tokens of the request's next draft."""
        return self.max_tokens

    def pays(self, num_decodes: int, requests: Iterable[tuple[LiveRequest, int]]) -> bool:
        """Return True if it probably pays to read the unread step, so as to draft from its tokens.

        num_decodes: requests that will decode
        requests: those of them that may draft, each with the most tokens that there is room for
        """
        # Each is looked at: a draft that was expected and cannot be made counts as a failure.
        longest = {
            request: min(most, self.longest(request))
            for request, most in requests
            if self.expects_draft(request)
        }
        return self.controller.pays(num_decodes, longest)

    def choose(
        self, num_decodes: int, drafts: Mapping[LiveRequest, tuple[int, ...]], max_tokens: int
    ) -> dict[LiveRequest, tuple[int, ...]]:
        """Return the beginnings of these drafts that are worth their rows: at most `max_tokens` in all."""
        longest = {request: len(draft) for request, draft in drafts.items()}
        lengths = self.controller.plan(num_decodes, longest, max_tokens)
        return {request: drafts[request][:length] for request, length in lengths.items()}

    def learn(self, request: LiveRequest, num_drafted: int, num_accepted: int) -> None:
        """Adapt to a draft whose first `num_accepted` tokens the model has accepted."""
        self.controller.learn(request, num_drafted, num_accepted)

    def forget(self, request: LiveRequest) -> None:
        """Drop what is kept of a request that no longer runs."""
        self.controller.forget(request)

    def clear(self) -> None:
        """Drop what is kept of all requests."""
        self.controller.clear()


class DeviceDrafts(Drafts):
    """Drafts that a drafter makes on the device."""

    guesses_in_step = True

    def expects_draft(self, request: LiveRequest) -> bool:  # noqa: ARG002 (any request has one)
        return True

    def draft(self, request: LiveRequest, max_tokens: int) -> tuple[int, ...]:
        """Return placeholders."""
        return (GUESS,) * min(max_tokens, self.longest(request))


class LookupDrafts(Drafts):
    """Drafts by prompt lookup."""

    def __init__(
        self, max_tokens: int, controller: DraftController[LiveRequest] | None = None
    ) -> None:
        """The arguments are those of `Drafts`."""
        super().__init__(max_tokens, controller)
        self._lookups: dict[LiveRequest, Lookup] = {}  # of running requests

    @property
    def num_kept(self) -> int:
        """Number of requests that have a lookup."""
        return len(self._lookups)

    def expects_draft(self, request: LiveRequest) -> bool:
        return self._lookup(request).expects_draft(request.token_ids)

    def longest(self, request: LiveRequest) -> int:
        return min(self.max_tokens, self._lookup(request).size)

    def draft(self, request: LiveRequest, max_tokens: int) -> tuple[int, ...]:
        return self._lookup(request).draft(request.token_ids, min(max_tokens, self.max_tokens))

    def likely(self, request: LiveRequest) -> tuple[int, ...]:
        return self.draft(request, self.max_tokens)

    def learn(self, request: LiveRequest, num_drafted: int, num_accepted: int) -> None:
        self._lookup(request).learn(num_drafted, num_accepted)
        super().learn(request, num_drafted, num_accepted)

    def forget(self, request: LiveRequest) -> None:
        self._lookups.pop(request, None)
        super().forget(request)

    def clear(self) -> None:
        self._lookups.clear()
        super().clear()

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
        self.size = _FIRST_DRAFT  # most tokens of the next draft
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
        drawn = (token_ids[at + i % period] for i in range(min(self.size, max_tokens)))
        return tuple(takewhile(lambda token: token >= 0, drawn))  # no row of an image

    def learn(self, num_drafted: int, num_accepted: int) -> None:
        """Adapt the length of drafts and the required match, as `Drafts.learn` says."""
        if num_accepted == num_drafted:
            self.size = min(2 * max(self.size, num_drafted), _LONGEST_DRAFT)
        else:
            self.size = max(1, num_drafted // 2)
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
