"""Every prompt reports how much of it was cached, and why no more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from mlxserve.request import CacheMiss, CacheReport
from mlxserve.scheduler import explain

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


@pytest.mark.parametrize("position", range(20))
def test_the_first_token_that_differs_is_named(make_engine: Callable, position: int) -> None:
    engine = make_engine()
    report(engine, PROMPT)
    changed = [*PROMPT[:position], 1, *PROMPT[position + 1 :]]
    pages = position // 4
    assert report(engine, changed) == CacheReport(pages, pages * 4, position, CacheMiss.NEW_TEXT)


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
    monkeypatch.setattr(explain, "MAX_REMEMBERED", 2)
    engine = make_engine(num_pages=64)
    for number in range(3):
        report(engine, [number] * 8, salt=b"a")
    assert report(engine, [0] * 8, salt=b"b").reason is CacheMiss.NEW_TEXT
