"""Every request gets the answer it would get alone, at any size of cache, chunks and pages.

The ghost engine compares each token as it is read; here the configurations are compared.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxserve.core.config import BudgetMode, PageTail
from mlxserve.request import LiveRequest, RequestState

MAX_MODEL_LEN = 64
SHARED = [n % 7 for n in range(30)]


def prompts(seed: int, count: int = 8) -> list[list[int]]:
    """About half of them begin with parts of one shared prefix."""
    draw = random.Random(seed)
    return [
        SHARED[: draw.choice([0, 0, 9, 16, 30])] + draw.choices(range(11), k=draw.randrange(1, 20))
        for _ in range(count)
    ]


def answers(engine: object, seed: int) -> dict[str, list[int]]:
    for index, prompt in enumerate(prompts(seed)):
        engine.add(prompt, max_tokens=4 + index, ignore_eos=index % 2 == 0)
    engine.drain()
    return engine.answers


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_answers_do_not_depend_on_cache_chunks_pages_or_preemptions(
    make_engine: Callable, seed: int
) -> None:
    alone = answers(make_engine(num_pages=400, max_model_len=MAX_MODEL_LEN, max_num_seqs=1), seed)
    preemptions = 0
    for cached, aligned, budget, num_pages, page_size in itertools.product(
        (True, False), (True, False), (8, 21, 512), (16, 400), (4, 8)
    ):
        engine = make_engine(
            num_pages=num_pages * 4 // page_size,
            page_size=page_size,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget,
            enable_prefix_caching=cached,
            page_aligned_scheduling=aligned,
            long_prefill_token_threshold=8,
        )
        assert answers(engine, seed) == alone
        preemptions += engine.scheduler.stats().num_preemptions
    assert preemptions > 0, "no pool was small enough to tell anything"


@pytest.mark.parametrize("seed", range(4))
def test_the_cache_saves_computing(make_engine: Callable, seed: int) -> None:
    computed = {}
    for cached in (True, False):
        engine = make_engine(num_pages=400, enable_prefix_caching=cached, max_num_seqs=1)
        answers(engine, seed)
        computed[cached] = engine.num_computed
    assert computed[True] < computed[False]


events = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 7)),
        st.tuples(st.just("step"), st.integers(1, 3)),
        st.tuples(st.just("abort"), st.integers(0, 7)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(events=events, num_pages=st.integers(16, 40))
def test_the_plan_is_a_function_of_the_calls_made_so_far(
    events: list, num_pages: int, make_engine: Callable
) -> None:
    traces = []
    for _ in range(2):
        engine = make_engine(num_pages=num_pages, max_num_batched_tokens=16)
        for what, number in events:
            if what == "add":
                engine.add(prompts(1)[number], max_tokens=9)
            elif what == "abort":
                engine.abort(f"r{number}")
            else:
                for _ in range(number):
                    engine.step()
        engine.drain()
        traces.append(engine.trace)
    assert traces[0] == traces[1]


# ---- D4: the plan is the one of a scheduler that looks at everything, every time


class Slow:
    """Plans by looking at all requests and pages anew in every step.

    No hashes, no matches remembered, no queues, no index: a page is a hit if what the ghost engine
    wrote to it is what the prompt says. Without classes of clients, forks, pins, the disk and runs
    long enough to wait for, all of which the ghost engine judges.
    """

    def __init__(self, engine: SimpleNamespace) -> None:
        self.engine, self.pool = engine, engine.scheduler.pool
        self.config, self.size = engine.scheduler.config, engine.scheduler.pool.page_size

    def plan(self) -> list[tuple[str, int, int]] | None:
        """None where a request has to be preempted."""
        scheduler, pool = self.engine.scheduler, self.pool
        self.order = pool.order.first()
        self.held = {page for page in range(pool.num_pages) if pool.ref_count(page)}
        self.blank = pool.num_pages - len(self.held) - len(self.order)
        self.budget, self.chosen = self.config.step_budget, []
        self.live = [r for r in self.engine.requests.values() if r.id not in self.engine.ends]
        running = [r for r in scheduler.requests()[0] if r.state is RequestState.RUNNING]
        self.tables = {r: len(r.page_table) for r in running}
        num_places = self.config.max_num_seqs if self.free else len(running)
        self.num_eligible = min(len(self.live), num_places)
        for request in running:
            start = request.num_computed
            if (
                start >= request.prefill_end
                and start + 1 < scheduler.page_tables.capacity.max_length(request)
            ):
                if self.is_out_of_pages(request):
                    if not self.engine.unread:
                        return None
                    continue
                self.take(request, start, 1, charge=1)
        prefills = [r for r in running if r.num_computed < r.prefill_end]
        for request in sorted(prefills, key=lambda r: (r.asked.priority, r.arrival)):
            if self.is_out_of_pages(request):
                if not self.chosen and not self.engine.unread:
                    return None
                continue
            start = request.num_computed
            room = (self.tables[request] + self.free) * self.size - start
            self.take(request, start, *self.trim(request, start, min(self.budget, room)))
        self.admit(running)
        return self.chosen

    @property
    def free(self) -> int:
        return self.blank + len(self.order)

    def is_out_of_pages(self, request: LiveRequest) -> bool:
        return request.num_computed == self.tables[request] * self.size and not self.free

    def trim(self, request: LiveRequest, start: int, budget: int) -> tuple[int, int]:
        """The most tokens that may be taken, by trying them all; and their charge."""
        is_aligned, known = self.engine.scheduler.rules.is_aligned, len(request.token_ids)
        cap = self.config.step_budget
        if self.num_eligible > 1 and self.config.long_prefill_token_threshold:
            cap = max(self.config.long_prefill_token_threshold, cap // self.num_eligible)
        for n in range(min(budget, cap, known - start), 0, -1):
            if not is_aligned:
                return n, n
            if start + n == known or (start + n) % self.size == 0:
                if self.config.budget_mode is BudgetMode.UNALIGNED:
                    return n, n
                pages = {position // self.size for position in range(start, start + n)}
                return n, min(len(pages) * self.size, budget)
        return 0, 0

    def take(self, request: LiveRequest, start: int, n: int, charge: int) -> None:
        if n:
            self.chosen.append((request.id, start, n))
            self.budget -= charge
            while self.tables[request] * self.size < start + n:
                self.tables[request] += 1
                if self.blank:
                    self.blank -= 1
                else:
                    del self.order[0]

    def hits(self, request: LiveRequest) -> list[int]:
        found: list[int] = []
        while (end := (len(found) + 1) * self.size) < len(request.token_ids):
            wanted = request.asked.cache_salt, self.engine.prefixes[request][end - 1]
            same = [
                page
                for page in (*self.order, *self.held)
                if self.pool.index.hash_of(page) is not None
                and self.engine.slots.get((page + 1) * self.size - 1) == wanted
            ]
            if not same:
                break
            found += same[:1]
        return found

    def admit(self, running: list[LiveRequest]) -> None:
        growth = 2 * len(running) if self.engine.scheduler.stats().num_preemptions else 0
        reserved = growth + sum(
            max(0, -(-r.prefill_end // self.size) - self.tables[r]) for r in running
        )
        available, places = self.free - reserved, self.config.max_num_seqs - len(running)
        waiting = [r for r in self.live if r not in self.tables]
        passed: list[LiveRequest] = []
        times = {r: r.num_overtaken for r in waiting}
        for request in sorted(waiting, key=lambda r: (r.asked.priority, not r.has_run, r.arrival)):
            cached, known = self.hits(request), len(request.token_ids)
            may_pass = len(passed) <= 3 and all(
                other.asked.priority == request.asked.priority
                and times[other] < self.config.max_overtakes
                for other in passed
            )
            short = self.config.long_prefill_token_threshold or self.config.step_budget
            is_short = known - len(cached) * self.size <= short
            if not places or self.budget <= 0 or (passed and not (may_pass and is_short)):
                return
            idle = [page for page in cached if page in self.order]
            needed = -(-known // self.size) - len(cached) + len(idle)
            if needed > available:
                passed.append(request)
                continue
            start = len(cached) * self.size
            n, charge = self.trim(request, start, self.budget)
            if not n:
                continue
            self.order = [page for page in self.order if page not in idle]
            self.held |= set(cached)
            self.tables[request] = len(cached)
            self.take(request, start, n, charge)
            available, places = available - needed, places - 1
            for other in passed:
                times[other] += 1


def judged(make_engine: Callable, seed: int) -> int:
    """Plans that were compared in one random run."""
    draw = random.Random(seed)
    engine = make_engine(
        num_pages=draw.choice([10, 12, 40]),
        max_num_seqs=draw.choice([2, 4, 8]),
        max_num_batched_tokens=draw.choice([8, 13, 32]),
        max_model_len=40,
        long_prefill_token_threshold=draw.choice([0, 4, 8]),
        page_aligned_scheduling=draw.random() < 0.7,
        max_overtakes=draw.choice([0, 1, 3]),
        budget_mode=draw.choice(list(BudgetMode)),
        page_tail=PageTail.RECOMPUTE,
    )
    slow, count = Slow(engine), 0
    for _ in range(60):
        what = draw.random()
        if what < 0.3:
            shared = SHARED[: draw.choice([0, 0, 4, 8, 12])]  # never enough to wait for
            own = draw.choices(range(20, 999), k=draw.choice([1, 1, 4, 5, 20]))
            engine.add(
                [*shared, *own],
                draw.randrange(1, 16),
                salt=draw.choice([b"", b"", b"a"]),
                priority=draw.choice([0, 0, 1]),
            )
        elif what < 0.35 and engine.requests:
            engine.abort(draw.choice(list(engine.requests)))
        elif what < 0.6 and engine.unread:
            engine.read()
        elif len(engine.unread) < 2:
            expected = slow.plan()
            planned = engine.spans(engine.launch())
            assert expected is None or planned == expected
            count += expected is not None
    engine.drain()
    return count


def test_d4_the_plan_is_that_of_a_scheduler_that_looks_at_everything(make_engine: Callable) -> None:
    assert sum(judged(make_engine, seed) for seed in range(40)) > 400
