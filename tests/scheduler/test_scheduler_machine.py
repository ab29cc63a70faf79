"""The scheduler under every order of events, judged by the ghost engine after each of them."""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from mlxserve.cache.groups import Window
from mlxserve.core.config import BudgetMode, PageTail, PreemptionMode
from mlxserve.core.errors import (
    InvalidParameter,
    InvalidRequest,
    PrefixQuotaExceeded,
    PromptTooLong,
    QueueFull,
)
from mlxserve.images.picture import Picture, Placed, PlacedPicture
from mlxserve.request import STATE_SLOTS, FinishReason

PAGE_SIZE = 4
MAX_MODEL_LEN = 48

# Prompts are paths in a small tree of pages, cut anywhere: they share prefixes of every length.
PIECES = ([1] * PAGE_SIZE, [2] * PAGE_SIZE, [1, 2, 3, 4])


def walk(num_pages: int, path: int, cut: int) -> list[int]:
    """`path` has a digit for each page; drawing a list of digits would take five times as long."""
    digits = [path // len(PIECES) ** depth % len(PIECES) for depth in range(num_pages)]
    return [token for digit in digits for token in PIECES[digit]][: cut or None]


prompts = st.builds(
    walk,
    st.integers(1, 9),
    st.integers(0, len(PIECES) ** 9 - 1),
    st.integers(-PAGE_SIZE + 1, 0),
)
# Images: of one with three rows, and of two with six, whose first ids are the same by chance; then such of whose
# rows one chunk computes six, or three and four.
PICTURES = [
    Picture(bytes([number]) * 32, array("i", [1, *rows, 2]), {}, is_bidirectional=number > 3)
    for number, rows in enumerate(
        (
            [-9, -8, -7],
            [-9, -8, -7, -6, -5, -4],
            [-9, -8, -7, -3, -5, -4],
            [-9, -8, -7, -6, -5, -2],
            [-9, -8, -7, 3, -6, -5, -4, -2],
        ),
        1,
    )
]
LONGEST_BLOCK = 6


def with_picture(
    prompt: list[int], number: int | None, place: int, longest: int
) -> tuple[list[int], Placed]:
    """The prompt with an image at some place of it, or as it is; no longer than `longest`."""
    if number is None or len(prompt) + len(PICTURES[number].ids) > longest:
        return prompt[:longest], ()
    start = place % (len(prompt) + 1)
    picture = PICTURES[number]
    placed = PlacedPicture(start, picture)
    return [*prompt[:start], *picture.ids, *prompt[start:]], (placed,)


numbers = st.sampled_from([None, None, None, 0, 1, 2, 3, 3, 4])
places = st.integers(0, 9 * PAGE_SIZE)
configurations = st.fixed_dictionaries(
    {
        "num_pages": st.integers(2, 24),
        "max_pinned_fraction": st.sampled_from([0.25, 0.5, 1.0]),
        "max_num_seqs": st.integers(1, 5),
        "enable_prefix_caching": st.sampled_from([True, True, True, False]),
        "page_aligned_scheduling": st.booleans(),
        "max_overtakes": st.integers(0, 2),
        "ageing_steps": st.sampled_from([3, 1000]),
        "preempt_for_priority_ms": st.sampled_from([0, 1000, 2500]),
        "prefix_follow_pages": st.sampled_from([1, 4]),
        "growth_pages": st.sampled_from([0, 2]),
        "immune_after_preemptions": st.sampled_from([1, 3]),
        "hot_after_hits": st.sampled_from([1, 2]),
        "budget_mode": st.sampled_from(BudgetMode),
        "preemption_mode": st.sampled_from(PreemptionMode),
        "page_tail": st.sampled_from([*PageTail, PageTail.COPY]),
        "num_open": st.sampled_from([None, None, 3]),
        "long_prefill_token_threshold": st.sampled_from([0, 2, 4, 8]),
        "speculative_tokens": st.sampled_from([0, 5, 16]),
    }
)


class SchedulerMachine(RuleBasedStateMachine):
    """Every rule ends with an audit, mostly within the engine."""

    def __init__(self, make_engine: Callable) -> None:
        super().__init__()
        self.make_engine = make_engine
        self.now = 0.0

    @initialize(
        options=configurations,
        budget=st.sampled_from([5, 6, 8, 13, 20, 64]),
        is_chunked=st.sampled_from([True, True, False]),
        disk_takes=st.sampled_from([None, None, 0, 1]),
        num_snapshots=st.sampled_from([None, None, 0, 1, 5]),
        state_bytes=st.sampled_from([None, 1, 5, 20]),
        window=st.sampled_from([None, None, 1, 4, 6, 13, 32]),
        num_window_pages=st.sampled_from([0, 1, 3, 12]),
        shared=st.sampled_from([None, 1, 3, 10]),
        longest_block=st.sampled_from([0, LONGEST_BLOCK, LONGEST_BLOCK]),
    )
    def build(
        self,
        options: dict,
        budget: int,
        is_chunked: bool,
        disk_takes: int | None,
        num_snapshots: int | None,
        state_bytes: int | None,
        window: int | None,
        num_window_pages: int,
        shared: int | None,
        longest_block: int,
    ) -> None:
        """`num_snapshots`: of recurrent states, beside those of running requests. `num_window_pages`:
        beside those with which one request goes on, where layers with a window have their own pool.
        `shared`: bytes of a page of theirs, where they share memory with the other layers. `state_bytes`:
        the same of a state."""
        if window is not None:
            is_chunked = True
            options["window"] = window
            options["shared"] = shared
            options["longest_block"] = longest_block
            held = Window(window, PAGE_SIZE, longest_block).num_held
            options["num_window_pages"] = held + num_window_pages
        if num_snapshots is not None:
            options["num_state_slots"] = STATE_SLOTS * options["max_num_seqs"] + num_snapshots
            options["state_bytes"] = state_bytes
        self.engine = self.make_engine(
            page_size=PAGE_SIZE,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=budget if is_chunked else max(budget, MAX_MODEL_LEN),
            enable_chunked_prefill=is_chunked,
            **options,
        )
        self.engine.disk.takes = disk_takes

    @rule(
        prompt=prompts,
        max_tokens=st.one_of(st.none(), st.integers(1, 20)),
        salt=st.sampled_from([b"", b"", b"", b"a"]),
        priority=st.sampled_from([0, 0, 0, 1]),
        client=st.sampled_from(["", "", "a", "b"]),
        ignore_eos=st.booleans(),
        skips_cache=st.sampled_from([False, False, False, True]),
        picture=numbers,
        place=places,
    )
    def add(
        self,
        prompt: list,
        max_tokens: int | None,
        picture: int | None,
        place: int,
        **options: object,
    ) -> None:
        longest = self.engine.scheduler.max_model_len - 1
        prompt, pictures = with_picture(prompt, picture, place, longest)
        try:
            self.engine.add(prompt, max_tokens, pictures=pictures, now=self.now, **options)
        except PromptTooLong:
            assert self.engine.scheduler.pool.num_pinned or self.engine.prefixes_under_way
        except InvalidParameter:
            assert self.engine.must_divide(pictures)
        self.engine.audit()

    @rule(
        prompt=prompts,
        max_tokens=st.integers(1, 6),
        n=st.integers(2, 4),
        picture=numbers,
        place=places,
    )
    def fork(self, prompt: list, max_tokens: int, n: int, picture: int | None, place: int) -> None:
        longest = self.engine.scheduler.max_model_len - 1
        prompt, pictures = with_picture(prompt, picture, place, longest)
        with suppress(PromptTooLong, InvalidParameter):
            self.engine.fork(prompt, max_tokens, n, pictures)
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
        """To any size, or to one that is too small for the running requests."""
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
        self.engine.scheduler.page_tables.expire(self.now)
        self.engine.audit()

    @precondition(lambda self: self.engine.loads)
    @rule(data=st.data(), at_most=st.sampled_from([None, None, 0, 1]))
    def finish_load(self, data: st.DataObject, at_most: int | None) -> None:
        self.engine.finish_load(data.draw(st.sampled_from(self.engine.loads)), at_most)

    @rule(count=st.integers(1, 12), is_idle=st.booleans())
    def write_to_disk(self, count: int, is_idle: bool) -> None:
        self.engine.clean(count, is_idle=is_idle)

    @rule()
    def start_anew(self) -> None:
        """As a server that was stopped in order: everything is on disk, nothing in memory."""
        self.engine.drain()
        self.engine.clean(1000)
        self.engine.reset()

    @precondition(lambda self: self.engine.disk.pages)
    @rule(data=st.data(), count=st.integers(1, 4))
    def lose_on_disk(self, data: st.DataObject, count: int) -> None:
        """The disk forgets pages, whether they are being read or not."""
        pages = self.engine.disk.pages
        for hash_ in data.draw(st.permutations(sorted(pages)))[:count]:
            del pages[hash_]
            self.engine.disk.states.pop(hash_, None)
            self.engine.disk.windows.pop(hash_, None)

    @precondition(lambda self: self.engine.disk.windows)
    @rule(data=st.data())
    def lose_a_window_on_disk(self, data: st.DataObject) -> None:
        """But not its page."""
        windows = self.engine.disk.windows
        del windows[data.draw(st.sampled_from(sorted(windows)))]

    @precondition(lambda self: self.engine.disk.states)
    @rule(data=st.data())
    def lose_a_state_on_disk(self, data: st.DataObject) -> None:
        """But not its page."""
        del self.engine.disk.states[data.draw(st.sampled_from(sorted(self.engine.disk.states)))]

    @rule(is_fast=st.booleans())
    def change_disk_speed(self, is_fast: bool) -> None:
        self.engine.disk.is_fast = is_fast

    @rule()
    def drain(self) -> None:
        self.engine.drain()

    def teardown(self) -> None:
        if engine := getattr(self, "engine", None):
            engine.drain()


def run_machine(
    make_engine: Callable,
    examples: int,
    steps: int,
    machine: Callable[[Callable], RuleBasedStateMachine] = SchedulerMachine,
    **options: object,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Hypothesis also draws numbers that it finds in the project's loaded modules: with it, what
        # is searched would depend on which other tests were imported before.
        patch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_, **__: None)
        run_state_machine_as_test(
            partial(machine, make_engine),
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


@pytest.mark.long
def test_no_order_of_events_breaks_an_invariant_however_long(make_engine: Callable) -> None:
    """With MLXSERVE_MACHINE_EXAMPLES, as many examples, new in every run."""
    examples = os.environ.get("MLXSERVE_MACHINE_EXAMPLES")
    run_machine(make_engine, int(examples or 2000), steps=60, derandomize=examples is None)
