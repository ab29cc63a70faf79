"""Which requests start in a step, and which wait for memory, budget or a leader."""

from __future__ import annotations

from collections.abc import Callable

import pytest

PAGE = 32
LARGE = {"page_size": PAGE, "max_num_batched_tokens": 2048, "max_model_len": 4096}


def test_a_16_page_prompt_with_12_pages_in_use_by_others_is_admitted_with_4_free(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=20, **LARGE)
    engine.add(engine.pages(*range(1, 13)) + [1] * 100, max_tokens=8)
    engine.launch()
    engine.read()
    assert engine.scheduler.pool.num_free == 4
    other = engine.add(engine.pages(*range(1, 17)))
    chunks = engine.launch()
    assert engine.spans(chunks) == [("r0", 484, 1), ("r1", 12 * PAGE, 4 * PAGE)]
    assert other.num_cached == 12 * PAGE
    assert engine.scheduler.pool.num_free == 0
    engine.drain()


def test_hits_that_are_free_leave_the_free_pages_and_are_counted(make_engine: Callable) -> None:
    engine = make_engine(num_pages=20, **LARGE)
    engine.add([*engine.pages(*range(1, 13)), 1], max_tokens=1)
    engine.drain()
    engine.add([*engine.pages(21, 22, 23, 24), 1], max_tokens=8)
    engine.step()
    assert engine.scheduler.pool.num_free == 15
    engine.add(engine.pages(*range(1, 17)))
    assert "r2" not in [name for name, *_ in engine.spans(engine.launch())]
    engine.drain()


def test_two_prompts_of_1024_with_512_cached_each_use_1024_of_a_2048_budget(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=256, **LARGE)
    first, second, third = range(1, 17), range(21, 37), range(41, 105)
    engine.add([*engine.pages(*first), 1], max_tokens=1)
    engine.add([*engine.pages(*second), 1], max_tokens=1)
    engine.drain()
    for half in (first, second):
        engine.add(engine.pages(*half, *(n + 100 for n in half)))
    engine.add(engine.pages(*third))
    assert engine.spans(engine.launch()) == [
        ("r2", 512, 512),
        ("r3", 512, 512),
        ("r4", 0, 1024),
    ]
    engine.drain()


def test_requests_are_admitted_by_class_and_then_by_arrival(make_engine: Callable) -> None:
    engine = make_engine(num_pages=256, max_num_seqs=1, **LARGE)
    for priority in (1, 0, 1, 0):
        engine.add([1] * 5, max_tokens=1, priority=priority)
    engine.drain()
    assert [step[0][0] for step in engine.trace if step] == ["r1", "r3", "r0", "r2"]


def test_after_a_preemption_admission_leaves_room_to_grow(make_engine: Callable) -> None:
    preemptions = []
    for growth in (0, 2):
        engine = make_engine(num_pages=40, page_size=4, max_model_len=64, growth_pages=growth)
        for number in range(24):
            engine.add([number % 11] * 9, max_tokens=30)
        engine.drain()
        preemptions.append(engine.scheduler.stats().num_preemptions)
    assert preemptions[1] < preemptions[0] / 2


def test_four_cold_requests_compute_and_hold_their_long_prefix_once(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **{**LARGE, "max_num_batched_tokens": 256})
    prefix = engine.pages(*range(1, 17))
    for number in range(4):
        engine.add(prefix + [50 + number] * PAGE, max_tokens=8)
    held = 0
    for _ in range(12):
        engine.step()
        held = max(held, engine.scheduler.pool.num_used)
    assert held == 16 + 4 * 2
    assert engine.num_computed < 16 * PAGE + 4 * (PAGE + 8)
    assert engine.scheduler.stats().prefix_follow_waits == 3
    engine.drain()


def test_a_follower_starts_when_its_leader_is_aborted(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **{**LARGE, "max_num_batched_tokens": 256})
    prefix = engine.pages(*range(1, 17))
    engine.add(prefix)
    engine.add(prefix)
    engine.launch()
    assert engine.spans(engine.launch()) == [("r0", 256, 256)]
    engine.abort("r0")
    engine.read()
    assert engine.spans(engine.launch()) == [("r1", 256, 256)]
    engine.drain()


def test_requests_after_a_follower_do_not_wait_for_it(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **{**LARGE, "max_num_batched_tokens": 256})
    prefix = engine.pages(*range(1, 8))
    engine.add(prefix)
    engine.add(prefix)
    engine.add([9] * 20)
    assert engine.spans(engine.launch()) == [("r0", 0, 224), ("r2", 0, 20)]
    engine.drain()


@pytest.mark.parametrize("client", ["", "another"])
@pytest.mark.parametrize("num_followers", [15, 16, 100])
def test_any_number_of_followers_leaves_the_others_their_turn(
    make_engine: Callable, num_followers: int, client: str
) -> None:
    options = {**LARGE, "max_num_batched_tokens": 256, "long_prefill_token_threshold": 128}
    engine = make_engine(num_pages=1024, **options)
    prefix = engine.pages(*range(1, 40))
    for number in range(1 + num_followers):
        engine.add([*prefix, 100 + number], 1)
    short = engine.add([9] * 10, 1, client=client)
    assert (short.id, 0, 10) in engine.spans(engine.launch())
    assert engine.scheduler.stats().num_waiting == num_followers
    engine.drain()
    assert engine.scheduler.stats().prefix_follow_waits == num_followers
    assert engine.scheduler.stats().prefix_hits == num_followers * len(prefix)


def test_followers_take_their_places_again_when_the_prefix_is_there(make_engine: Callable) -> None:
    options = {**LARGE, "max_num_batched_tokens": 256, "long_prefill_token_threshold": 128}
    engine = make_engine(num_pages=256, **{**options, "max_num_seqs": 2})
    prefix = engine.pages(*range(1, 17))
    followers = [engine.add([*prefix, 50 + number], 1) for number in range(4)]
    others = [engine.add([9 + number] * 600, 1) for number in range(3)]
    engine.step()
    assert engine.scheduler.requests()[1] == [*others[1:], *followers[1:]], "beside the queue"
    while not all(request.is_finished for request in followers):
        engine.step()
        assert not others[1].has_run or all(request.has_run for request in followers)
    engine.drain()


def test_a_prompt_is_capped_only_for_requests_that_can_use_the_step(make_engine: Callable) -> None:
    options = {**LARGE, "max_num_batched_tokens": 256, "long_prefill_token_threshold": 64}
    prefix = [*range(1, 1000)]
    engine = make_engine(num_pages=128, **options)
    for number in range(4):
        engine.add([*prefix, 2000 + number], 1)  # three follow
    assert [engine.spans(engine.step()) for _ in range(4)] == [
        [("r0", 0, 64)],
        *([("r0", 64 + number * 256, 256)] for number in range(3)),
    ]
    engine.drain()
    engine = make_engine(num_pages=128, **{**options, "max_num_seqs": 1})
    for number in range(4):
        engine.add([number] * 500, 1)
    assert engine.spans(engine.step()) == [("r0", 0, 256)]
    engine.drain()
    engine = make_engine(num_pages=128, **options)
    for number in range(4):
        engine.add([number] * 500, 1)
    assert engine.spans(engine.step()) == [(f"r{number}", 0, 64) for number in range(4)]
    engine.drain()


def test_a_prefix_of_three_pages_is_not_waited_for(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    engine.add(engine.pages(1, 2, 3, 4))
    engine.add(engine.pages(1, 2, 3, 4))
    assert len(engine.launch()) == 2
    engine.drain()


def test_siblings_of_other_salts_are_strangers(make_engine: Callable) -> None:
    engine = make_engine(num_pages=64, **LARGE)
    for salt in (b"a", b"b"):
        engine.add(engine.pages(*range(1, 9)), salt=salt)
    assert len(engine.launch()) == 2
    engine.drain()


def test_the_source_of_a_copied_tail_is_counted_until_it_is_copied(make_engine: Callable) -> None:
    engine = make_engine(num_pages=8)
    engine.add(list(range(1, 9)), 1)
    engine.drain()  # both of its pages are cached, and no request holds them
    again = engine.add(list(range(1, 9)), 2)  # takes a page, and a copy of the other one
    other = engine.add([11] * 24, 2)  # needs the six that are left, of which one is the source
    planned = {chunk.request for chunk in engine.launch()}
    assert engine.scheduler.stats().tail_copies == 1
    assert planned == {again}
    engine.drain()
    assert other.is_finished
