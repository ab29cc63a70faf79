"""Request: a prompt and its options as data, its progress, and its output per step.

Knows nothing of pages' contents, of arrays or of text. Only the scheduler's package changes a
`LiveRequest`; everything else here is frozen.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum, auto
from typing import NamedTuple, Protocol, TypeAlias

from mlxserve.core.config import MAX_PAGES, MIN_PAGES
from mlxserve.core.sampling_params import SamplingParams, check_whole
from mlxserve.images.picture import Block, Placed, blocks_of

# Begins the name of a client that is known by its connection only.
ANONYMOUS = "@"
BACKGROUND = 10  # the priority of work that no one waits for
STATE_SLOTS = 2  # slots of a running request: its recurrent state, and its newest snapshot


def owner_of(client: str) -> str:
    """The API key of a client, to which what it sends belongs; "" for all clients without one."""
    return "" if client.startswith(ANONYMOUS) else client


def check_num_pages(num_pages: object) -> None:
    """Raises InvalidParameter for a number of pages out of range."""
    check_whole(num_pages, "num_pages", MIN_PAGES, MAX_PAGES)


class FinishReason(StrEnum):
    """The reason for which a request ended; values are those of the OpenAI API if it has one."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    TOOL_CALLS = "tool_calls"  # the model ended its turn, having called a tool
    REPETITION = "repetition"  # it repeated itself (SamplingParams.stop_on_repetition)
    ABORT = "abort"  # the client went away


class Pooling(StrEnum):
    """The way in which the hidden states of a text's tokens become one vector."""

    MEAN = "mean"
    LAST = "last"  # the last token's, which has seen all others


class RequestState(Enum):
    """The progress of a request in the scheduler."""

    WAITING = auto()  # holds no pages
    RUNNING = auto()  # has a page table
    FINISHED = auto()


class CacheMiss(StrEnum):
    """The reason for which no more of a prompt was cached."""

    NEW_TEXT = "new_text"  # never computed from some token on
    EVICTED = "evicted"  # it was cached, but its pages were needed
    OTHER_SALT = (
        "other_salt"  # this client computed it under another cache_salt, or with another adapter
    )
    BELOW_ONE_PAGE = "below_one_page"  # the rest does not fill a page, or is the last token
    # The same, but they end inside an image, all rows of which one step computes.
    INSIDE_IMAGE = "inside_image"
    LOST = "lost"  # it was on disk, but could not be read
    NO_SNAPSHOT = "no_snapshot"  # its pages are cached, but no recurrent state after them
    WINDOW_EVICTED = "window_evicted"  # the same, but not the window of the layers that have one
    OFF = "off"  # prefix caching is off


@dataclass(frozen=True, slots=True)
class CacheReport:
    """The cache's contribution to a prompt."""

    num_pages: int  # reused
    num_tokens: int  # tokens in these pages, and in the copied part of one more
    differs_at: int  # position of the first token that was not cached
    reason: CacheMiss
    num_from_disk: int = 0  # tokens that were read from disk
    num_from_store: int = 0  # tokens that were read from a page store
    page_size: int = field(default=0, compare=False)  # tokens


class Guide(Protocol):
    """Decides which tokens may come next in one answer."""

    num_read: int
    error: str | None  # why the answer could not be guided to its end

    def read(self, token_ids: Sequence[int], /) -> None:
        """Feed chosen tokens, in order."""

    def expect(self, likely: Sequence[int], /) -> None:
        """Foresee these tokens, as far as the structure allows them after those read.

        If the next mask is known already, `mask` waits for it again.
        """

    def ask(self) -> None:
        """Request the next mask, together with those of all guides that have read tokens."""

    @property
    def is_ready(self) -> bool:
        """True if the next mask is known. May wait for it for a few milliseconds."""

    def wait(self, seconds: float, /) -> None:
        """Wait up to `seconds` for the next mask."""

    @property
    def must_wait(self) -> bool:
        """True if the token after the next one cannot be chosen before that one is known."""

    def foresee(self, num_tokens: int, /) -> None:
        """Find out up to `num_tokens` of the `foreseen` tokens with each mask from now on."""

    @property
    def foreseen(self) -> Sequence[int]:
        """Tokens that follow if the structure allows nothing else, or likely ones that it allows.

        They are drafts: the forced ones may be split otherwise.
        """

    @property
    def is_free(self) -> bool:
        """True if the structure limits nothing now, or only which tokens are special: it foresees at once."""

    @property
    def can_follow(self) -> bool:
        """True if the structure can foresee what is guessed after all tokens read."""

    def mask(self, num_foreseen: int = 0, /) -> bytes | None:
        """Return a bit per token, little-endian in 32-bit words: 1 if allowed. None allows all.

        num_foreseen: of the `foreseen` tokens, how many come before the token
        """


# Page ids. An array, not a tuple, because it is copied whenever it grows: with 100,000 tokens of
# context, copying a tuple counts references to 3,000 numbers all over memory, and the garbage
# collector scans it, which together took half of the scheduler's time.
PageTable: TypeAlias = "array[int]"
# A list of 100,000 tokens takes 8 to 36 bytes for each, and the garbage collector scans it: with
# 256 such contexts it stopped everything for 0.3 s.
TokenIds: TypeAlias = "array[int]"


def as_token_ids(token_ids: Iterable[int] = ()) -> TokenIds:
    """Copy token ids into an array."""
    return array("i", token_ids)


def as_page_table(pages: Iterable[int] = ()) -> PageTable:
    """Copy page ids into an array."""
    return array("i", pages)


@dataclass(frozen=True, slots=True)
class Resized:
    """The effects of changing the number of pages."""

    num_pages: int
    max_model_len: int  # longest prompt plus answer from now on, where no prefix is pinned
    num_preempted: int  # requests that gave their pages back, and start again later
    num_forgotten: int  # cached pages


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Cached pages that were forgotten because their conversation is deleted."""

    num_pages: int = 0  # pages in memory
    num_on_disk: int = 0

    def __add__(self, other: Forgotten) -> Forgotten:
        return Forgotten(self.num_pages + other.num_pages, self.num_on_disk + other.num_on_disk)


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of one request that are being read from disk."""

    first: int  # index in the request's page table
    hashes: tuple[bytes, ...]

    @property
    def end(self) -> int:
        """Index after the last page."""
        return self.first + len(self.hashes)


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Request:
    """A prompt, and the options of its answer. Identity is the object."""

    id: str
    token_ids: Sequence[int]  # the prompt; becomes TokenIds
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop tokens
    cache_salt: bytes = b""  # pages are shared only within one salt
    client: str = ""  # clients share the engine fairly (see ANONYMOUS)
    priority: int = 0  # lower goes first; see BACKGROUND
    skips_cache: bool = False  # it neither finds cached pages nor leaves any
    pins: bool = False  # the prompt is a named prefix: its pages stay after the request's end
    pin_share: float = 1.0  # most that its client may have of the pages of all named prefixes
    fork_of: str | None = None  # id of a request with the same prompt, which computes it for both
    guide: Guide | None = None  # limits which tokens may come next
    page_hashes: Sequence[bytes] = ()  # hashes of its first pages, if the caller knows them
    pictures: Placed = ()  # pictures with rows in the prompt, in order
    adapter: int | None = None  # its number among the model's; its pages have a salt of their own
    # Ranges of positions that one chunk computes: images whose rows attend to one another in both directions.
    blocks: tuple[Block, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        if self.pictures:
            object.__setattr__(self, "blocks", blocks_of(self.pictures))
        if not isinstance(self.token_ids, array):
            object.__setattr__(self, "token_ids", as_token_ids(self.token_ids))

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.token_ids)


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request's progress towards its answer. Only the scheduler's package changes it.

        token_ids   [ prompt ............ | outputs ...... ] (+ one sampled, not yet read)
        num_computed ------------------>| KV exists, or is being computed by a launched step
        page_table  [ page | page | ... ]   covers num_computed tokens

    `num_in_flight` counts steps that were launched and not yet read; while it is above 0 the
    request keeps its pages, even after its end. `page_table` is replaced when it grows, never
    changed in place, so that a chunk keeps the table it was planned with.
    """

    asked: Request
    arrival: int = 0  # order of arrival
    arrived: float = 0.0  # when, in seconds of the engine's clock
    queued_at: int = 0  # the number of the step before which it arrived
    length_limit: int = 0  # known tokens with which it ends, by max_tokens or max_model_len
    # Part of `length_limit` that the cache had room for when it was queued.
    promised_length: int = 0
    leader: LiveRequest | None = None  # the request that computes its prompt while it waits
    id: str = field(init=False)
    num_prompt: int = field(init=False)
    token_ids: TokenIds = field(init=False)
    page_hashes: list[bytes] = field(init=False)
    ends_on: frozenset[int] = field(init=False)  # tokens that end it
    num_computed: int = 0
    num_cached: int = 0  # tokens of the prompt found in the cache at first admission, or copied
    cache: CacheReport | None = None  # report of the first admission
    num_in_flight: int = 0
    num_preemptions: int = 0
    spared_until: int = 0  # known tokens from which on it may make way for a higher class
    num_overtaken: int = 0  # admissions of later requests while this one lacked memory
    is_deferred: bool = False  # its next chunk waits for a step with a page of budget left
    num_lost: int = 0  # computed tokens that the last preemption gave up
    prefill_end: int = 0  # known tokens at the last admission; from there on it decodes
    page_table: PageTable = field(default_factory=as_page_table)
    window_table: PageTable = field(default_factory=as_page_table)  # pages of sliding-window layers
    window_first: int = 0  # its pages before this one are not the request's
    disk_base: int = 0  # it can continue after its pages before this one if nothing is read
    disk_first: int = 0  # its pages before this one were in memory when it began
    disk_end: int = 0  # its pages up to this one are read from disk where they are not computed
    num_from_store: int = 0  # pages read from a page store that its report does not have yet
    disk_resume: int = 0  # page from which it is read again, after one that was lost
    loading: PageRun | None = None  # pages that are being read into its table
    decodes_until: int = 0  # it decodes every position before this one, without another look
    commits_until: int = 0  # each position before this one yields a token, and nothing else
    is_drafting: bool = False  # an unread step verifies a draft: how far it gets is not known
    num_drafted: int = 0
    num_accepted: int = 0  # drafted tokens that were accepted
    accepted_at: list[int] = field(default_factory=list)  # of these, by position in their drafts
    has_resumed: bool = False  # it lost its pages once, and began again
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.id = self.asked.id
        self.num_prompt = self.asked.num_prompt
        self.token_ids = as_token_ids(self.asked.token_ids)
        self.page_hashes = list(self.asked.page_hashes)
        # Tokens that the caller named end it even where the model's own end does not.
        params = self.asked.params
        own = frozenset() if params.ignore_eos else self.asked.stop_ids
        self.ends_on = own | frozenset(params.stop_token_ids)

    @property
    def num_outputs(self) -> int:
        """Tokens of the answer so far."""
        return len(self.token_ids) - self.num_prompt

    def feed_guide(self) -> Guide | None:
        """Return the request's guide, once it has read every known output token."""
        guide = self.asked.guide
        if guide is not None:
            guide.read(self.token_ids[self.num_prompt + guide.num_read :])
        return guide

    def can_sample(self) -> bool:
        """True if it is known which tokens may come next, unless one is unread."""
        guide = self.feed_guide()
        return guide is None or guide.is_ready

    @property
    def has_run(self) -> bool:
        """True if it was admitted before; if it waits, it was preempted."""
        return self.prefill_end > 0

    @property
    def is_finished(self) -> bool:
        """True after its last token, or its abort."""
        return self.state is RequestState.FINISHED


class StatePlan(NamedTuple):
    """The plan for a sequence's recurrent state in a step."""

    restore: int | None  # id of the snapshot that the chunk begins with; None: its own, or nothing
    keeps: tuple[tuple[int, int], ...]  # (position, id): snapshots to take there


GUESS = -1  # in place of a drafted token that is guessed on the device, and no token


class Chunk(NamedTuple):
    """One request's tokens in one step: positions start .. start + length.

    `page_table` is the request's table when the step was planned. The request's own may grow later,
    and hold other pages with the same content. A table that did not grow is the same object as in
    the step before.
    `samples`: the chunk ends at the last known token, so that the step yields a new one.
    `is_lazy`: the chunk's one token is still being sampled by the step before.
    `state`: None where the model has no recurrent state, or nothing is to be done about it.
    `draft`: guesses at the tokens after the one known token at `start`; the chunk computes them as
    well, and samples after each of its 1 + len(draft) rows. All are GUESS in a draft that the device makes.
    `window_table`: that of layers with a window, if they have a pool of their own.
    """

    request: LiveRequest
    start: int
    length: int
    page_table: PageTable
    samples: bool
    is_lazy: bool = False
    state: StatePlan | None = None
    draft: tuple[int, ...] = ()
    window_table: PageTable | None = None

    # By identity: comparing tables would take time in proportion to the context.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def end(self) -> int:
        """Position after the last one."""
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, and of the best alternatives to it."""

    token_id: int
    logprob: float  # natural logarithm
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class Sampled:
    """The result of a chunk that samples, once its step is read.

    `more`: sampled after each token of the chunk's draft, whether that token is right or not.
    `guesses`: tokens of a draft that the device made; GUESS where it could not.
    """

    token_id: int
    logprob: TokenLogprob | None = None
    more: tuple[Sampled, ...] = ()
    guesses: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """Counts of drafted tokens for an answer so far.

    accepted_at: accepted tokens by their position in drafts, as many as positions that had any
    """

    num_drafted: int
    num_accepted: int
    accepted_at: tuple[int, ...] = ()


class Output(NamedTuple):
    """The output of one request in one step: a token. Accepted drafts are further outputs."""

    request_id: str
    token_ids: tuple[int, ...]  # the new token; empty for an abort
    finish_reason: FinishReason | None = None
    num_prompt: int = 0
    num_cached: int = 0
    cache: CacheReport | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    num_outputs: int = 0  # so far, including these
    speculation: SpeculationReport | None = None  # None where there are no drafts
