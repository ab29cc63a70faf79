"""Named prefixes: computed once, kept whatever comes, and never more than may be kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxserve.errors import InvalidRequest, PrefixQuotaExceeded, PromptTooLong, QueueFull
from mlxserve.request import FinishReason

PREFIX = list(range(100, 116))  # 4 pages


def test_a_prefix_stays_when_everything_else_is_evicted(make_engine: Callable) -> None:
    engine = make_engine(num_pages=12)
    prefix = engine.add(PREFIX, 1, pins=True)
    engine.drain()
    for number in range(20):
        engine.add([number] * 20)
        engine.drain()
    assert engine.scheduler.stats().pages_pinned == 4
    request = engine.add([*PREFIX, 1, 2, 3])
    engine.drain()
    assert request.num_cached == 16
    engine.unpin(prefix)
    assert engine.scheduler.pool.num_used == 0


def test_a_prefix_that_was_dropped_is_evicted_like_any_other(make_engine: Callable) -> None:
    engine = make_engine(num_pages=12)
    prefix = engine.add(PREFIX, 1, pins=True)
    engine.drain()
    engine.unpin(prefix)
    engine.scheduler.unpin(prefix.id)  # a second time does nothing
    for number in range(20):
        engine.add([number] * 20)
        engine.drain()
    request = engine.add([*PREFIX, 1])
    engine.drain()
    assert request.num_cached == 0


def test_prefixes_that_share_a_beginning_pin_it_once(make_engine: Callable) -> None:
    engine = make_engine(num_pages=12, max_pinned_fraction=0.5)
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    engine.add([*PREFIX, *range(8)], 1, pins=True)
    engine.drain()
    assert engine.scheduler.stats().pages_pinned == 6
    with pytest.raises(PrefixQuotaExceeded, match=r"1 more page.*6 of the 6.*max_pinned_fraction"):
        engine.add([*PREFIX, 1, 1, 1, 1], 1, pins=True)
    engine.drain()


def test_prefixes_computed_side_by_side_share_the_quota(make_engine: Callable) -> None:
    engine = make_engine(num_pages=12, max_pinned_fraction=0.5)
    first = engine.add(PREFIX, 1, pins=True)
    with pytest.raises(PrefixQuotaExceeded, match="4 of the 6"):
        engine.add([1] * 16, 1, pins=True)
    engine.abort(first.id)
    engine.add([1] * 16, 1, pins=True)
    engine.drain()


def test_an_aborted_prefix_leaves_no_pin(make_engine: Callable) -> None:
    engine = make_engine(num_pages=12)
    prefix = engine.add(PREFIX, 1, pins=True)
    engine.launch()
    engine.abort(prefix.id, FinishReason.ABORT)
    engine.drain()
    assert engine.scheduler.stats().pages_pinned == 0


def test_what_can_never_fit_beside_the_pins_is_refused(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, max_pinned_fraction=0.5)
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    with pytest.raises(PromptTooLong, match=r"17 tokens.*4 pinned pages.*16.*remove a named"):
        engine.add([1] * 17)
    request = engine.add([*PREFIX, *[1] * 14], None)  # its first pages are the pinned ones
    engine.drain()
    assert len(request.token_ids) == 32
    short = engine.add([1] * 10, None)
    engine.drain()
    assert len(short.token_ids) == 16


def test_a_prefix_waits_for_requests_that_need_its_pages(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, max_pinned_fraction=0.5)
    engine.add([1] * 20, 4)
    with pytest.raises(QueueFull, match="try again when it has ended"):
        engine.add(PREFIX, 1, pins=True)
    engine.drain()
    engine.add(PREFIX, 1, pins=True)
    engine.drain()


def test_a_running_answer_ends_where_the_pins_leave_no_place(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, max_pinned_fraction=0.5)
    request = engine.add([1] * 9, None)
    engine.step()
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    assert len(request.token_ids) == 16
    assert engine.ends[request.id] is FinishReason.LENGTH


def test_a_prefix_that_leans_on_a_dropped_one_keeps_its_claim(make_engine: Callable) -> None:
    # Found by the state machine: two pages were pinned where one was promised, and a request that
    # had been let in between had no place any more.
    engine = make_engine(num_pages=4, max_pinned_fraction=0.5, max_num_seqs=4)
    first = engine.add([1] * 4, 1, pins=True)
    engine.drain()
    engine.add([1] * 4 + [2] * 4, 1, pins=True)  # promised one page more than the first
    engine.unpin(first)
    with pytest.raises(PromptTooLong, match="beside 2 pinned pages the cache holds 8"):
        engine.add([3] * 9, 1)
    with pytest.raises(PrefixQuotaExceeded, match="2 of the 2"):
        engine.add([3] * 4, 1, pins=True)
    request = engine.add([3] * 7, 4)
    engine.drain()
    assert len(request.token_ids) == 8
    assert engine.scheduler.stats().pages_pinned == 2


def test_who_counted_on_a_dropped_prefix_still_has_a_place(make_engine: Callable) -> None:
    engine = make_engine(num_pages=7, max_pinned_fraction=1.0, max_num_seqs=1)
    first = engine.add([1] * 4, 1, pins=True)
    engine.drain()
    request = engine.add([1] * 4 + [2] * 12, 20)
    engine.add([1] * 4 + [3] * 8, 1, pins=True)
    engine.unpin(first)  # its page is no longer pinned, but promised to the second prefix
    engine.drain()
    assert len(request.token_ids) == (7 - 3 + 1) * 4


def test_who_holds_the_duplicate_of_a_pinned_page_sets_itself_back(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, max_pinned_fraction=0.25, max_num_batched_tokens=48)
    engine.add([1, 2, 3, 4], 1, pins=True)
    request = engine.add([1, 2, 3, 4, 5], None)  # too little in common to wait for
    engine.drain()
    assert len(request.token_ids) == 32  # with the pinned page, which it had computed itself too
    assert request.num_preemptions == 1


def test_whoever_holds_only_pinned_pages_is_no_victim(make_engine: Callable) -> None:
    engine = make_engine(num_pages=10, max_pinned_fraction=0.5)
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    for number in range(3):
        engine.add([*PREFIX, number], 16)
    engine.drain()
    assert engine.scheduler.stats().pages_pinned == 4


def test_a_prefix_is_pinned_though_its_pages_were_duplicates_of_evicted_ones(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=9)
    first = engine.add(PREFIX[:8], 1)
    engine.launch()
    second = engine.add(PREFIX[:8], 1, pins=True)  # too short to wait for the first
    engine.launch()
    engine.read()
    assert first.is_finished
    pool = engine.scheduler.pool
    pool.release(pool.allocate(pool.num_free))  # evicts what the first one published
    engine.read()
    assert second.is_finished
    assert engine.scheduler.stats().pages_pinned == 2


def test_without_prefix_caching_there_are_no_prefixes(make_engine: Callable) -> None:
    engine = make_engine(enable_prefix_caching=False)
    with pytest.raises(InvalidRequest, match="turn enable_prefix_caching on"):
        engine.add(PREFIX, 1, pins=True)
