"""Pinned models: they stay unused, and while another model needs memory."""

from __future__ import annotations

import asyncio

import pytest

from mlxserve.core.errors import OutOfMemory
from tests.chat.registry.fakes import PAGE, in_loop
from tests.chat.registry.test_registry import shelf_of
from tests.waiting import until


@in_loop
async def test_a_pinned_model_stays_however_long_it_is_unused() -> None:
    one = shelf_of([100, 100], keep_alive=5.0)
    await one.touch("a", "b")
    one.registry.keep("a", is_pinned=True)
    one.clock.now += 60
    one.registry.look()
    await until(lambda: one.loaded == ["a"])
    state = one.registry.state("a")
    assert (state.is_pinned, state.seconds_left) == (True, None)
    one.registry.keep("a", is_pinned=False)
    one.registry.look()
    await until(lambda: one.loaded == [])


@in_loop
async def test_another_model_is_unloaded_in_the_place_of_a_pinned_one() -> None:
    one = shelf_of([100, 100, 100], budget=250)
    await one.touch("a", "b")
    one.registry.keep("a", is_pinned=True)
    await one.touch("c")
    assert one.loaded == ["a", "c"], "b was used later than a, which is pinned"


@in_loop
async def test_a_model_that_does_not_fit_beside_the_pinned_ones_is_refused_at_once() -> None:
    one = shelf_of([100, 150], budget=200)
    await one.touch("a")
    one.registry.keep("a", is_pinned=True)
    with pytest.raises(OutOfMemory, match="Unpin or unload one of them: a"):
        await one.touch("b")
    assert one.loaded == ["a"]
    one.registry.keep("a", is_pinned=False)
    await one.touch("b")
    assert one.loaded == ["b"]


@in_loop
async def test_the_pool_of_a_pinned_model_still_shrinks_for_another() -> None:
    one = shelf_of([100, 100], budget=260, most=10)
    await one.touch("a")
    one.registry.keep("a", is_pinned=True)
    assert one.models["a"].num_pages == 10
    await one.touch("b")
    assert one.loaded == ["a", "b"]
    assert one.taken <= 260
    assert one.models["a"].num_pages * PAGE <= 40


@in_loop
async def test_a_request_that_waits_for_memory_is_refused_once_its_holder_is_pinned() -> None:
    one = shelf_of([100, 100], budget=150)
    async with one.registry.use("a"):
        waiting = asyncio.create_task(one.touch("b"))
        await until(lambda: one.registry.state("b").num_requests == 1)
        one.registry.keep("a", is_pinned=True)
        with pytest.raises(OutOfMemory, match="pinned"):
            await waiting
    assert one.loaded == ["a"]


@in_loop
async def test_unloading_by_name_ends_a_pin() -> None:
    one = shelf_of([100], keep_alive=5.0)
    await one.touch("a")
    one.registry.keep("a", is_pinned=True)
    assert await one.registry.unload("a")
    assert not one.registry.state("a").is_pinned
    await one.touch("a")
    one.clock.now += 60
    one.registry.look()
    await until(lambda: one.loaded == [])
