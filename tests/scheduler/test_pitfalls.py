"""What went wrong in other engines, P1 to P15, each with a test that it does not happen here.

The numbers and their sources (issues of vLLM, SGLang and others) are those of the catalogue that the
scheduler was written against. `tests/mutation` plants each pitfall, and its test has to find it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from mlxserve.core.config import PageTail, PreemptionMode
from mlxserve.core.errors import PromptTooLong
from mlxserve.scheduler import preemption

PREFIX = list(range(100, 116))  # 4 pages


def test_p01_a_match_does_not_outlive_an_eviction(make_engine: Callable) -> None:
    """vllm#18957, nano-vllm#207."""
    engine = make_engine(num_pages=8, max_num_seqs=2)
    engine.add([*PREFIX, 116], 1)
    engine.drain()
    grower = engine.add([1] * 5, 20)
    engine.step()
    late = engine.add([*PREFIX, 116, *range(12)], 2)
    engine.launch()  # matches four pages; what else it needs is not free
    assert len(engine.scheduler.page_tables.cache.match(late)) == 4
    while not engine.scheduler.pool.num_evicted:
        assert not late.page_table
        engine.step()
    engine.drain()  # the ghost engine sees over what it attends
    assert grower.is_finished
    assert late.num_cached < 16


def test_p02_prompts_that_only_fit_one_after_the_other_do_not_thrash(make_engine: Callable) -> None:
    """vllm#25538: admitted for a first chunk, then preempted, again and again."""
    engine = make_engine(
        num_pages=60,
        page_size=32,
        max_num_batched_tokens=128,
        max_model_len=1920,
        long_prefill_token_threshold=64,
    )
    for number in (1, 2):
        engine.add([number] * 1600, max_tokens=4)
    engine.drain()
    assert engine.scheduler.stats().num_preemptions == 0
    assert engine.num_computed == 2 * (1600 + 3)


def test_p03_decodes_that_grow_do_not_preempt_each_other_for_ever(make_engine: Callable) -> None:
    """vllm#44594: after the first preemption, admission leaves room to grow."""
    engine = make_engine(num_pages=40, page_size=4, max_model_len=64)
    for number in range(24):
        engine.add([number % 11] * 9, max_tokens=30)
    engine.drain()
    assert 0 < engine.scheduler.stats().num_preemptions <= 12


def test_p04_the_victim_is_the_one_that_costs_least(make_engine: Callable) -> None:
    """vllm#54644: the youngest may have computed most."""
    engine = make_engine(num_pages=14, max_num_batched_tokens=64)
    cheap = engine.add([1] * 8, 24)
    dear = engine.add([2] * 32, 24)
    while not engine.scheduler.stats().num_preemptions:
        engine.step()
    assert (cheap.num_preemptions, dear.num_preemptions) == (1, 0)
    engine.drain()


def test_p05_a_request_that_cannot_free_a_page_now_is_not_a_victim(make_engine: Callable) -> None:
    """vllm#49675: victims whose pages were in flight, or held by others as well, one after the other."""
    engine = make_engine(num_pages=8)
    twins = [engine.add([1] * 8, 8) for _ in range(2)]
    engine.launch()
    assert preemption.choose_victim(twins, engine.scheduler.pool, 3) is None  # in flight
    engine.read()
    assert twins[0].page_table == twins[1].page_table  # the same content
    assert preemption.choose_victim(twins, engine.scheduler.pool, 3) is None
    engine.drain()


def test_p06_holders_of_restored_pages_go_before_requests_without_any(
    make_engine: Callable,
) -> None:
    """vllm#44560: loaded requests, holding all their pages, waited for a head that found none."""
    engine = make_engine(num_pages=8, preemption_mode=PreemptionMode.SWAP)
    for number in range(3):
        engine.add([number] * 9, 16)
    while not engine.loads:
        while engine.unread:
            engine.read()
        engine.launch()
    holder = engine.loads[0].request.id
    engine.add([7] * 25, 4, priority=-1)  # goes before all waiting requests, and finds no memory
    engine.finish_load(engine.loads[0])
    while engine.unread:
        engine.read()
    assert holder in {chunk.request.id for chunk in engine.launch()}
    engine.drain()


def test_p07_a_request_that_is_read_from_disk_counts_as_running(make_engine: Callable) -> None:
    """vLLM's test_worker_slot_overflow."""
    engine = make_engine(
        num_pages=8,
        max_num_seqs=2,
        preemption_mode=PreemptionMode.SWAP,
    )
    for number in range(2):
        engine.add([number] * 9, 16)
    for number in range(8):
        engine.add([number], 2)
    was_reading = False
    while engine.scheduler.has_work:
        if not engine.launch() and engine.loads:  # the disk is slower than any step
            engine.finish_load(engine.loads[0])
        while engine.unread:
            engine.read()
        was_reading |= bool(engine.loads)
        assert engine.scheduler.stats().num_running <= 2
    assert was_reading


def test_p08_a_long_prompt_does_not_keep_the_others_out_of_a_step(make_engine: Callable) -> None:
    engine = make_engine(
        num_pages=256,
        page_size=32,
        max_num_batched_tokens=2048,
        max_model_len=4096,
        long_prefill_token_threshold=512,
    )
    engine.add([1] * 4000, 1)
    for number in (2, 3, 4):
        engine.add([number] * 40, 1)
    assert engine.spans(engine.launch()) == [("r0", 0, 512), *((f"r{n}", 0, 40) for n in (1, 2, 3))]
    engine.drain()


def test_p08_a_request_that_lacks_memory_is_overtaken_once(make_engine: Callable) -> None:
    engine = make_engine(num_pages=10, max_model_len=40)
    engine.add([1] * 20, max_tokens=12)
    engine.launch()
    engine.add([2] * 24, max_tokens=1)
    for number in (3, 4):
        engine.add([number] * 3, max_tokens=1)
    engine.drain()
    started = [name for step in engine.trace for name, start, _ in step if start == 0]
    assert started == ["r0", "r2", "r1", "r3"]
    assert engine.scheduler.stats().overtakes == 1


def test_p09_a_prompt_with_less_than_a_page_of_budget_is_deferred_and_others_start(
    make_engine: Callable,
) -> None:
    """vllm-ascend#16916: alignment left nothing of a chunk, and the loop ended."""
    engine = make_engine(
        num_pages=512, max_num_batched_tokens=64, page_size=32, max_model_len=4096, max_num_seqs=8
    )
    engine.add([1] * 5, max_tokens=9)
    engine.launch()
    for number, length in ((2, 70), (3, 90), (4, 3)):
        engine.add([number] * length, max_tokens=9)
    # 63 are left: a page of r1, then 31, too few for r2's first page but enough for all of r3.
    assert engine.spans(engine.launch()) == [("r0", 5, 1), ("r1", 0, 32), ("r3", 0, 3)]
    assert engine.scheduler.stats().align_deferrals == 1
    engine.drain()


@pytest.mark.parametrize(("tail", "computed"), [(PageTail.COPY, 1), (PageTail.RECOMPUTE, 4)])
def test_p10_a_prompt_that_is_cached_whole_computes_something(
    make_engine: Callable, tail: PageTail, computed: int
) -> None:
    """vllm#3239, vllm#11186: zero new tokens."""
    engine = make_engine(page_tail=tail)
    for _ in range(2):
        engine.add(PREFIX, 1)
        engine.drain()
    assert [step for step in engine.trace if step][-1] == [("r1", 16 - computed, computed)]


def test_p11_what_a_step_matches_it_does_not_evict(make_engine: Callable) -> None:
    """vllm#33775. The prompt takes the whole pool: four pages that are cached, and all others."""
    engine = make_engine(num_pages=8)
    engine.add([*PREFIX, 1], 1)
    engine.drain()
    request = engine.add([*PREFIX, *[2] * 15], 1)
    assert engine.spans(engine.launch()) == [("r1", 16, 15)]
    assert request.num_cached == 16
    engine.drain()


def test_p12_neither_retries_nor_preemptions_count_as_hits(make_engine: Callable) -> None:
    """vllm#25787, vllm#48860."""
    engine = make_engine(num_pages=4, max_model_len=16, max_num_seqs=2)
    for number in range(2):
        engine.add([number] * 5, max_tokens=10)
    engine.add([0] * 5, max_tokens=1)  # looked at in every step, and has no place
    engine.drain()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_queries == 3 * 5
    assert stats.prefix_hits <= 4
    assert stats.resumed_queries > 0


def test_p13_a_cold_request_is_not_passed_by_cached_ones(make_engine: Callable) -> None:
    """sglang#31954: longest match first starves requests that match nothing."""
    engine = make_engine(num_pages=64, max_num_seqs=1)
    engine.add(PREFIX, 1)
    engine.drain()
    cold = engine.add([1] * 20, 2)
    for number in range(10):
        engine.add([*PREFIX, number], 2)
    (first,) = engine.launch()
    assert first.request is cold
    engine.drain()


def test_p14_a_prompt_that_can_never_fit_is_refused_and_delays_no_other(
    make_engine: Callable,
) -> None:
    engine = make_engine(num_pages=4, max_model_len=64)
    with pytest.raises(PromptTooLong, match="the cache's 4 pages hold 16"):
        engine.add([1] * 17)
    engine.add([1] * 9)
    engine.drain()


def test_p15_every_hit_is_a_token_that_is_not_computed(make_engine: Callable) -> None:
    """vllm#53395: 94.6 % of hits made nothing faster."""
    computed, hits = {}, {}
    for is_on in (True, False):
        engine = make_engine(enable_prefix_caching=is_on)
        for number in range(8):
            engine.add([*PREFIX[: 4 * (number % 5)], *[number] * (number + 1)], 3)
            engine.drain()
        computed[is_on] = engine.num_computed
        hits[is_on] = engine.scheduler.stats().prefix_hits
    assert hits[False] == 0
    assert computed[False] - computed[True] == hits[True] > 30
