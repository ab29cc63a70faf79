"""Named prefixes: computed once, never evicted, and within their quota."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxserve.core.config import PageTail, PreemptionMode
from mlxserve.core.errors import InvalidRequest, PagesPromised, PrefixQuotaExceeded, PromptTooLong
from mlxserve.request import CacheMiss, CacheReport, FinishReason

PREFIX = list(range(100, 116))  # 4 pages


def test_a_prefix_stays_when_everything_else_is_evicted(make_engine: Callable) -> None:
    engine = make_engine(num_pages=12)
    prefix = engine.add(PREFIX, 1, pins=True)
    engine.drain()
    for number in range(20):
        engine.add([number] * 20)
        engine.drain()
    assert engine.scheduler.pool.num_pinned == 4
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
    assert engine.scheduler.pool.num_pinned == 6
    with pytest.raises(PrefixQuotaExceeded, match=r"1 more page.*6 of the 6.*max_pinned_fraction"):
        engine.add([*PREFIX, 1, 1, 1, 1], 1, pins=True)
    engine.drain()


def test_the_audit_counts_the_pins_of_a_page_that_prefixes_share(make_engine: Callable) -> None:
    engine = make_engine(num_pages=12, max_pinned_fraction=0.5)
    first = engine.add(PREFIX, 1, pins=True)
    engine.drain()
    engine.add([*PREFIX, *range(8)], 1, pins=True)
    engine.drain()
    scheduler = engine.scheduler
    # The claim has ended, and the pool has not been told.
    pages = scheduler.page_tables.pins.drop(first.id)
    scheduler.roster.prefixes.pop(first.id)
    with pytest.raises(AssertionError, match="a page is pinned for no prefix"):
        scheduler.check()
    scheduler.pool.unpin(pages)
    scheduler.check()


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
    assert engine.scheduler.pool.num_pinned == 0


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
    with pytest.raises(PagesPromised, match="Try again when that has ended"):
        engine.add(PREFIX, 1, pins=True)
    engine.drain()
    engine.add(PREFIX, 1, pins=True)
    engine.drain()


@pytest.mark.parametrize("max_tokens", [20, None])
@pytest.mark.parametrize("client", ["a", "b"])
def test_a_prefix_that_would_cut_an_answer_is_refused(
    make_engine: Callable, max_tokens: int | None, client: str
) -> None:
    engine = make_engine(num_pages=8, max_pinned_fraction=0.5)
    request = engine.add([1] * 9, max_tokens, client="a")
    engine.step()
    before = engine.scheduler.stats()
    with pytest.raises(PagesPromised, match=r"whose answer it would cut.*set max_tokens"):
        engine.add(PREFIX, 1, pins=True, client=client)
    assert engine.scheduler.stats() == before
    assert engine.scheduler.page_tables.pins.num_pages == 0
    engine.drain()
    assert len(request.token_ids) == (29 if max_tokens else 32)
    assert engine.ends[request.id] is FinishReason.LENGTH


def test_a_prefix_beside_which_the_whole_answer_fits_is_added(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, max_pinned_fraction=0.5)
    request = engine.add([1] * 9, 7)
    engine.step()
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    assert len(request.token_ids) == 16


def test_an_answer_that_begins_with_the_prefix_leaves_room_for_it(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, max_pinned_fraction=0.5)
    request = engine.add([*PREFIX, 1], 15)
    engine.step()
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    assert len(request.token_ids) == 32


def test_an_answer_that_has_outgrown_its_promise_is_not_cut_at_once(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, max_pinned_fraction=0.5)
    prefix = engine.add(PREFIX, 1, pins=True)
    engine.drain()
    request = engine.add([1] * 9, None)  # promised 16 tokens: half of the pages are pinned
    engine.unpin(prefix)
    while len(request.token_ids) < 20:
        engine.step()
    with pytest.raises(PagesPromised):
        engine.add(PREFIX, 1, pins=True)
    engine.drain()
    assert len(request.token_ids) == 32


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
    assert engine.scheduler.pool.num_pinned == 2


def test_a_request_that_shares_a_dropped_prefix_still_has_room(make_engine: Callable) -> None:
    engine = make_engine(num_pages=7, max_pinned_fraction=1.0, max_num_seqs=1)
    first = engine.add([1] * 4, 1, pins=True)
    engine.drain()
    request = engine.add([1] * 4 + [2] * 12, 4)
    engine.add([1] * 4 + [3] * 8, 1, pins=True)
    engine.unpin(first)  # its page is no longer pinned, but promised to the second prefix
    engine.drain()
    assert len(request.token_ids) == (7 - 3 + 1) * 4


def test_a_request_that_computed_a_pinned_page_again_holds_the_pinned_one(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=8, max_pinned_fraction=0.25, max_num_batched_tokens=48)
    engine.add([1, 2, 3, 4], 1, pins=True)
    request = engine.add([1, 2, 3, 4, 5], None)  # too little in common to wait for
    engine.drain()
    assert len(request.token_ids) == 32  # with the pinned page: all 8 there are
    assert request.num_preemptions == 0


def test_a_request_that_holds_only_pinned_pages_is_not_a_victim(make_engine: Callable) -> None:
    engine = make_engine(num_pages=10, max_pinned_fraction=0.5)
    engine.add(PREFIX, 1, pins=True)
    engine.drain()
    for number in range(3):
        engine.add([*PREFIX, number], 16)
    engine.drain()
    assert engine.scheduler.pool.num_pinned == 4


def test_a_prefix_is_pinned_though_what_it_had_in_common_with_others_was_evicted(
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
    assert engine.scheduler.pool.num_pinned == 2


def test_without_prefix_caching_there_are_no_prefixes(make_engine: Callable) -> None:
    engine = make_engine(enable_prefix_caching=False)
    with pytest.raises(InvalidRequest, match="turn enable_prefix_caching on"):
        engine.add(PREFIX, 1, pins=True)


# ---- the page that a prefix ends in

LONG = [*PREFIX, 7, 8, 9]  # 4 pages, and 3 tokens


@pytest.mark.parametrize(
    ("tail", "pinned", "cached"), [(PageTail.COPY, 5, 19), (PageTail.RECOMPUTE, 4, 16)]
)
def test_a_prefixs_tail_is_copied_or_computed_again(
    make_engine: Callable, tail: PageTail, pinned: int, cached: int
) -> None:
    engine = make_engine(page_tail=tail)
    engine.add(LONG, 1, pins=True)
    engine.drain()
    assert engine.scheduler.pool.num_pinned == pinned
    computed = engine.num_computed
    for number in range(3):
        request = engine.add([*LONG, number, 7, 7], 2)
        engine.drain()
        assert request.num_cached == request.cache.num_tokens == cached
        assert request.cache.num_pages == 4
    # Of 22 tokens those after the prefix, or after its full pages; and one of two answered.
    assert engine.num_computed - computed == 3 * (22 - cached + 1)
    assert engine.num_copied == (3 if tail is PageTail.COPY else 0)
    tails = {engine.requests[f"r{number}"].page_hashes[4] for number in (1, 2, 3)}
    assert len(tails) == 3  # each wrote on in a page of its own


def test_requests_at_once_copy_one_tail(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add(LONG, 1, pins=True)
    engine.drain()
    requests = [engine.add([*LONG, number], 4) for number in range(3)]
    engine.launch()
    assert engine.num_copied == 3
    assert len({request.page_table[4] for request in requests}) == 3
    engine.drain()


def test_a_prefix_below_one_page_is_kept_and_copied(make_engine: Callable) -> None:
    engine = make_engine(num_pages=4)
    engine.add([7, 8, 9], 1, pins=True)
    engine.drain()
    for number in range(9):
        engine.add([number] * 9)
        engine.drain()
    request = engine.add([7, 8, 9, 1], 1)
    engine.drain()
    assert request.cache == CacheReport(0, 3, 3, CacheMiss.BELOW_ONE_PAGE)


def test_a_prefix_alone_computes_its_last_token(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add(LONG, 1, pins=True)
    engine.drain()
    computed = engine.num_computed
    assert engine.add(LONG, 1).num_cached == 0
    engine.drain()
    assert engine.num_computed - computed == 1


def test_a_tail_that_a_prompt_leaves_is_not_copied(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add(LONG, 1, pins=True)
    engine.drain()
    request = engine.add([*PREFIX, 7, 8, 1, 1, 1], 1)
    engine.drain()
    assert request.cache == CacheReport(4, 16, 18, CacheMiss.NEW_TEXT)
    assert engine.num_copied == 0


def test_of_two_prefixes_the_longer_tail_is_copied(make_engine: Callable) -> None:
    engine = make_engine()
    for prefix in (LONG[:-1], LONG, LONG[:-2]):
        engine.add(prefix, 1, pins=True)
        engine.drain()
    request = engine.add([*LONG, 1, 1], 1)
    engine.drain()
    assert request.num_cached == 19
    assert engine.scheduler.pool.num_pinned == 4 + 3


def test_tails_of_another_salt_are_not_copied(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add([7, 8, 9], 1, salt=b"a", pins=True)
    engine.drain()
    for salt, cached in ((b"b", 0), (b"", 0), (b"a", 3)):
        request = engine.add([7, 8, 9, 1], 1, salt=salt)
        engine.drain()
        assert request.num_cached == cached


def test_a_dropped_prefix_gives_its_tail_back(make_engine: Callable) -> None:
    engine = make_engine(num_pages=10)
    prefix = engine.add(LONG, 1, pins=True)
    engine.drain()
    engine.unpin(prefix)
    assert engine.scheduler.pool.num_pinned == 0
    engine.add([1] * 36, 4)
    engine.drain()
    request = engine.add([*LONG, 1], 1)
    engine.drain()
    assert request.num_cached == 0


def test_the_tail_counts_for_the_quota(make_engine: Callable) -> None:
    for tail, fits in ((PageTail.COPY, False), (PageTail.RECOMPUTE, True)):
        engine = make_engine(num_pages=8, max_pinned_fraction=0.5, page_tail=tail)
        if fits:
            engine.add(LONG, 1, pins=True)
        else:
            with pytest.raises(PrefixQuotaExceeded, match="needs 5 more pages"):
                engine.add(LONG, 1, pins=True)


@pytest.mark.parametrize("mode", PreemptionMode)
def test_a_preempted_request_copies_the_tail_again_or_reads_its_own(
    make_engine: Callable, mode: PreemptionMode
) -> None:
    engine = make_engine(num_pages=13, preemption_mode=mode)
    engine.add(LONG, 1, pins=True)
    engine.drain()
    for number in range(3):
        engine.add([*LONG, number], 14)
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert engine.num_copied >= 3
    assert (stats.restored_tokens > 0) == (mode is PreemptionMode.SWAP)


def test_a_client_may_have_its_share_of_the_quota(make_engine: Callable) -> None:
    engine = make_engine(num_pages=24, max_pinned_fraction=0.5)
    first = engine.add(PREFIX, 1, pins=True, client="a", pin_share=0.5)
    with pytest.raises(PrefixQuotaExceeded, match=r"3 more pages.*may have 6 of the 12.*has 4"):
        engine.add([*PREFIX, *range(12)], 1, pins=True, client="a", pin_share=0.5)
    engine.add([*PREFIX, *range(8)], 1, pins=True, client="a", pin_share=0.5)  # 4 are shared
    engine.add([*range(16)], 1, pins=True, client="b", pin_share=0.5)
    engine.drain()
    engine.unpin(first)
    with pytest.raises(PrefixQuotaExceeded, match="has 6"):
        engine.add([7, 7, 7, 7], 1, pins=True, client="a", pin_share=0.5)
    engine.drain()


# ---- what a prefix costs the queue


def test_the_first_prefix_does_not_hash_the_prompts_that_wait(make_engine: Callable) -> None:
    engine = make_engine(num_pages=4096, max_model_len=1024, max_num_seqs=1)
    waiting = [engine.add([number] * 800, 100) for number in range(50)]
    engine.add(PREFIX, 1, pins=True)
    assert sum(len(request.page_hashes) for request in waiting) == 0
    [out for one in list(engine.scheduler.roster.live) for out in engine.scheduler.abort(one.id)]


def test_a_prefix_hashes_of_a_prompt_that_has_no_room_beside_it_only_what_they_share(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=256, max_model_len=1024, max_num_seqs=1)
    strangers = [engine.add([number] * 800, 100) for number in range(50)]
    akin = engine.add([*PREFIX, *[1] * 800], 206)  # has room only because it shares its first pages
    prefix = engine.add(PREFIX, 1, pins=True)
    with pytest.raises(PagesPromised):
        engine.add([7] * 400, 1, pins=True)
    assert max(len(request.page_hashes) for request in strangers) <= 1
    assert len(akin.page_hashes) <= 8
    [out for one in list(engine.scheduler.roster.live) for out in engine.scheduler.abort(one.id)]
    assert prefix.is_finished


def test_prefixes_shorter_than_a_page_are_dropped_in_turn(make_engine: Callable) -> None:
    """With recurrent states nothing is kept of a page that is not full."""
    engine = make_engine(num_state_slots=8)
    first, second = (engine.add([number, 7], 1, pins=True) for number in (1, 2))
    engine.drain()
    for prefix in (first, second):
        engine.unpin(prefix)
    assert engine.scheduler.page_tables.pins.num_pages == 0
