"""The scheduler under every order of events, judged by the ghost engine after each of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlxserve.cache.pages import PagePool
from mlxserve.cache.runs import RunSet
from mlxserve.config import BudgetMode, PageTail, PreemptionMode
from mlxserve.errors import InvalidRequest, PrefixQuotaExceeded, PromptTooLong, QueueFull
from mlxserve.request import FinishReason
from mlxserve.scheduler.admission import Admission
from mlxserve.scheduler.capacity import Capacity
from mlxserve.scheduler.copies import Copies
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.prefix_cache import PrefixCache
from mlxserve.scheduler.prefix_followers import PrefixFollowers
from mlxserve.scheduler.resize import Resize
from mlxserve.scheduler.scheduler import Scheduler

PAGE_SIZE = 4
MAX_MODEL_LEN = 48

# Prompts are paths in a small tree of pages, cut anywhere: they share prefixes of every length.
PIECES = ([1] * PAGE_SIZE, [2] * PAGE_SIZE, [1, 2, 3, 4])


def walk(num_pages: int, path: int, cut: int) -> list[int]:
    """`path` has a digit for each page; a list of them would take five times as long to draw."""
    digits = [path // len(PIECES) ** depth % len(PIECES) for depth in range(num_pages)]
    return [token for digit in digits for token in PIECES[digit]][: cut or None]


prompts = st.builds(
    walk,
    st.integers(1, 9),
    st.integers(0, len(PIECES) ** 9 - 1),
    st.integers(-PAGE_SIZE + 1, 0),
)
configurations = st.fixed_dictionaries(
    {
        "num_pages": st.integers(2, 24),
        "max_pinned_fraction": st.sampled_from([0.25, 0.5, 1.0]),
        "max_num_seqs": st.integers(1, 5),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "page_aligned_scheduling": st.booleans(),
        "max_overtakes": st.integers(0, 2),
        "ageing_steps": st.sampled_from([3, 1000]),
        "prefix_follow_pages": st.sampled_from([1, 4]),
        "growth_pages": st.sampled_from([0, 2]),
        "immune_after_preemptions": st.sampled_from([1, 3]),
        "hot_after_hits": st.sampled_from([1, 2]),
        "budget_mode": st.sampled_from(BudgetMode),
        "preemption_mode": st.sampled_from(PreemptionMode),
        "page_tail": st.sampled_from([*PageTail, PageTail.COPY]),
        "long_prefill_token_threshold": st.sampled_from([0, 2, 4, 8]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule ends with an audit, most of them within the engine."""

    def __init__(self, make_engine: Callable) -> None:
        super().__init__()
        self.make_engine = make_engine
        self.now = 0.0

    @initialize(
        options=configurations,
        budget=st.sampled_from([5, 6, 8, 13, 20, 64]),
        is_chunked=st.sampled_from([True, True, False]),
    )
    def build(self, options: dict, budget: int, is_chunked: bool) -> None:
        self.engine = self.make_engine(
            page_size=PAGE_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget if is_chunked else max(budget, MAX_MODEL_LEN),
            enable_chunked_prefill=is_chunked,
            **options,
        )

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        salt=st.sampled_from([b"", b"", b"", b"a"]),
        priority=st.sampled_from([0, 0, 0, 1]),
        client=st.sampled_from(["", "", "a", "b"]),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt: list, max_tokens: int | None, **options: object) -> None:
        prompt = prompt[: self.engine.scheduler.max_model_len - 1]
        try:
            self.engine.add(prompt, max_tokens, **options)
        except PromptTooLong:
            assert self.engine.scheduler.pool.num_pinned or self.engine.prefixes_under_way
        self.engine.audit()

    @rule(prompt=prompts, max_tokens=st.integers(1, 6), n=st.integers(2, 4))
    def fork(self, prompt: list, max_tokens: int, n: int) -> None:
        with suppress(PromptTooLong):
            self.engine.fork(prompt[: self.engine.scheduler.max_model_len - 1], max_tokens, n)
        self.engine.audit()

    @rule(prompt=prompts, salt=st.sampled_from([b"", b"", b"a"]))
    def add_prefix(self, prompt: list, salt: bytes) -> None:
        with suppress(InvalidRequest, QueueFull):
            self.engine.add(prompt, 1, salt=salt, pins=True)
        self.engine.audit()

    @precondition(lambda self: self.engine.pinned)
    @rule(data=st.data())
    def drop_prefix(self, data: st.DataObject) -> None:
        self.engine.unpin(data.draw(st.sampled_from(self.engine.pinned)))

    @rule()
    def turn(self) -> None:
        self.engine.step()

    @rule(turns=st.integers(2, 12))
    def turns(self, turns: int) -> None:
        for _ in range(turns):
            self.engine.step()

    @precondition(lambda self: len(self.engine.unread) < 2)
    @rule(prefill_budget=st.sampled_from([None, None, 0, 6]))
    def launch(self, prefill_budget: int | None) -> None:
        self.engine.launch(prefill_budget)

    @precondition(lambda self: self.engine.unread)
    @rule()
    def read(self) -> None:
        self.engine.read()

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), reason=st.sampled_from([FinishReason.ABORT, FinishReason.STOP]))
    def abort(self, data: st.DataObject, reason: FinishReason) -> None:
        ids = sorted(self.engine.requests.keys() - self.engine.ends.keys())
        self.engine.abort(data.draw(st.sampled_from(ids or sorted(self.engine.requests))), reason)

    @rule()
    def reset_prefix_cache(self) -> None:
        pool = self.engine.scheduler.pool
        was_idle = not any(pool.ref_count(page) for page in range(pool.num_pages))
        assert self.engine.reset() == was_idle
        assert pool.num_cached == pool.num_pinned or not was_idle

    @rule()
    def force_reset(self) -> None:
        assert self.engine.reset(force=True)
        pool = self.engine.scheduler.pool
        assert pool.num_cached == pool.num_used == pool.num_pinned

    @rule(num_pages=st.integers(2, 30), might_preempt=st.booleans())
    def resize(self, num_pages: int, might_preempt: bool) -> None:
        """To any size, or while requests share the pool to one that is too small for them."""
        scheduler = self.engine.scheduler
        if might_preempt and scheduler.stats().num_running > 1:
            num_pages = max(2, scheduler.pool.num_used - num_pages % 5)
        with suppress(QueueFull, PrefixQuotaExceeded):
            self.engine.resize(num_pages)

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data(), seconds=st.integers(1, 3))
    def pause(self, data: st.DataObject, seconds: int) -> None:
        request = data.draw(st.sampled_from(list(self.engine.requests.values())))
        self.engine.scheduler.keep_pages(request.asked, self.now + seconds)
        self.engine.audit()

    @rule(seconds=st.integers(1, 4))
    def pass_time(self, seconds: int) -> None:
        self.now += seconds
        self.engine.scheduler.expire(self.now)
        self.engine.audit()

    @precondition(lambda self: self.engine.loads)
    @rule(data=st.data(), at_most=st.sampled_from([None, None, 0, 1]))
    def finish_load(self, data: st.DataObject, at_most: int | None) -> None:
        self.engine.finish_load(data.draw(st.sampled_from(self.engine.loads)), at_most)

    @rule()
    def drain(self) -> None:
        self.engine.drain()

    def teardown(self) -> None:
        if engine := getattr(self, "engine", None):
            engine.drain()


def run_machine(make_engine: Callable, examples: int, steps: int, **options: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Hypothesis also draws numbers that it finds in the project's loaded modules: with it, what
        # is searched would depend on which other tests were imported before.
        patch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None)
        run_state_machine_as_test(
            partial(SchedulerMachine, make_engine),
            settings=settings(
                max_examples=examples,
                stateful_step_count=steps,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
                report_multiple_bugs=False,
                **{"derandomize": True, **options},
            ),
        )


def test_no_order_of_events_breaks_an_invariant(make_engine: Callable) -> None:
    run_machine(make_engine, examples=100, steps=40)


@pytest.mark.slow
def test_no_order_of_events_breaks_an_invariant_however_long(make_engine: Callable) -> None:
    """With MLXSERVE_MACHINE_EXAMPLES, so many examples that are new in every run."""
    examples = os.environ.get("MLXSERVE_MACHINE_EXAMPLES")
    run_machine(make_engine, int(examples or 2000), steps=60, derandomize=examples is None)


# ---- planted bugs: the judge is worth as much as the mistakes it finds

# Found within a second each; the SLOW ones need a longer search, the same in every run.
BUGS: dict[str, tuple[type, str, str, str]] = {
    "publish before the step is read": (
        Scheduler,
        "schedule",
        "self._num_unread += bool(chunks)",
        "self._num_unread += bool(chunks); [self._cache.publish(chunk) for chunk in chunks]",
    ),
    "release the head first": (PagePool, "release", "reversed(pages)", "pages"),
    "forget the salt": (PrefixCache, "hash", ", request.asked.cache_salt", ""),
    "free pages in flight": (
        Scheduler,
        "_settle",
        "if request.num_in_flight:",
        "self.pool.release(request.page_table); request.page_table = as_page_table()\n    if False:",
    ),
    "never wake the followers": (
        PrefixCache,
        "publish_pages",
        "self._followers.page_published(hash_)",
        "pass",
    ),
    "decode past a certain end": (
        Scheduler,
        "_plan_decode",
        "if start + 1 >= request.full_at:",
        "if start >= request.full_at:",
    ),
    "keep computed tokens over a preemption": (
        PageTables,
        "requeue",
        "request.num_computed = 0",
        "pass",
    ),
    "never tight": (PageTables, "might_preempt", "needed > num_free", "False"),
    "let a decode wait behind a prompt": (
        Scheduler,
        "_plan_decodes",
        "for request in list(self._running.values()):",
        "for request in list(self._running.values())[:1]:",
    ),
    "stay steady beyond the pages": (
        Scheduler,
        "_plan_decode",
        "min(num_slots, request.full_at - 1)",
        "request.full_at - 1",
    ),
    "stay steady over a preemption": (
        Capacity,
        "measure",
        "request.steady_until = 0",
        "pass",
    ),
    "hand out a page twice": (RunSet, "_cut", "if stop < behind:", "if stop <= behind:"),
    "evict what is pinned": (PagePool, "_free", "counts[page] or page in pins", "counts[page]"),
    "share without counting": (
        PagePool,
        "retain",
        "counts[page] += 1",
        "counts[page] = 1",
    ),
    "keep a match over an eviction": (
        PrefixCache,
        "match",
        "if evicted is None or found.has_lost(evicted):",
        "if False:",
    ),
    "overlook the newest eviction": (
        PagePool,
        "evicted_since",
        "reversed(self._last_evicted), count",
        "reversed(self._last_evicted), 1, count",
    ),
    "allocate before hits are retained": (
        Scheduler,
        "_start",
        "self.pool.retain(cached)",
        "self.pool.release(self.pool.allocate(min(2, self.pool.num_free))); "
        "self.pool.retain(cached)",
    ),
    "promise the pins' pages to others": (
        Capacity,
        "of",
        "self._pins.num_kept_from(request)",
        "0",
    ),
    "forget to copy a fork's tail": (
        Scheduler,
        "_start_fork",
        "self._copies.add(fork, source, pages[0])",
        "self.pool.release([source])",
    ),
    "let a fork write to its leader's tail": (
        Scheduler,
        "_start_fork",
        "shared = leader.page_table[:num_pages]",
        "shared = leader.page_table[:num_pages + 1]; num_in_tail = 0",
    ),
    "keep what was copied": (
        Copies,
        "take",
        "self.pool.release([copy.source for copy in copies])",
        "pass",
    ),
    "copy nothing behind a prefix": (
        Scheduler,
        "_start",
        "self._copies.add(request, tail.page, request.page_table[len(cached)])",
        "self.pool.release([tail.page])",
    ),
    "free a replaced page at once": (
        Scheduler,
        "_rebind",
        "request.page_table = table",
        "request.page_table = table; self._release_replaced()",
    ),
    "never free a replaced page": (
        Scheduler,
        "_release_replaced",
        "self.pool.release(self._replaced)",
        "pass",
    ),
    "count the hits of a request that comes back": (
        Scheduler,
        "_count_hits",
        "if not request.has_run:",
        "if True:",
    ),
    "forget to move a hash": (
        PagePool,
        "_move",
        "self._hashes[target] = hash_ = self._hashes[source]",
        "hash_ = None",
    ),
    "leave a remembered match over a resize": (
        Resize,
        "_follow",
        "self._cache.forget_all()",
        "pass",
    ),
    "leave a copy over a resize": (Resize, "_follow", "self._copies.renumber(moves)", "pass"),
    "leave the forks of a leader that ended": (
        Scheduler,
        "_end",
        "self._waiting.add(heir)",
        "pass",
    ),
}
SLOW_BUGS: dict[str, tuple[type, str, str, str]] = {
    "break instead of defer": (
        Admission,
        "choose",
        "align_deferrals += 1\n            continue",
        "align_deferrals += 1\n            return",
    ),
    "match a tail as if it were full": (
        PrefixCache,
        "tail",
        "return Tail(*found) if found else None",
        "return Tail(found[0], page_size - 1) if found else None",
    ),
    "match the last token": (
        PrefixCache,
        "matchable",
        "(len(request.token_ids) - 1)",
        "len(request.token_ids)",
    ),
    "count free hits as free": (
        Admission,
        "_num_needed",
        "needed += self._pool.num_idle(cached)",
        "pass",
    ),
    "plan for a preempted request": (PageTables, "grow", "step.refund(victim)", "pass"),
    "admit in a step that preempted": (
        Scheduler,
        "schedule",
        "if not step.has_preempted:",
        "if True:",
    ),
    "follow a leader that is gone": (PrefixFollowers, "leave", "del self._leaders[hash_]", "pass"),
    "leave pages on disk": (Scheduler, "_end", "self._swap.drop(request)", "pass"),
}


# Where to look for those that would take long to come up everywhere.
PLACES: dict[str, dict[str, object]] = {
    "break instead of defer": {
        "num_pages": 24,
        "max_num_seqs": 5,
        "max_num_batched_tokens": 11,  # a chunk of 8, and too little for another page
        "enable_chunked_prefill": True,
        "page_aligned_scheduling": True,
        "enable_prefix_caching": False,
        "long_prefill_token_threshold": 8,
    },
    "leave pages on disk": {"num_pages": 6, "preemption_mode": PreemptionMode.SWAP},
    "plan for a preempted request": {"num_pages": 9, "max_num_seqs": 5},
    "follow a leader that is gone": {"num_pages": 24, "enable_prefix_caching": True},
    "admit in a step that preempted": {"num_pages": 9, "max_num_seqs": 5},
    "leave a remembered match over a resize": {
        "num_pages": 9,
        "max_num_seqs": 5,
        "growth_pages": 0,
    },
    "promise the pins' pages to others": {"num_pages": 6, "max_pinned_fraction": 1.0},
}


@pytest.mark.parametrize(
    "name", [*BUGS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_BUGS)]
)
def test_a_planted_bug_is_found(name: str, make_engine: Callable, plant: Callable) -> None:
    plant(*(BUGS | SLOW_BUGS)[name])

    def make(**options: object) -> object:
        return make_engine(**options | PLACES.get(name, {}))

    with pytest.raises((AssertionError, LookupError)):
        run_machine(make, examples=3000, steps=40, phases=[Phase.generate])
