"""Admission: which of the waiting requests start in this step, each only if there are pages for it.

`_decide` judges one request and changes nothing. `choose` parks and counts by these verdicts, and yields the
requests that the planner starts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import islice

from mlxserve.cache.kinds.kind import EndKind
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.stats import SchedulerStats
from mlxserve.request import LiveRequest, Request
from mlxserve.scheduler.limit import Limit, LimitReason, limit
from mlxserve.scheduler.page_tables import PageTables, Reading
from mlxserve.scheduler.prefix_cache import Tail
from mlxserve.scheduler.roster import Roster
from mlxserve.scheduler.step import Step

MAX_PASSED = 3  # requests without memory passed over in a step; bounds its time when they are long
MAX_CANDIDATES = 16  # waiting requests looked at in one step; bounds its time when they are long
# Tokens of followers that are parked in one step. A follower is looked at once, not in every step, so it is no
# candidate; but all its tokens are hashed, a million of them in about 30 ms.
MAX_PARKED_TOKENS = 1 << 20


class Verdict(Enum):
    """The decision about a waiting request in one step."""

    START = auto()
    FOLLOW = auto()  # others are computing its next pages: it is parked beside the queue
    PASS = auto()  # it lacks memory, and later ones may overtake it
    DEFER = auto()  # the rest of the budget ends before the next page boundary
    SKIP = auto()  # its guide has not computed the mask of its first token yet
    STOP = auto()  # neither it nor a later one starts in this step


@dataclass(frozen=True, slots=True)
class Candidate:
    """A waiting request, the verdict about it, and what it would begin with."""

    request: LiveRequest
    verdict: Verdict
    cached: Sequence[int] = ()  # cached pages, from its first page on
    reading: Reading | None = None  # what it reads from disk before it computes
    tail: Tail | None = None  # the page that it copies after these
    share: Limit | None = None  # None if it reads from disk first
    awaited: bytes | None = None  # hash of the last page that others are computing


@dataclass(slots=True)
class Supply:
    """The units that waiting requests may have in a step.

    num_pages: full pages that are free and not reserved
    num_reserved: reserved units of each other kind, whether they are free or not
    """

    num_pages: int
    num_reserved: dict[EndKind, int]

    def reserve(self, request: LiveRequest) -> None:
        """Reserve units of the other kinds for a request that has just started."""
        for end in self.num_reserved:
            self.num_reserved[end] += end.room.num_reserved([request])


class Admission:
    """Chooses the waiting requests that start, in their order."""

    def __init__(
        self, config: SchedulerConfig, tables: PageTables, roster: Roster, stats: SchedulerStats
    ) -> None:
        self.max_running = config.max_num_seqs  # lowered by `Scheduler.limit_running`
        self.starved: LiveRequest | None = None  # the first that lacked memory in the last plan
        self._config = config
        self._tables = tables
        self._pool = tables.pool
        self._roster = roster
        self._stats = stats

    def choose(self, step: Step, now: int, first: LiveRequest | None = None) -> Iterator[Candidate]:
        """Yield the requests that start in step number `now`; start each one before the next is chosen.

        If `first` cannot start yet, no other request does: others were preempted for it.

        The rest of running prompts is reserved: a mere check of free pages admits two long prompts
        together that then preempt each other (P2 in vllm#37307).
        """
        self.starved = None
        if not self._has_place(step):
            return
        supply = self._supply()
        self._stats.pages_reserved = self._pool.num_free - supply.num_pages
        passed: list[LiveRequest] = []
        num_looks = num_parked_tokens = 0
        for request in self._in_order(now, first):
            is_full = num_looks == MAX_CANDIDATES or not self._has_place(step)
            if is_full or (passed and not self._may_overtake(request, passed)):
                return
            candidate = self._decide(request, step, supply, is_overtaking=bool(passed))
            if candidate.awaited is not None:
                self._park(request, candidate.awaited)
                num_parked_tokens += len(request.token_ids)
                num_looks += num_parked_tokens > MAX_PARKED_TOKENS
                continue
            num_looks += 1
            self._roster.followers.stay(request)
            match candidate.verdict:
                case Verdict.START:
                    supply.num_pages -= self._num_taken(candidate)
                    yield candidate
                    supply.reserve(request)
                    self.count_overtaken(passed)
                case Verdict.PASS:
                    passed.append(request)
                    self.starved = passed[0]
                case Verdict.DEFER:
                    self.count_deferral(request)
                case Verdict.STOP:
                    return
            if request is first and candidate.verdict is not Verdict.START:
                return

    def _supply(self) -> Supply:
        """Return the supply as of now, in time proportional to the running requests: once a plan."""
        running = self._roster.running.values()
        return Supply(
            self._pool.num_free - self.num_reserved(),
            {end: end.room.num_reserved(running) for end in self._tables.ends},
        )

    def num_found(self, asked: Request) -> int:
        """Return the number of leading tokens of a prompt whose pages are in memory or on disk now."""
        request, tables = LiveRequest(asked), self._tables
        tables.cache.share_hashes(request)
        num_pages = len(tables.cache.match(request))
        if (reading := tables.reading(request, num_pages)) is not None:
            num_pages = reading.reach
        tables.cache.forget(request)
        return num_pages * self._pool.page_size

    def _in_order(self, now: int, first: LiveRequest | None) -> Iterator[LiveRequest]:
        if first is not None:
            yield first
        yield from (each for each in self._roster.waiting.in_order(now) if each is not first)

    def _decide(
        self, request: LiveRequest, step: Step, supply: Supply, *, is_overtaking: bool
    ) -> Candidate:
        cache = self._tables.cache
        cached = cache.match(request)
        missing = cache.matchable(request, len(cached)) if cache.serves(request) else []
        awaited = self._roster.followers.awaited(request, missing)
        if awaited is not None:
            return Candidate(request, Verdict.FOLLOW, awaited=awaited)
        if is_overtaking and not self._is_short(request, len(cached)):
            return Candidate(request, Verdict.STOP)
        if self._lacks_memory(request, cached, supply):
            return Candidate(request, Verdict.PASS)
        reading = self._tables.reading(request, len(cached))
        if reading is not None and self._can_read(supply):
            found = cache.known(request)[: reading.reach]
            return Candidate(request, Verdict.START, found, reading)
        tail = self._tail(request, cached, supply.num_pages)
        start = len(cached) * self._pool.page_size + (tail.num_tokens if tail else 0)
        share = self._first_share(request, start, step, supply)
        verdict = self._verdict(request, start, share)
        return Candidate(request, verdict, cached, None, tail, share)

    @staticmethod
    def _verdict(request: LiveRequest, start: int, share: Limit) -> Verdict:
        if share.reason is LimitReason.ALIGNMENT:
            return Verdict.DEFER
        if share.reason is not None:
            return Verdict.STOP
        is_whole = start + share.num_tokens >= len(request.token_ids)
        return Verdict.SKIP if is_whole and not request.can_sample() else Verdict.START

    def _park(self, request: LiveRequest, awaited: bytes) -> None:
        self._roster.park(request, awaited)
        if not self._tables.ends:
            return
        leader = self._roster.followers.leader_of(awaited)
        num_pages = request.page_hashes.index(awaited) + 1
        for end in self._tables.ends:
            end.expect(leader, num_pages)

    def _num_taken(self, candidate: Candidate) -> int:
        """Return the free pages that a request takes at its start, with the source of its tail."""
        taken = self._num_needed(candidate.request, candidate.cached)
        return taken + (self._pool.num_idle([candidate.tail.page]) if candidate.tail else 0)

    def count_overtaken(self, passed: Sequence[LiveRequest]) -> None:
        """Count that a request has started before these, which lack memory."""
        for other in passed:
            other.num_overtaken += 1
        self._stats.overtakes += len(passed)

    def count_deferral(self, request: LiveRequest) -> None:
        """Count that the step has less than a page left for a request, once until it is computed."""
        self._stats.align_deferrals += not request.is_deferred
        request.is_deferred = True

    def passed_by_fork(self, fork: LiveRequest, now: int) -> list[LiveRequest] | None:
        """Return the requests that a fork would overtake if it started now; None if it may not start.

        A fork needs no verdict, but like any other request it takes no reserved page, and overtakes only
        requests that may be overtaken.
        """
        if len(self._roster.running) >= self.max_running:
            return None
        supply = self._supply()
        if supply.num_pages <= 0:
            return None
        passed = [
            other
            for other in islice(self._roster.waiting.before(fork, now), MAX_PASSED + 1)
            if self._lacks_memory(other, self._tables.cache.match(other), supply)
        ]
        return passed if not passed or self._may_overtake(fork, passed) else None

    def _has_place(self, step: Step) -> bool:
        roster = self._roster
        return (
            len(roster.waiting) > 0 and step.budget > 0 and len(roster.running) < self.max_running
        )

    def _may_overtake(self, request: LiveRequest, passed: Sequence[LiveRequest]) -> bool:
        return (
            len(passed) <= MAX_PASSED
            and passed[0].asked.priority == request.asked.priority
            and all(other.num_overtaken < self._config.max_overtakes for other in passed)
        )

    def _is_short(self, request: LiveRequest, num_cached_pages: int) -> bool:
        num_uncached = len(request.token_ids) - num_cached_pages * self._pool.page_size
        return num_uncached <= (
            self._config.long_prefill_token_threshold or self._config.step_budget
        )

    def num_reserved(self) -> int:
        """Return the pages that running requests will need for their prompts, and to grow after a preemption.

        Growth by the 75th percentile of past answers gained nothing over `growth_pages` = 2. Five
        paired seeds, 48 chats in 1,024 pages: makespan +16 ± 11 s of 1,252, TTFT p95 +1.5 ± 2.1 s
        of 93, preemptions 12 instead of 8; no reserve at all: 36 preemptions, five times the
        tokens computed again.
        """
        running: Collection[LiveRequest] = self._roster.running.values()
        growth = self._config.growth_pages * len(running) if self._stats.num_preemptions else 0
        return growth + sum(map(self.reserved_for, running))

    def reserved_for(self, request: LiveRequest) -> int:
        """Return the pages that a running request will still need for its prompt."""
        return max(0, -(-request.prefill_end // self._pool.page_size) - len(request.page_table))

    def num_lacking(self, request: LiveRequest, cached: Sequence[int]) -> int:
        """Return how many pages the request lacks; 0 or less if there are enough."""
        return self._num_needed(request, cached) - (self._pool.num_free - self.num_reserved())

    def _lacks_memory(self, request: LiveRequest, cached: Sequence[int], supply: Supply) -> bool:
        # Most requests would fit even with nothing cached: the exact count comes last.
        if self._num_pages(request) > supply.num_pages < self._num_needed(request, cached):
            return True
        num_cached = len(cached)
        for end, num_reserved in supply.num_reserved.items():
            if end.room.num_lacking(request, num_cached, num_reserved) > 0:
                return True
        return False

    @staticmethod
    def _can_read(supply: Supply) -> bool:
        """Return True if every other kind has room for the units read after pages from disk."""
        return all(end.room.can_read(number) for end, number in supply.num_reserved.items())

    def lacking(self, request: LiveRequest, cached: Sequence[int]) -> dict[EndKind, int]:
        """Return how many units of each other kind the request lacks."""
        running, num_cached = self._roster.running.values(), len(cached)
        return {
            end: end.room.num_lacking(request, num_cached, end.room.num_reserved(running))
            for end in self._tables.ends
        }

    def _num_pages(self, request: LiveRequest) -> int:
        return -(-len(request.token_ids) // self._pool.page_size)

    def _num_needed(self, request: LiveRequest, cached: Sequence[int]) -> int:
        """Return how many free pages a request takes, including free ones among its cached pages."""
        needed = self._num_pages(request) - len(cached)
        needed += self._pool.num_idle(cached)
        return needed

    def _tail(self, request: LiveRequest, cached: Sequence[int], available: int) -> Tail | None:
        """Return the tail that a request can copy: the source is held until then, so it must be spare."""
        tail = self._tables.cache.tail(request, cached)
        if tail is None:
            return None
        spare = available - self._num_needed(request, cached)
        return tail if self._pool.num_idle([tail.page]) <= spare else None

    def _first_share(self, request: LiveRequest, start: int, step: Step, supply: Supply) -> Limit:
        end, budget, page_size = len(request.token_ids), step.budget_at(start), self._pool.page_size
        most = step.left
        # The other kinds need not have units for the whole prompt.
        for kind, number in supply.num_reserved.items():
            num_pages = kind.room.num_growable_from(request, start // page_size, number)
            budget = min(budget, num_pages * page_size)
            most = min(most, num_pages * page_size)
        return limit(start, end, end, budget, step.ctx, request.asked.blocks, most)
