"""Transfers: every page goes to the request that waits for it, or nowhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import pytest

from mlxserve.cache.pages import PagePool
from mlxserve.cache.store import PageStore
from mlxserve.config import PreemptionMode, SchedulerConfig
from mlxserve.engine import transfers
from mlxserve.engine.transfers import Transfers
from mlxserve.request import Chunk, LiveRequest, Request, RequestState, Sampled
from mlxserve.sampling_params import SamplingParams
from mlxserve.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from mlxserve.model.runner import ModelRunner

PAGE = 16


class Memory:
    """A runner with nothing but pages of a few bytes each."""

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}

    def read_pages(self, pages: Sequence[int]) -> list[bytes]:
        return [self.pages[page] for page in pages]

    def write_pages(self, pages: Sequence[int], payloads: Sequence[bytes]) -> None:
        self.pages.update(zip(pages, payloads, strict=True))

    def compute(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            for index in range(chunk.start // PAGE, -(-chunk.end // PAGE)):
                self.pages[chunk.page_table[index]] = content(chunk.request, index)


def content(request: LiveRequest, index: int) -> bytes:
    return f"{request.id:>8}{index:>8}".encode()


class World:
    def __init__(
        self, store: PageStore, num_pages: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=512,
            max_num_seqs=8,
            max_model_len=512,
            enable_prefix_caching=False,
            preemption_mode=PreemptionMode.SWAP,
        )
        self.scheduler = Scheduler(config, PagePool(num_pages, PAGE))
        self.memory = Memory()
        self.store = store
        runner = cast("ModelRunner", self.memory)
        self.transfers = Transfers(self.scheduler, runner, store, clock)
        self.requests: list[LiveRequest] = []

    def add(self, name: str, length: int, max_tokens: int) -> LiveRequest:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        request = self.scheduler.add(Request(name, [ord(name)] * length, params))
        self.requests.append(request)
        return request

    def step(self) -> None:
        self.transfers.before_plan()
        self.check()
        chunks = self.scheduler.schedule()
        self.transfers.before_launch()
        self.memory.compute(chunks)
        self.scheduler.update(chunks, [Sampled(7) if c.samples else None for c in chunks])
        self.check()
        self.transfers.after_read(is_idle=not chunks)

    def check(self) -> None:
        """Pages that count as computed hold what their request would have computed."""
        self.scheduler.check()
        for request in self.requests:
            if request.state is RequestState.RUNNING:
                for index in range(request.num_computed // PAGE):
                    assert self.memory.pages[request.page_table[index]] == content(request, index)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PageStore]:
    store = PageStore(tmp_path / "swap", limit=1 << 20, model="m")
    yield store
    store.close()


def test_requests_with_too_little_memory_are_served_through_the_disk(store: PageStore) -> None:
    world = World(store, num_pages=12)
    serve(world)
    assert world.scheduler.stats().restored_tokens > 0
    store.load("", 0, [])  # answered after everything before it was done
    store.wait(60)
    assert store.num_bytes == 0


def test_a_run_that_is_loaded_twice_is_answered_twice(
    store: PageStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    load = store.load

    def count(key: str, first: int, hashes: Sequence[bytes]) -> None:
        asked.append(key)
        load(key, first, hashes)

    monkeypatch.setattr(store, "load", count)
    world = World(store, num_pages=10)
    first, second = world.add("a", 60, 400), world.add("b", 60, 400)
    while not (first.num_preemptions or second.num_preemptions):
        world.step()
    victim, other = (first, second) if first.num_preemptions else (second, first)
    world.scheduler.abort(other.id)
    world.scheduler.schedule()
    world.transfers.hand_over()
    assert victim.loading is not None
    assert world.scheduler.reset_prefix_cache(force=True)  # takes the pages it waits for
    assert victim.loading is None
    world.scheduler.schedule()
    world.transfers.hand_over()
    first_run, second_run = asked
    assert first_run == second_run
    for _ in range(1000):
        if not world.scheduler.has_work:
            break
        world.step()
    assert not world.transfers.is_reading
    assert len(victim.token_ids) == 160


def serve(world: World) -> None:
    """Six requests in too little memory, to their end."""
    for name in "abcdef":
        world.add(name, 20, 100)
    for _ in range(5000):
        if not world.scheduler.has_work:
            break
        world.step()
    assert all(len(request.token_ids) == 120 for request in world.requests)
    assert world.scheduler.stats().num_preemptions > 3


def test_requests_do_not_wait_for_a_disk_that_stalls(
    store: PageStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfers, "PATIENCE_SECONDS", 0.01)
    pipe = store.folder / "stalled.pages"
    os.mkfifo(pipe)  # opening it blocks the store's thread, until it is read
    assert store.save("stalled", 0, [b"h" * 16], [b"x"])
    world = World(store, num_pages=12)
    serve(world)
    assert world.scheduler.stats().restored_tokens == 0
    assert not world.transfers.is_reading
    assert "do not come back from the disk and are computed again" in caplog.text
    assert pipe.read_bytes()


def test_requests_do_not_wait_for_pages_that_are_never_read(
    store: PageStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfers, "PATIENCE_SECONDS", 0.01)
    monkeypatch.setattr(store, "load", lambda *_: None)
    world = World(store, num_pages=12)
    serve(world)
    assert world.scheduler.stats().restored_tokens == 0
    assert not world.transfers.is_reading
    assert "do not come back from the disk and are computed again" in caplog.text


def test_a_disk_that_hangs_is_waited_for_once(
    store: PageStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    loads: list[tuple[str, int, Sequence[bytes]]] = []
    answer = store.load
    monkeypatch.setattr(store, "load", lambda *load: loads.append(load))
    world = World(store, num_pages=12, clock=lambda: now)
    waited = 0
    for name in "abcdef":
        world.add(name, 20, 100)
    while world.scheduler.has_work:
        world.step()
        now += 1.0
        waited += any(request.loading for request in world.requests)
    assert world.scheduler.stats().num_preemptions > 3
    assert 0 < waited <= 11
    assert len([r for r in caplog.records if "Nothing is swapped until" in r.message]) == 1
    swapped = world.scheduler.stats().swapped_tokens
    monkeypatch.setattr(store, "load", answer)
    for load in loads:  # the disk answers again
        answer(*load)
        store.wait(60)
        world.transfers.before_plan()
    world.requests.clear()
    serve(world)
    assert world.scheduler.stats().swapped_tokens > swapped


WRONG = {  # calls on which the store's thread fails
    "save": lambda save: (
        lambda key, first, hashes, payloads: save(key, first, ["not bytes"] * len(hashes), payloads)
    ),
    "load": lambda load: lambda key, first, hashes: load(key, first, [None] * len(hashes)),
    "drop": lambda drop: lambda _: drop("not a file name\0"),
}


@pytest.mark.parametrize("call", WRONG)
def test_requests_outlive_the_stores_thread(
    store: PageStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, call: str
) -> None:
    monkeypatch.setattr(store, call, WRONG[call](getattr(store, call)))
    world = World(store, num_pages=12)
    serve(world)
    assert not store.is_alive
    assert not world.transfers.is_reading
    store.close()
    assert not store.folder.exists()
    assert len([r for r in caplog.records if "Swapping has failed" in r.message]) == 1
    assert not store.save("x", 0, [b"h" * 16], [b"late"])
    assert store.num_bytes == 0
