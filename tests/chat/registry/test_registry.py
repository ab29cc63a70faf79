"""ModelRegistry: users, loading, room, keep-alive and failures, with models that take no time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

import pytest

from mlxserve.chat.registry.memory import MIN_SECONDS
from mlxserve.chat.registry.registry import MAX_WAIT_SECONDS, ModelRegistry
from mlxserve.core.errors import (
    EngineStopped,
    OutOfMemory,
    PagesPromised,
    QueueFull,
    UnsupportedModel,
)
from tests.chat.registry.fakes import Clock, FakeModel, in_loop
from tests.waiting import until


class Shelf:
    """A registry of models a, b, c … with its clock and what has happened."""

    def __init__(
        self, *models: FakeModel, log: list[str], budget: float = 10_000, **options: Any
    ) -> None:
        self.log = log
        self.clock = Clock()
        self.models = {model.model_name: model for model in models}
        self.registry = ModelRegistry(
            [model.on_shelf(**options) for model in models], budget=budget, clock=self.clock
        )

    async def touch(self, *names: str) -> None:
        """Use each for a moment, one after the other in time."""
        for name in names:
            self.clock.now += 1
            async with self.registry.use(name) as chat:
                assert chat is self.models[name]

    @property
    def loaded(self) -> list[str]:
        return [name for name in self.models if self.registry.loaded(name) is not None]

    @property
    def taken(self) -> int:
        return sum(self.models[name].stats().planned.total for name in self.loaded)


def shelf_of(
    sizes: Sequence[int], *, budget: float = 10_000, most: int = 2, needs: int = 0, **options: Any
) -> Shelf:
    log: list[str] = []
    models = [
        FakeModel(name, log, weights=size, most=most, needs=needs)
        for name, size in zip("abcd", sizes, strict=False)
    ]
    return Shelf(*models, log=log, budget=budget, **options)


# ---- loading


@in_loop
async def test_a_model_is_loaded_once_for_all_that_wait_for_it() -> None:
    one = shelf_of([100])
    one.models["a"].loads.clear()
    waiting = [asyncio.create_task(one.touch("a")) for _ in range(5)]
    await until(lambda: one.log)
    one.models["a"].loads.set()
    await asyncio.gather(*waiting)
    assert one.log == ["load a"]


@in_loop
async def test_one_is_loaded_at_a_time_in_the_order_of_asking() -> None:
    one = shelf_of([100, 100, 100])
    for model in one.models.values():
        model.loads.clear()
    waiting = [asyncio.create_task(one.touch(name)) for name in "cab"]
    for number, name in enumerate("cab", 1):
        await until(lambda number=number: len(one.log) == number)
        await asyncio.sleep(0)
        assert len(one.log) == number
        one.models[name].loads.set()
    await asyncio.gather(*waiting)
    assert one.log == ["load c", "load a", "load b"]


@in_loop
async def test_a_request_that_leaves_while_it_waits_for_its_turn_loads_nothing() -> None:
    one = shelf_of([100, 100])
    one.models["a"].loads.clear()
    first = asyncio.create_task(one.touch("a"))
    await until(lambda: one.log)
    second = asyncio.create_task(one.touch("b"))
    await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    one.models["a"].loads.set()
    await first
    assert one.log == ["load a"]
    await one.touch("b")
    assert one.log == ["load a", "load b"]


@in_loop
async def test_a_model_whose_requests_have_left_while_it_was_read_is_there_for_the_next() -> None:
    one = shelf_of([100])
    one.models["a"].loads.clear()
    first = asyncio.create_task(one.touch("a"))
    await until(lambda: one.log)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    one.models["a"].loads.set()
    await one.touch("a")
    assert one.log == ["load a"]


@in_loop
async def test_what_loading_raises_is_told_to_each_and_the_next_request_tries_again() -> None:
    one = shelf_of([100])
    one.models["a"].error = UnsupportedModel("of another kind")
    results = await asyncio.gather(one.touch("a"), one.touch("a"), return_exceptions=True)
    assert [str(error) for error in results] == ["of another kind"] * 2
    one.models["a"].error = None
    await one.touch("a")
    assert one.log == ["load a", "load a"]


@in_loop
async def test_models_are_loaded_at_the_start_as_far_as_they_fit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = shelf_of([100, 100, 100], budget=250, preload=True)
    await one.registry.preload()
    assert one.loaded == ["a", "b"]
    assert "c does not fit beside the models before it" in caplog.text


@in_loop
async def test_only_the_first_model_is_loaded_at_the_start_unless_others_ask_for_it() -> None:
    one = shelf_of([100, 100])
    await one.registry.preload()
    assert one.loaded == ["a"]


# ---- room


@in_loop
async def test_the_model_that_was_used_least_recently_makes_room() -> None:
    one = shelf_of([100, 100, 100], budget=250)
    await one.touch("a", "b", "a", "c")
    assert one.log == ["load a", "load b", "close b", "load c"]
    assert one.loaded == ["a", "c"]
    assert one.taken <= 250


@in_loop
async def test_pools_of_idle_models_are_made_smaller_before_one_is_unloaded() -> None:
    one = shelf_of([100, 100], budget=500, most=1000)
    await one.touch("a")
    assert one.models["a"].num_pages == 40
    await one.touch("b")
    [smaller] = [line for line in one.log if "pages" in line]
    assert one.log == ["load a", smaller, "load b"]
    assert one.models["a"].num_pages == 14  # an equal share of what the weights leave
    assert one.models["b"].num_pages == 16
    assert one.taken <= 500


@in_loop
async def test_pools_become_as_small_as_they_may_where_a_share_is_too_much() -> None:
    one = shelf_of([100, 100], budget=300, most=1000, min_pages=6)
    await one.touch("a", "b")
    assert one.loaded == ["a", "b"]
    assert one.taken <= 300
    assert one.models["a"].num_pages >= 6


@in_loop
async def test_a_pool_that_is_needed_as_it_is_does_not_keep_another_model_out() -> None:
    one = shelf_of([100, 100], budget=300, most=1000)
    await one.touch("a")
    one.models["a"].resize_error = PagesPromised("to an answer")
    await one.touch("b")
    assert one.loaded == ["b"]


@in_loop
async def test_a_pool_grows_again_when_there_is_memory() -> None:
    one = shelf_of([100, 100], budget=500, most=1000)
    await one.touch("a", "b")
    assert await one.registry.unload("b")
    one.registry.look()
    await until(lambda: one.models["a"].num_pages == 40)
    assert one.taken <= 500


@in_loop
async def test_a_pool_that_somebody_else_has_made_smaller_stays_so() -> None:
    one = shelf_of([100, 100], budget=500, most=1000)
    await one.touch("a")
    await one.models["a"].resize_cache(5)
    one.registry.look()
    await asyncio.sleep(0)
    assert one.models["a"].num_pages == 5


@in_loop
async def test_a_pool_does_not_grow_where_its_own_options_bound_it() -> None:
    one = shelf_of([100], budget=math.inf, most=10, max_pages=1000)
    await one.touch("a")
    one.registry.look()
    await asyncio.sleep(0)
    assert one.log == ["load a"]


@in_loop
async def test_a_model_that_is_not_kept_is_there_when_the_server_starts() -> None:
    one = shelf_of([100], keep_alive=0.0)
    await one.registry.preload()
    assert one.loaded == ["a"]


@in_loop
async def test_a_model_that_needs_more_than_was_known_gets_it_from_idle_ones() -> None:
    one = shelf_of([100, 100], budget=295, needs=50)
    await one.touch("a", "b")
    assert one.log == ["load a", "load b", "close a", "load b"]
    await one.touch("a")  # what it needs is known by now
    assert one.log[4:] == ["close b", "load a"]


@in_loop
async def test_a_model_that_can_never_fit_is_refused_before_another_is_unloaded() -> None:
    one = shelf_of([100, 400], budget=300)
    await one.touch("a")
    with pytest.raises(OutOfMemory, match=r"b needs .* Nothing was unloaded for it\."):
        await one.touch("b")
    assert one.loaded == ["a"]


@in_loop
async def test_a_model_that_does_not_fit_alone_says_so_itself() -> None:
    one = shelf_of([100, 100], budget=180, needs=90)
    with pytest.raises(OutOfMemory, match="a does not fit"):
        await one.touch("a")


@in_loop
async def test_without_a_limit_nothing_is_unloaded_for_a_model_that_does_not_fit() -> None:
    one = shelf_of([100, 100], budget=math.inf)
    await one.touch("a")
    one.models["b"].error = OutOfMemory("b does not fit")
    with pytest.raises(OutOfMemory, match="b does not fit"):
        await one.touch("b")
    assert one.log == ["load a", "load b"]


@in_loop
async def test_a_request_waits_for_a_model_in_use_and_others_of_that_model_wait_after_it() -> None:
    one = shelf_of([100, 100], budget=130)
    running = asyncio.Event()
    order: list[str] = []

    async def long_answer() -> None:
        async with one.registry.use("a"):
            await running.wait()

    async def ask(name: str) -> None:
        async with one.registry.use(name):
            order.append(name)

    answer = asyncio.create_task(long_answer())
    await until(lambda: one.loaded == ["a"])
    one.clock.now += MIN_SECONDS
    other = asyncio.create_task(ask("b"))
    await until(lambda: one.loaded == [], complaint="a takes no more requests")
    same = asyncio.create_task(ask("a"))
    await asyncio.sleep(0)
    assert order == []
    running.set()
    await asyncio.gather(answer, other, same)
    assert order == ["b", "a"]
    assert one.log == ["load a", "close a", "load b", "close b", "load a"]


@in_loop
async def test_a_model_that_was_just_loaded_goes_on_taking_requests() -> None:
    one = shelf_of([100, 100], budget=130)
    async with one.registry.use("a"):
        other = asyncio.create_task(one.touch("b"))
        for _ in range(10):
            await asyncio.sleep(0)
        async with one.registry.use("a"):
            pass
    await other
    assert one.log == ["load a", "close a", "load b"]


@in_loop
async def test_a_model_takes_requests_again_when_the_one_that_wanted_its_room_has_left() -> None:
    one = shelf_of([100, 100], budget=130)
    async with one.registry.use("a"):
        one.clock.now += MIN_SECONDS
        other = asyncio.create_task(one.touch("b"))
        await until(lambda: one.loaded == [])
        other.cancel()
        with pytest.raises(asyncio.CancelledError):
            await other
        await until(lambda: one.loaded == ["a"])
        await one.touch("a")
    assert one.log == ["load a"]


@in_loop
async def test_a_request_that_has_waited_for_long_is_told_what_is_loaded_and_in_use() -> None:
    one = shelf_of([100, 100], budget=130)
    async with one.registry.use("a"), one.registry.use("a"):
        other = asyncio.create_task(one.touch("b"))
        await asyncio.sleep(0)
        one.clock.now += MAX_WAIT_SECONDS + 1
        await until(lambda: one.loaded == [] or other.done())
        one.clock.now += MAX_WAIT_SECONDS + 1
        with pytest.raises(QueueFull, match=r"no room for b\. Loaded: a \(.* GiB, 2 requests\)\."):
            await other
    assert one.loaded == ["a"]


# ---- unloading


@in_loop
async def test_an_idle_model_is_unloaded_after_its_time_and_one_in_use_is_not() -> None:
    one = shelf_of([100, 100, 100], keep_alive=60.0)
    await one.touch("a", "b")
    async with one.registry.use("b"):
        one.clock.now += 61
        await one.touch("c")
        one.registry.look()
        await until(lambda: "close a" in one.log)
        assert one.loaded == ["b", "c"]
    one.registry.look()
    await asyncio.sleep(0)
    assert one.loaded == ["b", "c"]
    one.clock.now += 60
    one.registry.look()
    await until(lambda: one.loaded == [])


@in_loop
async def test_a_model_that_is_not_kept_is_unloaded_after_each_request() -> None:
    one = shelf_of([100], keep_alive=0.0)
    await one.touch("a")
    await until(lambda: one.log == ["load a", "close a"])


@in_loop
async def test_how_long_it_is_kept_may_be_changed_until_it_is_loaded_again() -> None:
    one = shelf_of([100])
    await one.touch("a")
    one.registry.keep("a", 5.0)
    one.clock.now += 5
    one.registry.look()
    await until(lambda: one.loaded == [])
    await one.touch("a")
    one.clock.now += 1e9
    one.registry.look()
    await asyncio.sleep(0)
    assert one.loaded == ["a"]


@in_loop
async def test_a_model_in_use_is_unloaded_by_force_only() -> None:
    one = shelf_of([100])
    async with one.registry.use("a"):
        assert not await one.registry.unload("a")
        assert await one.registry.unload("a", force=True)
    assert one.log == ["load a", "close a"]
    assert await one.registry.unload("a")  # it is not loaded


@in_loop
async def test_a_request_for_a_model_that_is_being_closed_waits_and_loads_it_again() -> None:
    one = shelf_of([100])
    unloaded: list[str] = []
    one.registry.on_unloaded = unloaded.append
    await one.touch("a")
    one.models["a"].closes.clear()
    closing = asyncio.create_task(one.registry.unload("a"))
    await asyncio.sleep(0)
    asked = asyncio.create_task(one.touch("a"))
    await asyncio.sleep(0)
    one.models["a"].closes.set()
    await asyncio.gather(closing, asked)
    assert one.log == ["load a", "close a", "load a"]
    assert unloaded == ["a"]


@in_loop
async def test_memory_is_free_only_after_a_model_is_closed() -> None:
    one = shelf_of([100, 100], budget=130)
    await one.touch("a")
    one.models["a"].closes.clear()
    closing = asyncio.create_task(one.registry.unload("a"))
    asked = asyncio.create_task(one.touch("b"))
    for _ in range(10):
        await asyncio.sleep(0)
    assert one.log == ["load a"]
    one.models["a"].closes.set()
    await asyncio.gather(closing, asked)
    assert one.log == ["load a", "close a", "load b"]


# ---- failures and the end


@in_loop
async def test_a_model_whose_engine_has_failed_leaves_the_others_and_is_loaded_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one = shelf_of([100, 100])
    await one.touch("a", "b")
    one.models["b"].has_ended = True
    assert not one.registry.has_failed()
    await one.touch("a")
    await one.touch("b")
    assert one.log == ["load a", "load b", "close b", "load b"]
    one.models["b"].has_ended = True
    one.registry.look()
    await until(lambda: one.loaded == ["a"])


@in_loop
async def test_with_one_model_the_watchdog_is_told_that_its_engine_has_failed() -> None:
    one = shelf_of([100])
    await one.touch("a")
    one.models["a"].has_ended = True
    one.registry.look()
    assert one.registry.has_failed()
    assert one.loaded == ["a"]


@in_loop
async def test_the_longest_silence_of_all_engines_counts() -> None:
    one = shelf_of([100, 100])
    assert one.registry.seconds_since_beat() == 0.0
    await one.touch("a", "b")
    one.models["a"].silence, one.models["b"].silence = 3.0, 7.0
    assert one.registry.seconds_since_beat() == 7.0


@in_loop
async def test_nothing_is_loaded_after_the_end_and_what_was_being_read_is_closed() -> None:
    one = shelf_of([100, 100])
    await one.touch("a")
    one.models["b"].loads.clear()
    waiting = asyncio.create_task(one.touch("b"))
    await until(lambda: one.log == ["load a", "load b"])
    await asyncio.to_thread(one.registry.close)
    one.models["b"].loads.set()
    with pytest.raises(EngineStopped):
        await waiting
    assert one.log == ["load a", "load b", "close a", "close b"]
    with pytest.raises(EngineStopped):
        await one.touch("a")
