"""Which pages of layers with a window are held, found, kept and evicted."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest

from mlxserve.cache.groups import Window
from mlxserve.cache.kinds.kind import find
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.kinds.window_room import held
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import PreemptionMode
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import CacheMiss, LiveRequest, Request
from tests.scheduler.conftest import GhostEngine

MakeEngine = Callable[..., GhostEngine]
PAGE = 4
WINDOW = 9  # two pages before the end of a page
HELD = 4  # pages with which a request goes on


def answered(engine: GhostEngine, prompt: list[int], **options: Any) -> LiveRequest:
    request = engine.add(prompt, **{"max_tokens": 1, **options})
    engine.drain()
    return request


def windows_of(engine: GhostEngine) -> WindowPages:
    windows = find(engine.scheduler.page_tables.ends, WindowPages)
    assert windows is not None
    return windows


def numbered(first: int, length: int) -> list[int]:
    """A prompt that has nothing in common with those of other numbers."""
    return list(range(first, first + length))


def test_a_prefix_is_usable_where_its_whole_window_is_there() -> None:
    """Against a search through all boundaries, for each set of pages that are there."""
    for window in [1, 2, 4, 5, 9]:
        for num_tokens in [1, 4, 9, 14]:
            num_pages = 5
            for there in product([False, True], repeat=num_pages):
                pool = PagePool(16, PAGE)
                for index, is_there in enumerate(there):
                    [page] = pool.allocate(1) or []
                    if is_there:
                        pool.publish(page, b"%d" % index, b"", [0] * PAGE)
                windows = WindowPages(pool, Window(window, PAGE))
                seen = [
                    range(max(0, end * PAGE - window + 1), end * PAGE)
                    for end in range(num_pages + 1)
                ]
                expected = max(
                    end
                    for end in range(num_pages + 1)
                    if all(there[position // PAGE] for position in seen[end])
                )
                assert (
                    windows.num_usable([b"%d" % i for i in range(num_pages)], num_pages) == expected
                ), (window, num_tokens)


def test_a_request_holds_its_window_and_no_more(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=20)
    request = engine.add(numbered(1, 30), max_tokens=40)
    while engine.scheduler.has_work:
        engine.step()
        assert len(held(request)) <= HELD + (30 + PAGE - 1) // PAGE
        if request.num_outputs > 1 and not request.is_finished:
            assert len(held(request)) <= HELD


def test_passed_pages_are_evicted_before_all_others(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=40)
    both = [answered(engine, numbered(number, 41)) for number in (1, 100)]
    order = windows_of(engine).pool.order.first()
    hashes = [windows_of(engine).pool.index.hash_of(page) for page in order]
    # The prompts end after page 10, and 16 tokens before that after page 6: each needs two pages.
    passed = [one.page_hashes[index] for one in both for index in (0, 1, 2, 3, 6, 7)]
    assert set(hashes[:12]) == set(passed)
    assert len(hashes) == 20


def test_the_window_at_the_end_of_a_prompt_outlives_a_long_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=HELD + 6)
    prompt = numbered(1, 41)
    answered(engine, prompt, max_tokens=60)
    again = answered(engine, [*prompt, 1, 2, 3])
    assert again.num_cached == 40
    assert windows_of(engine).pool.num_evicted > 0


def test_a_branch_before_the_window_is_computed_again_and_says_so(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=HELD)
    prompt = numbered(1, 60)
    answered(engine, prompt)
    branch = answered(engine, [*prompt[:30], 7, 8, 9])
    assert branch.cache is not None
    assert branch.cache.reason is CacheMiss.WINDOW_EVICTED
    assert (branch.cache.num_tokens, branch.cache.differs_at) == (0, 0)
    assert answered(engine, [*prompt[:30], 7, 8, 9]).num_cached == 32


def test_the_window_of_a_named_prefix_is_found_until_it_is_dropped(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=HELD + 2)
    prefix = answered(engine, numbered(1, 41), pins=True)
    for number in range(100, 600, 100):
        answered(engine, numbered(number, 50))
    assert engine.reset()
    assert answered(engine, [*prefix.asked.token_ids, 1, 2]).num_cached == 40
    engine.unpin(prefix)
    for number in range(100, 600, 100):
        answered(engine, numbered(number, 50))
    assert answered(engine, [*prefix.asked.token_ids, 3, 4]).num_cached == 0


def test_two_named_prefixes_share_a_window(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=HELD + 4)
    prefixes = [answered(engine, numbered(1, 41), pins=True) for _ in range(2)]
    engine.unpin(prefixes[0])
    for number in range(100, 600, 100):
        answered(engine, numbered(number, 50))
    assert answered(engine, [*prefixes[1].asked.token_ids, 1, 2]).num_cached == 40


def test_a_running_request_comes_before_the_window_of_a_named_prefix(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=HELD + 2)
    prefix = answered(engine, numbered(1, 41), pins=True)
    for number in (100, 200):
        engine.add([number], max_tokens=40)
    engine.drain()
    again = answered(engine, [*prefix.asked.token_ids, 1, 2])
    assert again.cache is not None
    assert again.cache.reason is CacheMiss.WINDOW_EVICTED
    for number in (300, 400, 500):
        answered(engine, numbered(number, 50))
    found = answered(engine, [*prefix.asked.token_ids, 1, 2])
    assert found.num_cached == 40, "it was not kept again"


def test_a_conversation_that_is_kept_keeps_its_window(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=HELD + 2)
    request = answered(engine, numbered(1, 40), max_tokens=10)
    engine.scheduler.keep_pages(request.asked, until=5.0)
    for number in range(100, 400, 100):
        answered(engine, numbered(number, 50))
    # Of 50 tokens the last one was not computed.
    assert answered(engine, [*request.token_ids, 1, 2]).num_cached == 48


def test_prompts_that_only_fit_one_after_the_other_do_not_thrash(make_engine: MakeEngine) -> None:
    engine = make_engine(
        window=33,
        num_window_pages=14,  # 10 for each
        max_num_batched_tokens=16,
        long_prefill_token_threshold=8,
    )
    for number in (100, 200, 300):
        engine.add(numbered(number, 60), max_tokens=2)
    engine.drain()
    assert engine.scheduler.stats().num_preemptions == 0


def test_cold_requests_compute_their_common_beginning_once(make_engine: MakeEngine) -> None:
    found = []
    for window in (None, WINDOW):
        engine = make_engine(window=window, num_window_pages=40, max_num_batched_tokens=16)
        shared = numbered(1, 60)
        for number in range(4):
            engine.add([*shared, *numbered(100 * (number + 1), 10)], max_tokens=1)
        engine.drain()
        found.append(engine.num_computed)
    assert found == [112, 112], "the second begins before the first has computed all"


def test_answers_to_one_prompt_begin_at_its_last_page(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=40)
    requests = engine.fork(numbered(1, 30), max_tokens=5, n=3)
    engine.drain()
    assert [request.num_cached for request in requests] == [0, 28, 28]


def test_where_windows_are_short_a_request_that_has_some_is_preempted(
    make_engine: MakeEngine,
) -> None:
    """Equal answers share all full pages of the other layers, but hold windows of their own."""
    engine = make_engine(window=WINDOW, num_window_pages=2 * HELD - 1, growth_pages=0)
    for _ in range(3):
        engine.add(numbered(1, 3), max_tokens=50)
    engine.drain()
    assert engine.scheduler.stats().num_preemptions > 0


def on_disk(engine: GhostEngine, prompt: list[int]) -> None:
    """Have a prompt on disk with its window, and nothing in memory."""
    answered(engine, prompt)
    engine.clean(1000)
    assert engine.reset()


def test_a_prompt_on_disk_is_read_with_its_last_window(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=12)
    prompt = numbered(1, 41)
    on_disk(engine, prompt)
    assert len(engine.disk.pages) == 10
    assert len(engine.disk.windows) == 4, "before its end, and 16 tokens before that"
    again = answered(engine, [*prompt, 1, 2])
    assert again.cache is not None
    assert (again.num_cached, again.cache.num_from_disk) == (40, 40)


def test_a_prompt_is_read_up_to_the_last_window_on_disk(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=12)
    prompt = numbered(1, 41)
    on_disk(engine, prompt)
    last = next(iter(engine.disk.windows))
    del engine.disk.windows[last]
    assert answered(engine, [*prompt, 1, 2]).num_cached == 24
    engine.clean(1000)
    assert last in engine.disk.windows, "it was written again"


def test_without_its_window_everything_is_computed_again(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=12)
    prompt = numbered(1, 41)
    on_disk(engine, prompt)
    request = engine.add([*prompt, 1, 2], max_tokens=1)
    while not engine.loads:
        engine.launch()
    engine.disk.windows.clear()
    engine.drain()
    assert request.cache is not None
    assert request.cache.reason is CacheMiss.LOST
    assert request.num_cached == 0


def test_a_preempted_request_is_read_with_its_window(make_engine: MakeEngine) -> None:
    engine = make_engine(
        window=WINDOW,
        num_window_pages=20,
        num_pages=40,
        preemption_mode=PreemptionMode.SWAP,
        growth_pages=0,
    )
    for number in (100, 200, 300):
        engine.add(numbered(number, 9), max_tokens=60)
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.swapped_tokens > 0
    assert stats.restored_tokens > 0


def test_nothing_is_read_without_room_for_its_window(make_engine: MakeEngine) -> None:
    """A prompt shares its beginning with an answer, which holds the window there, and goes on on disk."""
    engine = make_engine(window=17, num_window_pages=8)
    prompt = numbered(1, 81)
    on_disk(engine, prompt)
    answer = engine.add([*prompt[:24], 7], max_tokens=30)
    while not answer.num_outputs:
        engine.step()
    assert windows_of(engine).pool.num_free < Window(17, PAGE).num_seen
    request = engine.add([*prompt, 1, 2], max_tokens=1)
    engine.step()
    assert request.num_cached == 24
    assert not engine.loads
    engine.drain()


@pytest.mark.parametrize("length", [20, 36])
def test_a_follower_continues_after_the_window_where_its_prompt_leaves_the_leaders(
    make_engine: MakeEngine, length: int
) -> None:
    engine = make_engine(
        window=WINDOW, num_window_pages=22, num_pages=99, max_num_batched_tokens=64
    )
    engine.add(numbered(1, 120))
    follower = engine.add([*numbered(1, length), 500], 1)
    engine.drain()
    assert follower.num_cached == length


def test_a_window_is_written_before_it_is_given_up(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=HELD + 3, num_pages=48)
    prompt = answered(engine, numbered(1, 41), max_tokens=1)
    for number in range(100, 800, 100):
        engine.clean(1000, is_idle=False)
        answered(engine, numbered(number, 50))
    last = Window(WINDOW, PAGE).first_before(10)
    assert set(prompt.page_hashes[last:10]) <= set(engine.disk.windows)
    again = answered(engine, [*prompt.asked.token_ids, 1, 2, 3])
    assert again.cache is not None
    assert again.cache.num_from_disk == 40


def test_no_window_is_written_while_there_is_room_for_another(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=60, num_pages=200)
    answered(engine, numbered(1, 41))
    engine.clean(1000, is_idle=False)
    assert not engine.disk.windows


def test_the_end_of_a_protection_loses_no_page_of_a_window(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=HELD + 6, num_pages=64)
    request = engine.add(numbered(1, 41), max_tokens=80)
    while request.num_outputs < 14:
        engine.step()
    engine.scheduler.keep_pages(request.asked, until=5)
    engine.scheduler.page_tables.expire(6)
    while engine.scheduler.has_work:  # each step is audited: a place that is known has its window
        engine.step()


# ---- what is counted when requests wait for windows


def waiting(prompt: list[int]) -> LiveRequest:
    return LiveRequest(Request("waits", prompt, SamplingParams(max_tokens=1)))


def test_a_window_that_is_found_is_counted_as_taken(make_engine: MakeEngine) -> None:
    """Its pages are free until the request starts, and then they are not."""
    engine = make_engine(window=WINDOW, num_window_pages=12)
    prompt = numbered(1, 41)
    answered(engine, prompt)
    tables, room = engine.scheduler.page_tables, windows_of(engine).room
    request = waiting([*prompt, *numbered(500, 20)])
    tables.cache.share_hashes(request)
    cached = tables.cache.match(request)
    assert len(cached) == 10
    assert room.num_lacking(request, len(cached), 0) == HELD - 12
    assert room.num_lacking(request, len(cached), 9) == HELD - 12 + 9


def test_the_next_turn_reads_the_window_at_the_end_of_the_answer(make_engine: MakeEngine) -> None:
    engine = make_engine(window=WINDOW, num_window_pages=12)
    first = engine.add(numbered(1, 21), max_tokens=30)
    engine.drain()
    conversation = list(first.token_ids)
    engine.clean(1000)
    assert engine.reset()
    again = answered(engine, [*conversation, 1, 2])
    assert again.num_cached == 48, "all full pages but the last token's"


def test_an_answer_makes_way_for_its_window(make_engine: MakeEngine) -> None:
    engine = make_engine(
        window=WINDOW, num_window_pages=2 * HELD + 1, num_pages=200, max_num_seqs=8, growth_pages=0
    )
    for number in range(2):
        engine.add(numbered(100 * number, 20), max_tokens=80, priority=3)
    for _ in range(6):
        engine.step()
    urgent = engine.add(numbered(900, 20), max_tokens=2)
    engine.scheduler.page_tables.expire(1.0)
    for _ in range(6):
        engine.step()
    assert urgent.is_finished
    assert engine.scheduler.stats().priority_preemptions > 0
    engine.drain()
