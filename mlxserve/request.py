"""A request's life as data: what was asked, how far it is, and what came out of a step.

Knows nothing of pages' contents, of arrays or of text. The scheduler is the only one that
changes a `Request`; everything else here is frozen.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto
from typing import NamedTuple, Protocol, TypeAlias

from mlxserve.errors import InvalidParameter

MIN_PAGES, MAX_PAGES = 2, 1 << 24  # of the cache, whatever the memory


class FinishReason(StrEnum):
    """Why a request ended. The values are the OpenAI API's words where it has one."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens, or the end of the context
    TOOL_CALLS = "tool_calls"  # the model ended its turn, having called a tool
    ABORT = "abort"  # the caller went away


class Pooling(StrEnum):
    """How the hidden states of a text's tokens become one vector."""

    MEAN = "mean"
    LAST = "last"  # the last token's, which has seen all others


class RequestState(Enum):
    WAITING = auto()  # holds no pages
    RUNNING = auto()  # has a page table
    FINISHED = auto()


class CacheMiss(StrEnum):
    """Why no more of a prompt was found in the cache."""

    NEW_TEXT = "new_text"  # from some token on, nobody computed it before
    EVICTED = "evicted"  # it was there, but its pages were needed
    OTHER_SALT = "other_salt"  # this client computed it under another cache_salt
    BELOW_ONE_PAGE = "below_one_page"  # what is left does not fill a page, or is the last token
    OFF = "off"  # prefix caching is off


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the cache did for a prompt."""

    num_pages: int  # reused
    num_tokens: int  # in these pages, and in the beginning of one that was copied
    differs_at: int  # position of the first token that was not known
    reason: CacheMiss


class StructureKind(StrEnum):
    JSON_OBJECT = "json_object"  # any
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"  # one of several texts
    GRAMMAR = "grammar"  # Lark's, in llguidance's dialect


@dataclass(frozen=True, slots=True)
class Structure:
    """What the whole text of an answer has to match.

    source: a JSON schema as JSON, a regular expression, a JSON list of texts, or a grammar
    field: what an error calls it
    """

    kind: StructureKind
    source: str = ""
    field: str = "structure"


class Guide(Protocol):
    """Says which tokens may come next in one answer."""

    num_read: int
    error: str | None  # why the answer could not be guided to its end

    def read(self, token_ids: Sequence[int], /) -> None:
        """Tokens that were chosen, in order."""

    @property
    def must_wait(self) -> bool:
        """Whether the token after the next one cannot be chosen before that one is known."""

    def mask(self) -> bytes | None:
        """A bit for each token that may come next, in little-endian words of 32; None for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a request ends. Validated when constructed.

    n: answers to one prompt, which is computed once for all of them
    max_tokens: at most this many new tokens; None: until the model stops or the context is full
    temperature: 0 is greedy
    top_p, top_k, min_p: nucleus, the k best, a floor relative to the best (1, 0 and 0 are off)
    seed: the same seed gives the same tokens whatever else is in the batch; None draws one
    stop: strings that end the answer and are not part of it
    stop_token_ids: tokens that end it
    ignore_eos: keep going past the model's own end (benchmarks)
    repetition_penalty: divides the logits of tokens seen in prompt or answer (CTRL; 1 is off)
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens of the answer
    logit_bias: added to the logits of these token ids
    logprobs: None, or how many of the best alternatives to report beside each chosen token's own
    structure: what the text of the answer has to match, behind any thinking

    Raises InvalidParameter.
    """

    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    structure: Structure | None = None

    MAX_LOGPROBS = 20
    MAX_STOP_STRINGS = 16
    MAX_CHOICES = 128

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _whole(self.n, "n", 1, self.MAX_CHOICES)
        if self.max_tokens is not None:
            _whole(self.max_tokens, "max_tokens", 1, None)
        _number(self.temperature, "temperature", 0.0, 100.0)
        _number(self.top_p, "top_p", 0.0, 1.0)
        if self.top_p == 0:
            raise InvalidParameter(
                "top_p", "must be above 0; use temperature=0 for greedy decoding"
            )
        _whole(self.top_k, "top_k", 0, None)
        _number(self.min_p, "min_p", 0.0, 1.0)
        if self.seed is not None:
            _whole(self.seed, "seed", -(2**63), 2**64 - 1)
        _strings(self.stop, "stop", self.MAX_STOP_STRINGS)
        _whole_all(self.stop_token_ids, "stop_token_ids")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidParameter("ignore_eos", f"must be True or False, got {self.ignore_eos!r}")
        _number(self.repetition_penalty, "repetition_penalty", 0.01, 100.0)
        _number(self.presence_penalty, "presence_penalty", -100.0, 100.0)
        _number(self.frequency_penalty, "frequency_penalty", -100.0, 100.0)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidParameter(
                "logit_bias", f"must be numbers by token id, got {self.logit_bias!r}"
            )
        _whole_all(self.logit_bias, "logit_bias")
        for bias in self.logit_bias.values():
            _number(bias, "logit_bias", -1e4, 1e4)
        if self.logprobs is not None:
            _whole(self.logprobs, "logprobs", 0, self.MAX_LOGPROBS)
        if not isinstance(self.structure, Structure | None):
            raise InvalidParameter("structure", f"must be a Structure, got {self.structure!r:.80}")
        if self.structure is not None and self.ignore_eos:
            raise InvalidParameter("ignore_eos", "goes on behind the end, which a structure has")

    def choices(self) -> list[SamplingParams]:
        """Those of each of the n answers alone; a seed gives each its own, and always the same."""
        if self.seed is None:
            return [replace(self, n=1)] * self.n
        seeds = (self.seed + number for number in range(self.n))
        return [replace(self, n=1, seed=s if s < 2**64 else s - 2**64) for s in seeds]


# Ids of pages. An array and no tuple, as it is copied whenever it grows: with 100,000 tokens of
# context a tuple's copy counts references to 3,000 numbers all over memory, and is scanned for
# garbage, which together was half of the scheduler's time.
PageTable: TypeAlias = "array[int]"
# A list of 100,000 tokens takes 8 to 36 bytes for each, and the garbage collector looks at them all:
# with 256 such contexts it stopped everything for 0.3 s.
TokenIds: TypeAlias = "array[int]"


def as_token_ids(token_ids: Iterable[int] = ()) -> TokenIds:
    return array("i", token_ids)


def as_page_table(pages: Iterable[int] = ()) -> PageTable:
    return array("i", pages)


@dataclass(frozen=True, slots=True)
class Resized:
    """What has become of the cache when it got another number of pages."""

    num_pages: int
    max_model_len: int  # longest prompt plus answer from now on, where no prefix is pinned
    num_preempted: int  # requests that gave their pages back, and start again later
    num_forgotten: int  # cached pages
    moves: Mapping[int, int]  # page -> where to it has moved


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of one request that are kept outside of the pool."""

    key: str
    first: int  # index in the request's page table
    hashes: tuple[bytes, ...]

    @property
    def end(self) -> int:
        return self.first + len(self.hashes)


@dataclass(eq=False, slots=True)
class Request:
    """One prompt on its way to an answer. Identity is the object.

        token_ids   [ prompt ............ | outputs ...... ] (+ one sampled, not yet read)
        num_computed ------------------>| KV exists, or is being computed by a launched step
        page_table  [ page | page | ... ]   covers num_computed tokens

    `num_in_flight` counts steps that were launched and not yet read; while it is above 0 the
    request's pages stay its own, whatever else happens to it. `page_table` is replaced when it
    grows, never changed, so that a chunk keeps the one it was planned with.
    """

    id: str
    token_ids: MutableSequence[int]  # whatever is given, it becomes TokenIds
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()  # end-of-sequence and stop tokens
    cache_salt: bytes = b""  # pages are shared only within one salt
    client: str = ""  # whose request it is: clients share the engine fairly
    priority: int = 0  # lower goes first
    pins: bool = False  # the prompt is a prefix: its pages stay after the request's end
    fork_of: Request | None = None  # has the same prompt, and computes it for this one too
    guide: Guide | None = None  # limits what may come next
    arrival: int = 0  # order of arrival, set by the scheduler
    queued_at: int = 0  # the number of the step before which it arrived
    num_prompt: int = field(init=False)
    num_computed: int = 0
    num_cached: int = 0  # tokens of the prompt found in the cache at first admission, or copied
    cache: CacheReport | None = None  # of the first admission
    num_in_flight: int = 0
    num_preemptions: int = 0
    num_overtaken: int = 0  # admissions of later requests while this one lacked memory
    num_lost: int = 0  # computed tokens that the last preemption gave up
    capacity: int = 0  # known tokens for which there is a place, set by the scheduler
    full_at: int = 0  # known tokens with which it ends for want of place or of max_tokens
    steady_until: int = 0  # decodes from before this position on need nothing but their token
    ends_on: frozenset[int] = field(init=False)  # tokens that end it
    prefill_end: int = 0  # known tokens at the last admission; from there on it decodes
    page_table: PageTable = field(default_factory=as_page_table)
    saved: PageRun | None = None  # pages of it that are on disk
    loading: PageRun | None = None  # those that are being read into its page table
    page_hashes: list[bytes] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.token_ids, array):
            self.token_ids = as_token_ids(self.token_ids)
        self.num_prompt = len(self.token_ids)
        # What the caller named ends it even where the model's own end does not.
        own = frozenset() if self.params.ignore_eos else self.stop_ids
        self.ends_on = own | frozenset(self.params.stop_token_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def guided(self) -> Guide | None:
        """Its guide, which then knows every token that was read."""
        if self.guide is not None:
            self.guide.read(self.token_ids[self.num_prompt + self.guide.num_read :])
        return self.guide

    @property
    def has_run(self) -> bool:
        """Whether it was admitted before; if it waits, it was preempted."""
        return self.prefill_end > 0

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED


class Chunk(NamedTuple):
    """One request's tokens in one step: positions start .. start + length.

    `page_table` is the table as it was when the step was planned. Later it may have grown, and
    hold other pages with the same content.
    `samples` is true when the chunk ends at the last known token, so that the step yields a
    new one. `is_lazy`: the chunk's one token is still being sampled by the step before. A table
    that did not grow is the same object as in the step before.
    """

    request: Request
    start: int
    length: int
    page_table: PageTable
    samples: bool
    is_lazy: bool = False

    # Its identity, as that of its table would cost time by the length of the context.
    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log-probability of one token, and of the best alternatives at its place."""

    token_id: int
    logprob: float  # natural logarithm
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one chunk that samples yields when its step is read."""

    token_id: int
    logprob: TokenLogprob | None = None


class Output(NamedTuple):
    """What one request got from one step."""

    request_id: str
    token_ids: tuple[int, ...]  # new in this step; empty for a bare end
    finish_reason: FinishReason | None = None
    num_prompt: int = 0
    num_cached: int = 0
    cache: CacheReport | None = None
    logprobs: tuple[TokenLogprob, ...] = ()


def _whole(value: object, name: str, low: int | None, high: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidParameter(name, f"must be a whole number, got {value!r}")
    if (low is not None and value < low) or (high is not None and value > high):
        raise InvalidParameter(name, f"must be {_range(low, high)}, got {value}")


def _whole_all(values: object, name: str) -> None:
    if not isinstance(values, (Sequence, Mapping)) or isinstance(values, (str, bytes)):
        raise InvalidParameter(name, f"must be a collection of token ids, got {values!r}")
    for value in values:
        _whole(value, name, 0, 2**31 - 1)


def _number(value: object, name: str, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise InvalidParameter(name, f"must be a finite number, got {value!r}")
    if not low <= value <= high:
        raise InvalidParameter(name, f"must be {_range(low, high)}, got {value}")


def _strings(values: object, name: str, at_most: int) -> None:
    if not isinstance(values, Sequence) or not all(isinstance(v, str) and v for v in values):
        raise InvalidParameter(name, "must be non-empty strings")
    if len(values) > at_most:
        raise InvalidParameter(name, f"at most {at_most} are allowed, got {len(values)}")


def _range(low: float | None, high: float | None) -> str:
    if high is None:
        return f"at least {low}"
    return f"between {low} and {high}"
