"""docs/one-step.md is true: its Python plans what the scheduler plans, step by step."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

from mlxserve.cache.hashing import extend_hashes, root
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.stats import SchedulerStats
from mlxserve.request import Chunk, LiveRequest, Request, Sampled
from mlxserve.scheduler.scheduler import Scheduler

PAGE = Path(__file__).parents[2] / "docs" / "one-step.md"
MAX_MODEL_LEN = 96
SHARED = list(range(100, 148))
# Of what the page describes, and a run must have come to.
COUNTERS = (
    "align_deferrals",
    "immune_requests",
    "num_preemptions",
    "overtakes",
    "prefix_follow_waits",
    "prefix_hits",
    "rebound_pages",
    "recomputed_tokens",
    "tail_copies",
)


def code_of_the_page() -> str:
    [block] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


def page_of(config: SchedulerConfig, pages: Pages) -> Any:
    """What the page defines, with pages and a device."""
    namespace: dict[str, Any] = {}
    exec(compile(code_of_the_page(), str(PAGE), "exec"), namespace)
    return namespace["Steps"](config, pages, device)


@dataclass(eq=False)
class Req:
    """A request as the page describes it."""

    id: str
    arrival: int
    tokens: list[int]
    limit: int
    priority: int
    computed: int = 0
    prefill_end: int = 0
    table: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    in_flight: int = 0
    num_preempted: int = 0
    num_overtaken: int = 0
    awaits: bytes | None = (
        None  # hash of the page that it waits for, which another request computes
    )
    is_woken: bool = False  # that page was published, or given up
    has_ended: bool = False

    @property
    def is_parked(self) -> bool:
        return self.awaits is not None


class Found(NamedTuple):
    cached: list[int]
    source: list[int]  # the last page of a prompt that is cached whole: copied, to be written to
    num_tokens: int
    num_pages: int


class Pages:
    """The page's `pages`, over a pool of its own."""

    def __init__(self, pool: PagePool, min_led: int) -> None:
        self.pool, self.size, self._min_led = pool, pool.page_size, min_led
        self._requests: list[Req] = []
        self._leaders: dict[
            bytes, Req
        ] = {}  # page hash -> the running request that will compute it
        self._sources: list[int] = []  # of copies that are made before the next launch
        self._unused: list[int] = []  # duplicates of published pages that an unread step may read

    def add(self, request: Req) -> None:
        self._requests.append(request)

    @property
    def free(self) -> int:
        return self.pool.num_free

    def _hashes(self, r: Req) -> list[bytes]:
        """Of its full pages; extended in place, as tokens are only added."""
        extend_hashes(r.hashes, r.tokens, self.size)
        return r.hashes

    def find(self, r: Req, available: int) -> Found:
        hashes = self._hashes(r)
        cached = self.pool.index.match(hashes[: (len(r.tokens) - 1) // self.size], r.tokens)
        num_pages = -(-len(r.tokens) // self.size) - len(cached) + self.pool.num_idle(cached)
        source: list[int] = []
        if len(r.tokens) == (len(cached) + 1) * self.size:
            source = self.pool.index.match(hashes, r.tokens, skip=len(cached))
        if num_pages + self.pool.num_idle(source) > available:
            source = []
        num_tokens = len(cached) * self.size + len(source) * (self.size - 1)
        return Found(cached, source, num_tokens, num_pages + self.pool.num_idle(source))

    def follow(self, r: Req, found: Found) -> bool:
        missing = self._hashes(r)[len(found.cached) : (len(r.tokens) - 1) // self.size]
        led = list(takewhile(self._leaders.__contains__, missing))
        if len(led) >= (1 if r.is_woken else self._min_led):
            r.awaits = led[-1]
        r.is_woken = False
        return r.is_parked

    def start(self, r: Req, found: Found) -> None:
        for hash_ in self._hashes(r)[len(found.cached) :]:
            self._leaders.setdefault(hash_, r)
        self.pool.retain([*found.cached, *found.source])
        r.table = found.cached
        self._sources += found.source

    def grow(self, r: Req, end: int) -> bool:
        missing = -(-end // self.size) - len(r.table)
        if missing <= 0:
            return True
        pages = self.pool.allocate(missing, r.table[-1] if r.table else None)
        r.table = r.table + (pages or [])
        return pages is not None

    def own(self, r: Req) -> int:
        return sum(map(self.pool.is_exclusive, r.table))

    def shared(self, r: Req) -> int:
        kept = takewhile(lambda page: not self.pool.is_exclusive(page), r.table)
        return self.size * sum(1 for _ in kept)

    def publish(self, r: Req, first: int, end: int) -> None:
        hashes = self._hashes(r)
        for index in range(first // self.size, end // self.size):
            page, parent = r.table[index], hashes[index - 1] if index else root(b"")
            tokens = r.tokens[index * self.size : (index + 1) * self.size]
            if not self.pool.publish(page, hashes[index], parent, tokens):
                self._unused.append(page)
                r.table = [*r.table[:index], self.pool.adopt(hashes[index]), *r.table[index + 1 :]]
            self._end_lead(hashes[index])

    def release(self, r: Req) -> None:
        for hash_ in [hash_ for hash_, leader in self._leaders.items() if leader is r]:
            self._end_lead(hash_)
        if not r.in_flight:
            self.pool.release(r.table)
            r.table = []

    def _end_lead(self, hash_: bytes) -> None:
        self._leaders.pop(hash_, None)
        for r in self._requests:
            if r.awaits == hash_:
                r.awaits, r.is_woken = None, True

    def copy(self) -> None:
        self.pool.release(self._sources)
        self._sources = []

    def settle(self) -> None:
        self.pool.release(self._unused)
        self._unused = []


class Twins:
    """The scheduler, and the page's code with a pool of its own; both get the same calls."""

    def __init__(self, num_pages: int, **options: Any) -> None:
        config = SchedulerConfig(max_model_len=MAX_MODEL_LEN, **options)
        self.scheduler = Scheduler(config, PagePool(num_pages, 4))
        self.pages = Pages(PagePool(num_pages, 4), config.prefix_follow_pages)
        self.page = page_of(config, self.pages)
        self.pairs: list[tuple[LiveRequest, Req]] = []
        self.unread: list[Chunk] = []

    def add(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        name = f"r{len(self.pairs)}"
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        asked = Request(id=name, token_ids=list(prompt), params=params, priority=priority)
        live = self.scheduler.add(asked)
        mine = Req(name, live.arrival, list(prompt), live.length_limit, priority)
        self.pairs.append((live, mine))
        self.pages.add(mine)
        self.page.waiting.append(mine)

    def step(self, prompt_budget: int | None) -> None:
        """As `Engine.step` does, and compare."""
        if self.unread and self.scheduler.must_read():
            self._read()
        chunks = self.scheduler.schedule(prompt_budget)
        self.scheduler.moves.pop_copies()
        self._read()
        self.unread = chunks
        mine = self.page.step(prompt_budget)
        assert [(c.request.id, c.start, c.length) for c in chunks] == [
            (r.id, start, length) for r, start, length in mine
        ]
        self._compare()

    def _read(self) -> None:
        sampled = [
            Sampled(token_at(c.request.id, c.end)) if c.samples else None for c in self.unread
        ]
        self.scheduler.update(self.unread, sampled)
        self.unread = []

    def _compare(self) -> None:
        assert list(self.scheduler.roster.running) == [r.id for r in self.page.running]
        for live, mine in self.pairs:
            assert list(live.token_ids) == mine.tokens
            assert live.num_preemptions == mine.num_preempted
            assert (live.num_computed, list(live.page_table)) == (mine.computed, mine.table)
            assert live.num_overtaken == mine.num_overtaken
            assert live.is_finished == mine.has_ended
        assert self.scheduler.pool.order.first() == self.pages.pool.order.first()


def device(chunks: list[tuple[Req, int, int]]) -> list[int]:
    return [token_at(r.id, start + num_tokens) for r, start, num_tokens in chunks]


def token_at(name: str, end: int) -> int:
    """The same in every run of Python."""
    return crc32(f"{name} {end}".encode()) % 11


def run(seed: int) -> SchedulerStats:
    """Random traffic and then none; the counters of the scheduler at the end."""
    draw = random.Random(seed)
    twins = Twins(
        num_pages=draw.choice([24, 24, 30, 90]),
        max_num_seqs=draw.choice([2, 8, 12]),
        max_num_batched_tokens=draw.choice([18, 33, 64]),
        long_prefill_token_threshold=draw.choice([8, 512]),
        growth_pages=draw.choice([0, 2]),
        immune_after_preemptions=draw.choice([1, 3]),
        max_overtakes=draw.choice([1, 3]),
    )
    crowd, longest = draw.choice([2, 24]), draw.choice([9, 80])
    for number in range(160):
        for _ in range(draw.choice([0, 0, 0, 1, 1, crowd]) if number < 40 else 0):
            shared = SHARED[: draw.choice([0, 0, 4, 12, 20, 32, 48])]
            own = draw.choices(range(3), k=draw.choice([0, 1, 3, 4, 8, 21]))
            max_tokens, priority = draw.choice([1, 9, longest]), draw.choice([0, 0, 0, 1])
            twins.add(shared + own or [7], max_tokens, priority)
        twins.step(draw.choice([None, None, 1, 8]))
    return twins.scheduler.stats()


def test_the_page_plans_what_the_scheduler_plans() -> None:
    runs = [run(seed) for seed in range(30)]
    for counter in COUNTERS:
        assert sum(getattr(stats, counter) for stats in runs) > 20, f"{counter}: hardly reached"
