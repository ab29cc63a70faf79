"""The executor: whose job is next, what is refused, what is removed, and which memory bodies have."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from mlxserve.core.errors import ClientQueueFull, EngineStopped, QueueFull
from mlxserve.helpers import fair_executor
from mlxserve.helpers.fair_executor import (
    MAX_CLIENT_PLACES,
    MEDIUM_SECONDS,
    BodyMemory,
    FairExecutor,
    FairOrder,
    Lane,
)
from mlxserve.helpers.waiting import current
from mlxserve.helpers.work import RunsIn, Work
from tests.waiting import wait_until

LONG = 2 * MEDIUM_SECONDS  # a lane with one thread
MIB = 1 << 20


@pytest.fixture
def executor() -> Iterator[FairExecutor]:
    found = FairExecutor()
    yield found
    found.close()


def taken(order: FairOrder[str]) -> str:
    return " ".join(order.pop() for _ in range(len(order)))


# ---- the order


def test_clients_take_turns_whatever_they_queued_first() -> None:
    order = FairOrder[str]()
    for number in range(3):
        order.push("a", 1.0, f"a{number}")
    for number in range(2):
        order.push("b", 1.0, f"b{number}")
    assert taken(order) == "a0 b0 a1 b1 a2"


def test_a_client_with_longer_jobs_has_fewer_of_them() -> None:
    order = FairOrder[str]()
    for number in range(2):
        order.push("long", 3.0, f"L{number}")
    for number in range(6):
        order.push("short", 1.0, f"s{number}")
    assert taken(order) == "s0 s1 L0 s2 s3 s4 L1 s5"


def test_a_new_client_with_little_work_passes_any_number_of_others() -> None:
    """Also when some of their work has been done."""
    order = FairOrder[str]()
    for number in range(100):
        order.push(f"client{number}", 1.0, f"c{number}")
    for _ in range(30):
        order.pop()
    order.push("new", 0.01, "new")
    assert order.pop() == "new"


def test_a_client_that_was_alone_does_not_pay_for_it() -> None:
    order = FairOrder[str]()
    for number in range(50):
        order.push("a", 1.0, f"a{number}")
        order.pop()
    order.push("a", 1.0, "a")
    order.push("b", 1.0, "b")
    assert taken(order) == "a b"


def test_what_was_charged_puts_a_client_behind_others_until_it_is_forgiven() -> None:
    order = FairOrder[str]()
    order.charge("a", 30.0)
    for client in ("a", "b", "c"):
        order.push(client, 1.0, client)
    assert taken(order) == "b c a"
    order.charge("a", 30.0)
    order.pass_time(100.0)
    for client in ("a", "b"):
        order.push(client, 1.0, client)
    assert taken(order) == "a b"


def test_sorted_items_are_those_of_the_client_that_used_least_first() -> None:
    order = FairOrder[str]()
    order.charge("slow", 2.0)
    order.charge("quick", 0.1)
    assert order.sorted(["slow", "quick", "new"], str) == ["new", "quick", "slow"]


# ---- jobs


def run_all(executor: FairExecutor, jobs: list[tuple[str, float]], log: list[str]) -> None:
    """Queue jobs while the long lane is busy, then let it work; `log` gets their clients."""

    async def scenario() -> None:
        may_begin = threading.Event()
        blocker = asyncio.ensure_future(executor.run("x", Work(LONG, lambda: may_begin.wait(30))))
        queued = [
            asyncio.ensure_future(
                executor.run(client, Work(seconds, lambda name=client: log.append(name)))
            )
            for client, seconds in jobs
        ]
        await asyncio.sleep(0)  # all are queued
        may_begin.set()
        await asyncio.gather(blocker, *queued)

    asyncio.run(scenario())


def test_jobs_of_clients_run_in_turns(executor: FairExecutor) -> None:
    log: list[str] = []
    run_all(executor, [("evil", LONG)] * 4 + [("good", LONG)], log)
    assert log.index("good") <= 1


def test_short_jobs_pass_any_number_of_long_ones(executor: FairExecutor) -> None:
    may_end = threading.Event()

    async def scenario() -> None:
        long = [
            asyncio.ensure_future(executor.run("evil", Work(LONG, lambda: may_end.wait(30))))
            for _ in range(20)
        ]
        assert await executor.run("good", Work(0.0, lambda: "short")) == "short"
        assert await executor.run("evil", Work(0.0, lambda: "short")) == "short"
        assert not any(each.done() for each in long)
        may_end.set()
        assert all(await asyncio.gather(*long))

    asyncio.run(scenario())


def test_what_a_job_raises_reaches_its_caller_and_the_next_runs(executor: FairExecutor) -> None:
    def fail() -> None:
        raise LookupError("x")

    async def scenario() -> None:
        with pytest.raises(LookupError):
            await executor.run("a", Work(LONG, fail))
        assert await executor.run("a", Work(LONG, lambda: 1)) == 1

    asyncio.run(scenario())


def test_a_charged_client_comes_last(executor: FairExecutor) -> None:
    executor.charge("evil", 1_000.0)
    log: list[str] = []
    run_all(executor, [("evil", LONG), ("good", LONG), ("other", LONG)], log)
    assert log == ["good", "other", "evil"]


def test_a_waiting_job_whose_client_leaves_is_removed(executor: FairExecutor) -> None:
    log: list[str] = []

    async def scenario() -> None:
        may_begin = threading.Event()
        blocker = asyncio.ensure_future(executor.run("x", Work(LONG, lambda: may_begin.wait(30))))
        leaver = asyncio.ensure_future(executor.run("evil", Work(LONG, lambda: log.append("evil"))))
        await asyncio.sleep(0)
        leaver.cancel()
        stayer = asyncio.ensure_future(executor.run("good", Work(LONG, lambda: log.append("good"))))
        await asyncio.sleep(0)
        may_begin.set()
        await asyncio.gather(blocker, stayer)
        with pytest.raises(asyncio.CancelledError):
            await leaver

    asyncio.run(scenario())
    assert log == ["good"]


def test_a_running_job_sees_that_its_client_has_left(executor: FairExecutor) -> None:
    seen: list[bool] = []
    is_running = threading.Event()

    def work() -> None:
        is_wanted: Callable[[], bool] = current()
        seen.append(is_wanted())
        is_running.set()
        wait_until(lambda: not is_wanted())
        seen.append(is_wanted())

    async def scenario() -> None:
        job = asyncio.ensure_future(executor.run("evil", Work(LONG, work)))
        await asyncio.to_thread(is_running.wait, 30)
        job.cancel()
        with pytest.raises(asyncio.CancelledError):
            await job
        assert await executor.run("good", Work(LONG, lambda: "next")) == "next"

    asyncio.run(scenario())
    assert seen == [True, False]


async def begun(executor: FairExecutor, clients: str, lane: Lane) -> list[str]:
    """The clients whose work in the loop has a place, each letter with one piece of work."""
    names: list[str] = []
    may_end = asyncio.Event()

    async def wait(name: str) -> None:
        names.append(name)
        await may_end.wait()

    jobs = [
        asyncio.ensure_future(
            executor.run(name, Work(1.0, partial(wait, name), RunsIn.LOOP), lane=lane)
        )
        for name in clients
    ]
    for _ in range(3):  # to enter, to get a place, to begin
        await asyncio.sleep(0)
    may_end.set()
    with_place = list(names)
    async with asyncio.timeout(10):  # a place that was lost would never be free
        await asyncio.gather(*jobs)
    assert sorted(names) == sorted(clients)
    return with_place


def test_no_client_has_all_places_of_those_who_wait_for_others(executor: FairExecutor) -> None:
    places = asyncio.run(begun(executor, "e" * 30 + "g", Lane.WAITS))
    assert places.count("e") == MAX_CLIENT_PLACES[Lane.WAITS] == 8
    assert places.count("g") == 1


def test_models_are_loaded_one_after_the_other_in_turns(executor: FairExecutor) -> None:
    async def scenario() -> list[str]:
        order: list[str] = []

        async def load(name: str) -> None:
            order.append(name)

        loads = (
            executor.run(n, Work(1.0, partial(load, n), RunsIn.LOOP), lane=Lane.LOADS)
            for n in "eeeg"
        )
        await asyncio.gather(*loads)
        return order

    assert asyncio.run(scenario()).index("g") <= 2
    assert asyncio.run(begun(executor, "eeg", Lane.LOADS)) == ["e"]


def test_work_in_the_loop_that_is_cancelled_ends_and_frees_its_place(
    executor: FairExecutor,
) -> None:
    ended: list[str] = []

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    async def scenario() -> None:
        waits = [
            asyncio.ensure_future(executor.run("e", Work(1.0, wait, RunsIn.LOOP)))
            for _ in range(20)
        ]
        for _ in range(3):
            await asyncio.sleep(0)
        for each in waits:
            each.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    asyncio.run(scenario())
    assert len(ended) == MAX_CLIENT_PLACES[Lane.WAITS], "the others had not begun"
    assert executor.num_waiting == 0
    assert len(asyncio.run(begun(executor, "e" * 8, Lane.WAITS))) == 8


def test_work_in_the_loop_that_waits_needs_no_seconds_of_a_processor(
    executor: FairExecutor, small_bounds: None
) -> None:
    assert len(asyncio.run(begun(executor, "e" * 100, Lane.WAITS))) == 8


def test_one_place_of_short_work_is_left_for_others(executor: FairExecutor) -> None:
    async def scenario() -> None:
        may_end = threading.Event()
        evil = [
            asyncio.ensure_future(executor.run("evil", Work(0.1, lambda: may_end.wait(30))))
            for _ in range(9)
        ]
        await asyncio.sleep(0)
        assert await executor.run("good", Work(0.1, lambda: "done")) == "done"
        may_end.set()
        await asyncio.gather(*evil)

    asyncio.run(scenario())


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_executor, "MAX_CLIENT_SECONDS", 3 * LONG)
    monkeypatch.setattr(fair_executor, "MAX_SECONDS", 6 * LONG)


def waiting(executor: FairExecutor, clients: str) -> list[BaseException | None]:
    """Queue a long job for each letter behind a busy lane; what each ended with."""

    async def scenario() -> list[BaseException | None]:
        may_begin = threading.Event()
        blocker = asyncio.ensure_future(executor.run("x", Work(LONG, lambda: may_begin.wait(30))))
        await asyncio.sleep(0)
        jobs = [
            asyncio.ensure_future(executor.run(client.strip(), Work(LONG, lambda: None)))
            for client in clients
        ]
        await asyncio.sleep(0)
        may_begin.set()
        await blocker
        return await asyncio.gather(*jobs, return_exceptions=True)

    return asyncio.run(scenario())


@pytest.mark.usefixtures("small_bounds")
def test_a_client_may_have_so_much_waiting_and_others_pass_it(executor: FairExecutor) -> None:
    found = waiting(executor, "aaaaab")
    assert found[:3] == [None] * 3
    assert [type(each) for each in found[3:5]] == [ClientQueueFull] * 2
    assert found[5] is None


@pytest.mark.usefixtures("small_bounds")
def test_all_clients_together_may_have_so_much_waiting(executor: FairExecutor) -> None:
    found = waiting(executor, "abcdefgh")
    assert found[:6] == [None] * 6
    assert all(type(each) is QueueFull and each.seconds for each in found[6:])


@pytest.mark.usefixtures("small_bounds")
def test_the_program_itself_is_not_bounded(executor: FairExecutor) -> None:
    assert waiting(executor, " " * 20) == [None] * 20


@pytest.mark.usefixtures("small_bounds")
def test_what_has_waited_does_not_count_any_more(executor: FairExecutor) -> None:
    for _ in range(3):
        assert waiting(executor, "aaa") == [None] * 3


def test_closing_refuses_what_waits_and_what_comes(executor: FairExecutor) -> None:
    async def scenario() -> None:
        may_begin = threading.Event()
        blocker = asyncio.ensure_future(executor.run("x", Work(LONG, lambda: may_begin.wait(30))))
        waiter = asyncio.ensure_future(executor.run("a", Work(LONG, lambda: None)))
        await asyncio.sleep(0)
        executor.close()
        with pytest.raises(EngineStopped):
            await waiter
        with pytest.raises(EngineStopped):
            await executor.run("a", Work(LONG, lambda: None))
        may_begin.set()
        assert await blocker

    asyncio.run(scenario())


# ---- bodies


def test_unfinished_bodies_never_take_all_of_the_memory() -> None:
    memory = BodyMemory(256 * MIB)
    holds = [memory.hold(f"client{number}", has_key=False) for number in range(500)]
    refused = 0
    for hold in holds:
        try:
            hold.grow_to(31 * MIB)
        except QueueFull:
            refused += 1
    assert memory.num_taken < 200 * MIB
    assert refused > 490
    memory.hold("good", has_key=False).grow_to(20 * MIB)


def test_a_client_with_a_key_may_have_more_and_not_all() -> None:
    memory = BodyMemory(128 * MIB)
    with pytest.raises(QueueFull):
        memory.hold("connection", has_key=False).grow_to(33 * MIB)
    evil = [memory.hold("evil", has_key=True) for _ in range(3)]
    evil[0].grow_to(31 * MIB)
    evil[1].grow_to(31 * MIB)
    with pytest.raises(QueueFull):
        evil[2].grow_to(31 * MIB)
    memory.hold("good", has_key=True).grow_to(32 * MIB)


def test_small_bodies_need_none_of_it() -> None:
    memory = BodyMemory(0)
    memory.hold("a", has_key=False).grow_to(64 << 10)
    with pytest.raises(QueueFull):
        memory.hold("a", has_key=False).grow_to((64 << 10) + 1)


def test_memory_is_given_back_once() -> None:
    memory = BodyMemory(256 * MIB)
    hold = memory.hold("a", has_key=False)
    hold.grow_to(MIB)
    hold.grow_to(2 * MIB)
    assert memory.num_taken == 2 * MIB - (64 << 10)
    hold.close()
    hold.close()
    assert memory.num_taken == 0
