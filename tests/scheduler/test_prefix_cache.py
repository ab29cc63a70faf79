"""What a request finds in the cache, and what it leaves there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from mlxserve.core.config import PageTail
from mlxserve.images.picture import Picture, PlacedPicture
from mlxserve.request import CacheMiss, CacheReport
from mlxserve.scheduler import prefix_cache
from tests.images.test_picture import picture

PAGE = 32
LARGE = {"page_size": PAGE, "max_num_batched_tokens": 2048, "max_model_len": 4096}


@pytest.mark.parametrize(("tail", "computed"), [(PageTail.COPY, 1), (PageTail.RECOMPUTE, PAGE)])
def test_a_fully_cached_prompt_computes_one_token(
    make_engine: Callable, tail: PageTail, computed: int
) -> None:
    engine = make_engine(num_pages=64, page_tail=tail, **LARGE)
    engine.add(engine.pages(1, 2, 3, 4), max_tokens=1)
    engine.drain()
    request = engine.add(engine.pages(1, 2, 3, 4), max_tokens=1)
    assert engine.spans(engine.launch()) == [("r1", 4 * PAGE - computed, computed)]
    assert request.num_cached == 4 * PAGE - computed
    engine.drain()
    assert engine.num_copied == (tail is PageTail.COPY)


def test_a_page_is_only_copied_where_there_is_one_to_spare(make_engine: Callable) -> None:
    """Until it is copied the cached page and its copy are two."""
    engine = make_engine(num_pages=5, **LARGE)
    engine.add(engine.pages(1, 2, 3, 4), max_tokens=1)
    engine.drain()
    other = engine.add([9], max_tokens=8)
    engine.launch()
    request = engine.add(engine.pages(1, 2, 3, 4), max_tokens=1)
    assert engine.spans(engine.launch()) == [("r1", 1, 1), ("r2", 3 * PAGE, PAGE)]
    assert request.num_cached == 3 * PAGE
    engine.drain()
    assert other.is_finished
    assert engine.num_copied == 0


def test_a_prompt_cached_but_for_its_last_token_computes_one_token(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    engine.add([*engine.pages(1, 2, 3, 4), 9], max_tokens=1)
    engine.drain()
    engine.add([*engine.pages(1, 2, 3, 4), 9], max_tokens=1)
    assert engine.spans(engine.launch()) == [("r1", 4 * PAGE, 1)]
    engine.drain()


def test_the_next_turn_of_a_chat_finds_the_pages_of_its_answer(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    first = engine.add(engine.pages(1), max_tokens=2 * PAGE)
    engine.drain()
    second = engine.add([*first.token_ids, *engine.pages(2)], max_tokens=1)
    engine.drain()
    # The answer's last token was never computed: it is not part of the third page.
    assert second.num_cached == 2 * PAGE


@pytest.mark.parametrize("num_cached", [0, 2])
def test_pages_of_a_prompt_with_images_are_hashed_once(
    make_engine: Callable, monkeypatch: pytest.MonkeyPatch, num_cached: int
) -> None:
    """Though the prompt is looked up before it is queued, to compute only images that are not cached."""
    engine = make_engine(num_pages=64, **LARGE)
    seen = picture(4, PAGE // 4)
    prompt = [*engine.pages(1), *seen.ids, *engine.pages(2), 2]
    placed = (PlacedPicture(PAGE, seen),)
    if num_cached:
        engine.add([*engine.pages(1), *seen.ids, 3], max_tokens=1, pictures=placed)
        engine.drain()
    num_hashed, plain = 0, prefix_cache.extend_hashes

    def counted(hashes: list[bytes], *others: Any) -> None:
        nonlocal num_hashed
        before = len(hashes)
        plain(hashes, *others)
        num_hashed += len(hashes) - before

    monkeypatch.setattr(prefix_cache, "extend_hashes", counted)
    request = engine.add(prompt, max_tokens=2 * PAGE, pictures=placed)
    engine.drain()
    assert request.num_cached == num_cached * PAGE
    assert num_hashed == len(request.page_hashes) == (len(request.token_ids) - 1) // PAGE
    assert engine.scheduler.planner.admission.num_found(request.asked) == len(prompt) // PAGE * PAGE
    assert (
        engine.scheduler.add(request.asked).page_hashes
        == request.page_hashes[: len(prompt) // PAGE]
    )


def test_pages_are_not_shared_across_salts(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    engine.add(engine.pages(1, 2, 3), salt=b"a")
    engine.drain()
    for salt in (b"b", b"", b"a"):
        engine.add(engine.pages(1, 2, 3), salt=salt)
    engine.drain()
    hits = [request.num_cached for request in engine.requests.values()]
    assert hits == [0, 0, 0, 3 * PAGE - 1]


def test_without_prefix_caching_nothing_is_found_or_kept(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, enable_prefix_caching=False, **LARGE)
    for _ in range(2):
        assert engine.add(engine.pages(1, 2, 3)).num_cached == 0
        engine.drain()
    assert engine.scheduler.pool.num_cached == 0
    assert engine.scheduler.stats().prefix_hits == 0


def test_hits_are_counted_once_per_admission(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, max_num_seqs=1, **LARGE)
    engine.add(engine.pages(1, 2, 3), max_tokens=1)
    engine.drain()
    engine.add([*engine.pages(1, 2, 3), 5], max_tokens=PAGE)
    engine.add([*engine.pages(1, 2, 3), 6], max_tokens=1)  # looked at again and again, in vain
    for _ in range(20):
        engine.step()
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (96 + 97, 96)
    engine.drain()
    stats = engine.scheduler.stats()
    assert (stats.prefix_queries, stats.prefix_hits) == (96 + 97 + 97, 192)
    assert (stats.resumed_queries, stats.resumed_hits) == (0, 0)


def test_what_an_aborted_prompt_had_computed_is_found_again(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    engine.add(engine.pages(1, 2, 3), max_tokens=9)
    engine.launch()
    engine.abort("r0")
    engine.read()
    assert engine.add(engine.pages(1, 2, 3)).num_cached == 0
    engine.launch()
    assert engine.requests["r1"].num_cached == 3 * PAGE - 1
    engine.drain()


def test_a_page_whose_last_token_was_dropped_is_not_published(make_engine: Callable) -> None:
    engine = make_engine(page_size=4)
    engine.add([1, 2, 3], max_tokens=9)
    engine.launch()
    [lazy] = engine.launch()
    assert lazy.end == 4
    engine.abort("r0")
    engine.read()
    engine.read()
    assert engine.scheduler.pool.num_cached == 0
    assert engine.scheduler.pool.num_used == 0


def test_a_request_that_computed_a_page_second_holds_the_first_one(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    prefix = engine.pages(1, 2, 3)  # too short to wait for
    for number in range(3):
        engine.add([*prefix, number], max_tokens=4)
    engine.launch()
    engine.launch()
    first, *others = engine.requests.values()
    own = [request.page_table[:3] for request in others]
    assert engine.scheduler.pool.num_used == 3 * 4
    engine.read()
    assert all(request.page_table[:3] == first.page_table[:3] for request in others)
    assert engine.scheduler.pool.num_used == 3 * 4  # the unread step still uses what they had
    assert all(engine.scheduler.pool.ref_count(page) == 1 for table in own for page in table)
    engine.read()
    assert engine.scheduler.pool.num_used == 3 + 3
    engine.drain()
    assert engine.scheduler.pool.num_duplicates == 2 * 3


def test_a_copied_page_that_became_the_same_again_is_given_back(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    engine.add(engine.pages(1, 2), max_tokens=1)
    engine.drain()
    for _ in range(4):
        engine.add(engine.pages(1, 2), max_tokens=4)
    engine.step()
    assert engine.scheduler.pool.num_used == 1 + 4
    for _ in range(2):
        engine.step()
    assert engine.num_copied == 4
    assert engine.scheduler.pool.num_used == 2 + 4  # and the page of each one's answer
    engine.drain()


def test_a_conversation_that_continues_after_a_tool_call_finds_its_pages(
    make_engine: Callable,
) -> None:
    found = []
    for seconds in (0, 60):
        engine = make_engine(num_pages=16)
        request = engine.add(list(range(100, 120)), 5)
        engine.drain()
        engine.scheduler.keep_pages(request.asked, until=seconds)
        engine.scheduler.page_tables.expire(1)
        for number in range(8):
            engine.add([number] * 20, 4)
            engine.drain()
        following = engine.add([*request.token_ids, 1, 2], 2)
        engine.drain()
        found.append(following.num_cached)
    assert found == [0, 24]


def test_a_page_that_was_known_before_it_was_computed_again_is_not_waited_for(
    make_engine: Callable,
) -> None:
    engine = make_engine(page_tail=PageTail.RECOMPUTE)
    prompt = engine.pages(1, 2, 3, 4)
    engine.add(prompt, 1)
    engine.drain()
    again = engine.add(prompt, 4)
    assert engine.spans(engine.launch()) == [(again.id, 12, 4)]
    engine.read()  # the audit: who leads has something left to compute
    assert engine.scheduler.stats().rebound_pages == 1
    engine.drain()


@pytest.mark.parametrize("tail", PageTail)
def test_a_request_that_skips_the_cache_neither_finds_nor_leaves_pages(
    make_engine: Callable, tail: PageTail
) -> None:
    engine = make_engine(page_tail=tail)
    prompt = engine.pages(1, 2, 3, 4, 5)
    engine.add(prompt, 6, skips_cache=True)
    engine.drain()
    pool, before = engine.scheduler.pool, engine.scheduler.stats()
    assert (pool.num_cached, before.prefix_queries) == (0, 0)
    assert before.prompt_tokens == 20
    first = engine.add(prompt, 6)
    engine.drain()
    num_cached = pool.num_cached
    skipping = engine.add(prompt, 6, skips_cache=True)
    engine.drain()
    assert (first.num_cached, skipping.num_cached) == (0, 0)
    assert skipping.cache == CacheReport(0, 0, 0, CacheMiss.OFF)
    assert pool.num_cached == num_cached
    assert engine.scheduler.stats().prefix_queries == 20
    assert engine.add(prompt, 6).num_cached == 0
    engine.drain()
    assert engine.scheduler.stats().prefix_hits > 0


def test_a_request_that_skips_the_cache_neither_leads_nor_follows(make_engine: Callable) -> None:
    engine = make_engine(num_pages=128, max_num_batched_tokens=16)
    prompt = engine.pages(*range(1, 11))
    for skips_cache in (True, False, True, False):
        engine.add(prompt, 2, skips_cache=skips_cache)
    engine.drain()
    assert engine.scheduler.stats().prefix_follow_waits == 1


# ---- what is reported

PROMPT = list(range(100, 122))  # 5 pages and a half


def report(engine: object, prompt: Sequence[int], **options: object) -> CacheReport | None:
    request = engine.add(prompt, **options)
    engine.drain()
    assert engine.reports[request.id] is request.cache
    return request.cache


def test_a_first_prompt_is_new_from_its_first_token(make_engine: Callable) -> None:
    assert report(make_engine(), PROMPT) == CacheReport(0, 0, 0, CacheMiss.NEW_TEXT)


def test_a_repeated_prompt_lacks_only_what_fills_no_page(make_engine: Callable) -> None:
    engine = make_engine()
    report(engine, PROMPT)
    assert report(engine, PROMPT) == CacheReport(5, 20, 20, CacheMiss.BELOW_ONE_PAGE)
    assert report(engine, PROMPT[:16]) == CacheReport(3, 15, 15, CacheMiss.BELOW_ONE_PAGE)
    assert report(engine, [7, 8]) == CacheReport(0, 0, 0, CacheMiss.BELOW_ONE_PAGE)


def test_the_first_token_that_differs_is_named(make_engine: Callable) -> None:
    for position in range(20):
        engine = make_engine()
        report(engine, PROMPT)
        changed = [*PROMPT[:position], 1, *PROMPT[position + 1 :]]
        pages = position // 4
        assert report(engine, changed) == CacheReport(
            pages, pages * 4, position, CacheMiss.NEW_TEXT
        ), position


def test_of_several_pages_at_a_place_the_nearest_counts(make_engine: Callable) -> None:
    engine = make_engine()
    for last in (1, 2, 3):
        report(engine, [9, 9, last, last, 5])
    assert report(engine, [9, 9, 2, 9, 5]) == CacheReport(0, 0, 3, CacheMiss.NEW_TEXT)


def test_what_was_evicted_is_said_to_have_been_there(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8)
    report(engine, PROMPT)
    report(engine, [1] * 28)
    assert report(engine, PROMPT) == CacheReport(0, 0, 0, CacheMiss.EVICTED)


def test_another_salt_of_the_same_client_is_named_and_of_others_is_not(
    make_engine: Callable,
) -> None:
    engine = make_engine()
    report(engine, PROMPT, salt=b"a", client="me")
    assert report(engine, PROMPT, salt=b"b", client="me").reason is CacheMiss.OTHER_SALT
    assert report(engine, PROMPT, salt=b"c", client="you") == CacheReport(
        0, 0, 0, CacheMiss.NEW_TEXT
    )


def test_without_prefix_caching_that_is_the_reason(make_engine: Callable) -> None:
    engine = make_engine(enable_prefix_caching=False)
    assert report(engine, PROMPT) == CacheReport(0, 0, 0, CacheMiss.OFF)


def test_a_prompt_that_never_started_has_no_report(make_engine: Callable) -> None:
    engine = make_engine()
    request = engine.add(PROMPT)
    engine.abort(request.id)
    assert engine.reports[request.id] is None


def test_a_preemption_does_not_change_the_report(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8)
    requests = [engine.add([number] * 9, 16) for number in range(3)]
    engine.drain()
    assert engine.scheduler.stats().num_preemptions
    assert [r.cache.reason for r in requests] == [CacheMiss.NEW_TEXT] * 3


def test_a_limited_number_of_salts_is_remembered(
    make_engine: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_cache, "MAX_REMEMBERED", 2)
    engine = make_engine(num_pages=64)
    for number in range(3):
        report(engine, [number] * 8, salt=b"a")
    assert report(engine, [0] * 8, salt=b"b").reason is CacheMiss.NEW_TEXT


# ---- what is forgotten


def test_a_forgotten_prompt_is_computed_again_and_what_another_one_has_stays(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    engine.add(engine.pages(1, 2, 3), max_tokens=PAGE)
    engine.add(engine.pages(1, 4), max_tokens=1)
    engine.add(engine.pages(1, 2, 3), salt=b"of another key", max_tokens=1)
    engine.drain()
    forgotten = engine.scheduler.forget_prompts(
        [engine.pages(1, 2, 3)], [[*engine.pages(1), 9]], b""
    )
    engine.audit()
    assert len(forgotten) == 2
    again = engine.add([*engine.pages(1, 2, 3), 9], max_tokens=1)
    other = engine.add([*engine.pages(1, 4), 9], max_tokens=1)
    of_key = engine.add([*engine.pages(1, 2, 3), 9], salt=b"of another key", max_tokens=1)
    engine.drain()
    assert [one.num_cached // PAGE for one in (again, other, of_key)] == [1, 2, 3]


def test_a_prompt_that_runs_or_has_a_name_is_not_forgotten(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, max_pinned_fraction=0.5, **LARGE)
    engine.add(engine.pages(1, 2), max_tokens=1, pins=True)
    running = engine.add(engine.pages(3, 4), max_tokens=8)
    while running.num_outputs < 2:
        engine.step()
    prompts = [engine.pages(1, 2), engine.pages(3, 4)]
    assert engine.scheduler.forget_prompts(prompts, [], b"") == set()
    engine.drain()
    assert len(engine.scheduler.forget_prompts(prompts, [], b"")) == 2
    engine.audit()


def both_ways(num_rows: int, text: int = 3) -> Picture:
    """A picture whose rows attend to one another, between tokens of text."""
    ids = [text, *([900] * num_rows), text]
    return Picture.from_prompt(ids, 900, {}, None, is_bidirectional=True)


@pytest.mark.parametrize("options", [{}, {"window": 40, "longest_block": 80}])
def test_a_hit_ends_before_an_image_that_one_chunk_computes(
    make_engine: Callable, options: dict[str, Any]
) -> None:
    """The rows of the image begin in the second page and end in the fourth, in which the prompts differ."""
    engine = make_engine(num_pages=64, **LARGE, **options)
    seen = both_ways(80)
    before = [*engine.pages(1), *([4] * 5)]
    placed = (PlacedPicture(len(before), seen),)
    engine.add([*before, *seen.ids, *([5] * 40)], max_tokens=1, pictures=placed)
    engine.drain()
    request = engine.add([*before, *seen.ids, *([6] * 9)], max_tokens=1, pictures=placed)
    assert engine.spans(engine.launch()) == [("r1", PAGE, len(request.token_ids) - PAGE)]
    assert request.cache == CacheReport(1, PAGE, PAGE, CacheMiss.INSIDE_IMAGE)
    engine.drain()


def test_a_page_is_copied_up_to_an_image_that_one_chunk_computes(make_engine: Callable) -> None:
    """The last token of a cached prompt is computed again, and with it the image that it belongs to."""
    engine = make_engine(num_pages=64, **LARGE)
    ids = [3, *([900] * 23)]
    seen = Picture.from_prompt(ids, 900, {}, None, is_bidirectional=True)
    prompt = [*engine.pages(1), *([4] * 8), *seen.ids]
    for _ in range(2):
        engine.add(prompt, max_tokens=1, pictures=(PlacedPicture(PAGE + 8, seen),))
        engine.drain()
    assert [spans for spans in engine.trace if spans][-1] == [("r1", PAGE + 9, 23)]
    assert engine.num_copied == 1


def test_a_hit_that_ends_behind_an_image_is_taken(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    seen = both_ways(40)
    prompt = [*seen.ids, *engine.pages(1, 2)]
    placed = (PlacedPicture(0, seen),)
    for _ in range(2):
        request = engine.add([*prompt, 9], max_tokens=1, pictures=placed)
        engine.drain()
    assert request.num_cached == len(prompt) // PAGE * PAGE
