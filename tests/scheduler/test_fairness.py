"""Clients share the engine, for any length and number of their requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from mlxserve.scheduler.fairness import DECODE_WEIGHT, PREFILL_WEIGHT, FairShare


def test_a_client_that_comes_back_is_owed_nothing_for_its_absence() -> None:
    fair_share = FairShare()
    fair_share.arrive("a")
    fair_share.charge("a", prefill=1000)
    fair_share.arrive("b")
    assert fair_share.tokens_of("b") == 1000 * PREFILL_WEIGHT
    fair_share.charge("a", decode=5)
    fair_share.leave("b")
    fair_share.charge("a", decode=5)
    fair_share.arrive("b")
    assert (
        fair_share.tokens_of("b")
        == fair_share.tokens_of("a")
        == 1000 * PREFILL_WEIGHT + 10 * DECODE_WEIGHT
    )


def test_a_client_that_had_more_than_others_keeps_its_debt_while_they_are_there() -> None:
    fair_share = FairShare()
    for client in "ab":
        fair_share.arrive(client)
    fair_share.charge("a", prefill=1000)
    fair_share.leave("a")
    fair_share.arrive("a")
    assert fair_share.tokens_of("a") - fair_share.tokens_of("b") == 1000
    fair_share.leave("a")
    fair_share.leave("b")
    fair_share.check(Counter())
    for client in "ab":
        fair_share.arrive(client)
    assert fair_share.tokens_of("a") == fair_share.tokens_of("b")


def test_a_later_request_of_a_client_changes_no_counter() -> None:
    fair_share = FairShare()
    fair_share.arrive("a")
    fair_share.arrive("b")
    fair_share.charge("b", prefill=7)
    fair_share.arrive("a")
    fair_share.leave("a")
    assert fair_share.tokens_of("a") == 0
    fair_share.check(Counter("ab"))


def serve(engine: object, steps: int) -> Counter[str]:
    """Tokens that each client got in this number of steps."""
    got: Counter[str] = Counter()
    for _ in range(steps):
        for chunk in engine.step():
            got[chunk.request.asked.client] += chunk.length
    return got


def test_a_client_with_many_requests_gets_no_more_than_one_with_few(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, max_num_seqs=2, max_num_batched_tokens=16)
    for number in range(200):
        engine.add([number % 10, *range(20)], 4, client="many")
    for number in range(20):
        engine.add([number % 10, *range(30, 50)], 4, client="few")
    got = serve(engine, 60)
    assert got["few"] == pytest.approx(got["many"], rel=0.1)


def test_requests_of_another_length_do_not_change_the_shares(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, max_num_seqs=2, max_num_batched_tokens=16)
    for number in range(60):
        engine.add([number, *range(70)], 2, client="long")
        for repeat in range(10):
            engine.add([number, repeat + 100, 3], 2, client="short")
    engine.scheduler.pool.check()
    fair_share, worst = engine.scheduler.roster.fair_share, 0
    for _ in range(300):
        engine.step()
        worst = max(worst, abs(fair_share.tokens_of("long") - fair_share.tokens_of("short")))
    assert {r.asked.client for r in engine.scheduler.requests()[1]} == {"long", "short"}, (
        "not backlogged"
    )
    assert worst <= 2 * 71 * PREFILL_WEIGHT  # arXiv 2401.00588: twice the longest prompt


def test_found_tokens_are_not_charged(make_engine: Callable) -> None:
    engine = make_engine()
    engine.add([1] * 21, 1, client="first")
    engine.drain()
    engine.add([1] * 21, 1, client="second")
    engine.launch()
    assert engine.scheduler.roster.fair_share.tokens_of("second") == PREFILL_WEIGHT
    engine.drain()


def test_what_a_preemption_makes_it_compute_again_is_not_charged(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8, enable_prefix_caching=False)
    for number in range(3):
        engine.add([number] * 9, 16, client="me")
    spent = 0
    while engine.scheduler.has_work:
        spent = max(spent, engine.scheduler.roster.fair_share.tokens_of("me"))
        engine.step()
    assert engine.scheduler.stats().num_preemptions
    assert spent <= 3 * (9 * PREFILL_WEIGHT + 15 * DECODE_WEIGHT)


def test_an_urgent_class_does_not_starve_the_other(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, max_num_seqs=1, ageing_steps=5)
    patient = engine.add([1, 2, 3], 2, priority=3)
    for number in range(40):
        engine.add([number] * 3, 2)
        engine.step()
    assert patient.is_finished
    engine.drain()


def test_counters_begin_anew_once_nobody_is_there() -> None:
    fair_share = FairShare()
    for client in "ab":
        fair_share.arrive(client)
        fair_share.charge(client, decode=50)
    for client in "ab":
        fair_share.leave(client)
    for client in "bca":
        fair_share.arrive(client)
        fair_share.charge(client, decode=1)
        fair_share.check(Counter("bca"[: "bca".index(client) + 1]))
    assert fair_share.tokens_of("a") == 4, "lifted to the lowest counter of those that are there"
