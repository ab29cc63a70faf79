"""The work of a step bounds its chunks, and every step goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mlxserve.core.forward_work import ForwardWork, WorkBudget

PAGE = 32
OPTIONS = {"num_pages": 512, "page_size": PAGE, "max_model_len": 8192}
FORWARD = ForwardWork(1000, ((1, None),))


def budget(rows_at_the_start: float) -> WorkBudget:
    """For about so many rows without context."""
    return WorkBudget(FORWARD, rows_at_the_start * 1000)


def lengths(make_engine: Callable[..., Any], num_tokens: int, work: WorkBudget | None) -> list[int]:
    """Of the chunks of one prompt, which is alone."""
    engine = make_engine(**OPTIONS, max_num_batched_tokens=512)
    engine.add([1] * num_tokens, max_tokens=1)
    found = []
    while engine.scheduler.has_work:
        chunks = engine.launch(work=work)
        found += [chunk.length for chunk in chunks]
        engine.read()
    return found


def test_chunks_shrink_with_the_context_where_the_device_is_slow(
    make_engine: Callable[..., Any],
) -> None:
    found = lengths(make_engine, 6000, budget(512))
    assert sum(found) == 6000
    assert found[0] == 320  # 512,000 multiply-adds, with up to 512 positions: 338 rows, on a page
    assert found[:-1] == sorted(found[:-1], reverse=True)
    assert found[-2] == 64


def test_a_fast_device_is_not_cut(make_engine: Callable[..., Any]) -> None:
    assert lengths(make_engine, 6000, budget(10_000)) == lengths(make_engine, 6000, None)


@pytest.mark.parametrize("rows", [0, 1, 31])
def test_a_prompt_always_gets_a_page(rows: int, make_engine: Callable[..., Any]) -> None:
    assert lengths(make_engine, 200, budget(rows)) == [32] * 6 + [8]


def test_no_step_has_more_work_than_its_budget_or_a_page(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(**OPTIONS, max_num_batched_tokens=512)
    for number in range(4):
        engine.add([number] * 900, max_tokens=3)
    work = budget(300)
    while engine.scheduler.has_work:
        chunks = engine.launch(work=work)
        prefills = [chunk for chunk in chunks if chunk.start < chunk.request.prefill_end]
        used = sum(FORWARD.of_chunk(chunk.start, chunk.length) for chunk in chunks)
        assert used <= work.amount or len(prefills) <= 1
        engine.read()


def test_decodes_are_not_cut_and_count(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(**OPTIONS, max_num_batched_tokens=512)
    engine.add([1] * 2000, max_tokens=30)
    while not any(chunk.samples for chunk in engine.launch()):
        engine.read()
    engine.read()
    engine.add([2] * 500, max_tokens=1)
    beside = budget(100)  # of which a decode at position 2,000 takes 3
    assert engine.spans(engine.launch(work=beside)) == [("r0", 2000, 1), ("r1", 0, 64)]
    engine.read()
    assert engine.spans(engine.launch(work=budget(0))) == [("r0", 2001, 1), ("r1", 64, 32)]


def test_a_prompt_that_may_not_be_split_is_not_held_back(make_engine: Callable[..., Any]) -> None:
    engine = make_engine(
        num_pages=64,
        page_size=PAGE,
        max_model_len=512,
        max_num_batched_tokens=512,
        enable_chunked_prefill=False,
    )
    engine.add([1] * 500, max_tokens=1)
    assert engine.spans(engine.launch(work=budget(1))) == [("r0", 0, 500)]
