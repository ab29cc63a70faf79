"""Transfers: every page goes to the request that waits for it, or nowhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from mlxserve.cache.kinds.kind import UnitKind
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import PreemptionMode, SchedulerConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.disk.files import DiskFiles
from mlxserve.disk.record import HEADER_SIZE
from mlxserve.disk.tier import DiskTier
from mlxserve.engine import transfers
from mlxserve.engine.disk_cache import DiskCache, page_records, state_records, window_records
from mlxserve.engine.engine import Engine
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.engine.transfers import Transfers
from mlxserve.request import (
    Chunk,
    Forgotten,
    LiveRequest,
    Request,
    RequestState,
    Sampled,
    as_page_table,
)
from mlxserve.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from mlxserve.model.runner import ModelRunner

PAGE = 16
SIZE = 16  # bytes of a page
STATE_SIZE = 23


class Memory:
    """A runner with nothing but pages of a few bytes each."""

    def __init__(self) -> None:
        self.pages: dict[int, bytes] = {}
        self.states: dict[int, bytes] = {}  # of prompts: their letter and position
        self.num_reads = 0

    def of(self, kind: str) -> dict[int, bytes]:
        return {"pages": self.pages, "states": self.states}[kind]

    def read(self, kind: str, units: Sequence[int]) -> list[bytes]:
        self.num_reads += kind == "pages"
        return [self.of(kind)[unit] for unit in units]

    def write(self, kind: str, units: Sequence[int], payloads: Sequence[bytes]) -> None:
        self.of(kind).update(zip(units, payloads, strict=True))

    def drop(self, kind: str, units: Sequence[int]) -> None:
        for unit in units:
            del self.of(kind)[unit]

    def back(self, kind: str, num_pages: int) -> None:
        """Its pages take no memory."""

    def compute(self, chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            for index in range(chunk.start // PAGE, -(-chunk.end // PAGE)):
                self.pages[chunk.page_table[index]] = content(chunk.request, index)
            for position, id_ in chunk.state.keeps if chunk.state else ():
                self.states[id_] = state(chunk.request, position)


def content(request: LiveRequest, index: int) -> bytes:
    """Requests of one letter have the same tokens, and so the same pages."""
    return f"{request.id[0]:>8}{index:>8}".encode()


def state(request: LiveRequest, position: int) -> bytes:
    return f"{request.id[0]:>8}{position:>8} tokens".encode()


class World:
    def __init__(
        self,
        tier: DiskTier,
        num_pages: int,
        clock: Callable[[], float] = time.monotonic,
        num_state_slots: int | None = None,
    ) -> None:
        config = SchedulerConfig(
            max_num_batched_tokens=512,
            max_num_seqs=8,
            max_model_len=512,
            preemption_mode=PreemptionMode.SWAP,
        )
        pool, kinds, ends = PagePool(num_pages, PAGE), [page_records(SIZE)], []
        if num_state_slots is not None:
            kinds.append(state_records(STATE_SIZE))
            ends.append(StateSlots(num_state_slots, pool))
        self.pace = StepTimeModel(None)
        self.disk = disk = DiskCache(tier, self.pace, kinds, page_size=PAGE)
        self.scheduler = Scheduler(config, pool, disk, ends=ends)
        self.memory = Memory()
        self.tier = tier
        runner = cast("ModelRunner", self.memory)
        self.transfers = Transfers(self.scheduler.moves, runner, disk, clock)
        self.requests: list[LiveRequest] = []

    def engine(self) -> Engine:
        runner = cast("ModelRunner", self.memory)
        return Engine(self.scheduler, runner, StepTimeModel(None), disk=self.disk)

    def add(self, name: str, length: int, max_tokens: int) -> LiveRequest:
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        request = self.scheduler.add(Request(name, [ord(name[0])] * length, params))
        self.requests.append(request)
        return request

    def step(self) -> None:
        self.transfers.plan_writes()
        self.transfers.before_plan()
        self.check()
        chunks = self.scheduler.schedule()
        self.transfers.before_launch()
        self.memory.compute(chunks)
        self.scheduler.update(chunks, [Sampled(7) if c.samples else None for c in chunks])
        self.check()
        self.transfers.after_read()
        if not chunks:
            self.transfers.wait()

    def drain(self) -> None:
        for _ in range(5000):
            if not self.scheduler.has_work:
                return
            self.step()
        raise AssertionError("no progress")

    def check(self) -> None:
        """Pages that count as computed hold what their request would have computed."""
        self.scheduler.check()
        for request in self.requests:
            if request.state is RequestState.RUNNING:
                for index in range(request.num_computed // PAGE):
                    assert self.memory.pages[request.page_table[index]] == content(request, index)

    def write_all(self) -> None:
        """As an idle engine."""
        while self.transfers.write_idle():
            pass


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path / "pages", identity=b"i" * 16, limit=1 << 20, daily_writes=1 << 30)
    yield tier
    tier.close()


def serve(world: World, names: str = "abcdef") -> None:
    """Requests in too little memory, to their end."""
    for name in names:
        world.add(name, 20, 100)
    world.drain()
    assert all(len(request.token_ids) == 120 for request in world.requests)
    assert world.scheduler.stats().num_preemptions > 3


def test_requests_with_too_little_memory_are_served_through_the_disk(tier: DiskTier) -> None:
    world = World(tier, num_pages=12)
    serve(world)
    stats = world.scheduler.stats()
    assert stats.restored_tokens > 0
    assert stats.swapped_tokens > 0


def test_what_an_engine_left_on_disk_is_read_by_the_next(tier: DiskTier) -> None:
    world = World(tier, num_pages=32)
    world.add("a", 200, 1)
    world.drain()
    world.write_all()
    assert tier.flush(60)
    after = World(tier, num_pages=32)
    request = after.add("a1", 200, 1)
    after.drain()
    assert request.num_cached == 192
    assert request.cache is not None
    assert request.cache.num_from_disk == 192


def test_a_recurrent_state_is_read_after_its_pages(tier: DiskTier) -> None:
    world = World(tier, num_pages=32, num_state_slots=20)
    world.add("a", 200, 1)
    world.drain()
    world.write_all()
    assert tier.flush(60)
    num_pages, num_states = 12, len(world.scheduler.moves.unit_names()["states"])
    assert tier.use().num_written == num_pages + num_states
    after = World(tier, num_pages=32, num_state_slots=20)
    request = after.add("a1", 200, 1)
    while request.loading is None:
        after.step()
    while request.loading is not None:
        after.transfers.before_plan()
    assert request.num_computed == 192
    assert after.memory.states == {id_: state(request, 192) for id_ in after.memory.states}
    assert after.memory.states.keys() == after.scheduler.moves.unit_names()["states"]
    after.drain()
    assert request.num_cached == 192


def test_a_recurrent_state_is_read_alone_where_its_pages_are_in_memory(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request waits for it as long as computing all of its tokens takes."""
    now = 0.0
    world = World(tier, num_pages=64, num_state_slots=4, clock=lambda: now)
    first = world.add("a", 200, 1)
    world.drain()
    world.write_all()
    assert tier.flush(60)
    for name in "bcd":
        world.add(name, 200, 1)
        world.drain()
    request = world.add("a1", 200, 20)
    world.pace.observe([Chunk(first, 0, 192, as_page_table(), samples=False)], 19.2)
    with monkeypatch.context() as patch:
        patch.setattr(tier, "poll", list)
        patch.setattr(tier, "wait", lambda _: None)
        while request.loading is None:
            world.step()
        now = 19.0
        world.step()
    assert request.loading is not None
    assert request.loading.hashes == ()
    world.drain()
    assert request.num_cached == 192
    assert (tier.use().num_read, tier.use().bytes_read) == (1, STATE_SIZE)


def test_only_what_is_not_on_disk_yet_is_written(tier: DiskTier) -> None:
    world = World(tier, num_pages=32)
    world.add("a", 200, 1)
    world.drain()
    world.write_all()
    assert tier.flush(60)
    assert tier.use().num_written == 12
    assert not world.transfers.write_idle()
    assert tier.flush(60)
    assert tier.use().num_written == 12


def test_an_idle_engine_looks_for_pages_to_write_once(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tier, num_pages=32)
    world.add("a", 200, 1)
    world.drain()
    world.write_all()
    looks: list[int] = []
    disk = world.scheduler.moves.disk
    unwritten = disk.unwritten

    def count(kind: UnitKind, most: int) -> list[tuple[bytes, int]]:
        looks.append(most)
        return unwritten(kind, most)

    monkeypatch.setattr(disk, "unwritten", count)
    assert not world.transfers.write_idle()
    assert looks == []
    world.add("b", 200, 1)
    world.drain()
    assert world.transfers.write_idle()
    assert len(looks) == 1


def test_a_disk_that_refuses_is_left_alone_for_a_while(tmp_path: Path) -> None:
    now = 0.0
    tier = DiskTier(tmp_path, identity=b"i" * 16, limit=1 << 20, daily_writes=0)
    try:
        world = World(tier, num_pages=32, clock=lambda: now)
        world.add("a", 200, 1)
        world.drain()
        assert not world.transfers.write_idle()
        assert not world.transfers.write_idle()
        assert not world.transfers.plan_writes()
        assert world.memory.num_reads == 1
        now = 60.0
        assert world.transfers.plan_writes()
    finally:
        tier.close()


RECORD = SIZE + HEADER_SIZE


def chat(world: World, turn: int) -> LiveRequest:
    """A turn of one conversation, a page longer than the one before."""
    request = world.add(f"a{turn}", 33 + PAGE * turn, 1)
    world.drain()
    return request


def test_a_disk_smaller_than_the_cache_keeps_the_newest_turn_and_is_not_rewritten(
    tmp_path: Path,
) -> None:
    limit, num_turns = 40 * RECORD, 10
    options: dict[str, Any] = {"identity": b"i" * 16, "limit": limit, "daily_writes": 1 << 30}
    tier = DiskTier(tmp_path, **options)
    world = World(tier, num_pages=256)  # none is about to be evicted
    for name in "pqrst":
        world.add(name, 500, 1)
        world.drain()
    for turn in range(num_turns):
        newest = chat(world, turn)
        world.write_all()  # a pause
        assert tier.flush(60)
    num_pages = len(newest.page_hashes)
    tier.close()
    use = tier.use()
    assert use.total_bytes <= limit
    assert use.bytes_written <= limit + num_turns * RECORD
    tier = DiskTier(tmp_path, **options)
    assert tier.flush(60)
    again = chat(World(tier, num_pages=256), num_turns - 1)
    tier.close()
    assert again.cache is not None
    assert again.cache.num_from_disk == num_pages * PAGE


def test_a_full_disk_drops_the_end_of_a_conversation(tmp_path: Path) -> None:
    """Its end is of no use without what comes before it."""
    options: dict[str, Any] = {"identity": b"i" * 16, "limit": 12 * RECORD, "daily_writes": 1 << 30}
    tier = DiskTier(tmp_path, **options)
    world = World(tier, num_pages=256)
    conversations = []
    for name, num_pages in (("a", 12), ("b", 4)):
        conversations.append(world.add(name, num_pages * PAGE + 1, 1))
        world.drain()
        world.write_all()
        assert tier.flush(60)
    found = [tier.num_leading(request.page_hashes) for request in conversations]
    tier.close()
    assert found == [8, 4]


def test_what_is_used_in_memory_alone_stays_on_disk(tmp_path: Path) -> None:
    options: dict[str, Any] = {"identity": b"i" * 16, "limit": 12 * RECORD, "daily_writes": 1 << 30}
    tier = DiskTier(tmp_path, **options)
    world = World(tier, num_pages=256)
    hashes = {}
    for number, name in enumerate("abacad"):  # "a" is on disk after the first one
        request = world.add(f"{name}{number}", 65, 1)
        world.drain()
        world.write_all()
        assert tier.flush(60)
        hashes[name] = request.page_hashes
    tier.close()
    tier = DiskTier(tmp_path, **options)
    assert tier.flush(60)
    found = {name: tier.num_leading(pages) for name, pages in hashes.items()}
    tier.close()
    assert found == {"a": 4, "b": 0, "c": 4, "d": 4}


def test_recurrent_states_on_a_full_disk_are_written_once_and_the_newest_stays(
    tmp_path: Path,
) -> None:
    limit = 4 * RECORD + STATE_SIZE + HEADER_SIZE
    tier = DiskTier(tmp_path, identity=b"i" * 16, limit=limit, daily_writes=1 << 30)
    world = World(tier, num_pages=256, num_state_slots=20)
    for name in "abc":
        newest = world.add(name, 65, 1)
        world.drain()
    written = []
    for _ in range(3):  # pauses
        world.write_all()
        assert tier.flush(60)
        written.append(tier.use().bytes_written)
    assert written[0] < 2 * limit
    assert written == written[:1] * 3
    assert tier.num_leading(newest.page_hashes) == 4
    assert state_records(STATE_SIZE).record(newest.page_hashes[3]) in tier
    tier.close()


def test_writing_looks_at_each_page_once(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    num_looks = 0
    is_written, contains = DiskTier.is_written, DiskTier.__contains__

    def looked(look: Callable[[DiskTier, bytes], bool]) -> Callable[[DiskTier, bytes], bool]:
        def count(self: DiskTier, name: bytes) -> bool:
            nonlocal num_looks
            num_looks += 1
            return look(self, name)

        return count

    world = World(tier, num_pages=512)
    for number in range(16):
        world.add(chr(ord("a") + number), 500, 1)
    world.drain()
    monkeypatch.setattr(transfers, "WRITE_BYTES", SIZE)
    monkeypatch.setattr(DiskTier, "is_written", looked(is_written))
    monkeypatch.setattr(DiskTier, "__contains__", looked(contains))
    while world.transfers.write_idle():
        assert tier.flush(60)
    assert tier.use().num_written == 16 * 31
    assert num_looks < 5 * 16 * 31


def test_closing_writes_what_is_cached(tier: DiskTier) -> None:
    world = World(tier, num_pages=32)
    world.add("a", 200, 1)
    world.drain()
    world.transfers.close(keeps_pages=True)
    assert tier.use().num_written == 12


def test_closing_after_a_failure_writes_nothing(tier: DiskTier) -> None:
    world = World(tier, num_pages=32)
    world.add("a", 200, 1)
    world.drain()
    world.transfers.close(keeps_pages=False)
    assert tier.use().num_written == 0


def test_closing_takes_a_bounded_time(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter(range(0, 1_000_000, 4))  # seconds pass with every look at the clock
    monkeypatch.setattr(transfers, "WRITE_BYTES", SIZE)
    world = World(tier, num_pages=32, clock=lambda: float(next(now)))
    world.add("a", 200, 1)
    world.drain()
    world.transfers.close(keeps_pages=True)
    assert tier.use().num_written < 12


def on_disk(tier: DiskTier) -> None:
    """A prompt of 12 full pages on disk, and in no memory."""
    world = World(tier, num_pages=32)
    world.add("a", 200, 1)
    world.drain()
    world.write_all()
    assert tier.flush(60)


def test_damaged_files_cost_their_own_pages_and_are_written_again(
    tier: DiskTier, tmp_path: Path
) -> None:
    world = World(tier, num_pages=32)
    request = world.add("a", 200, 1)
    world.drain()
    world.write_all()
    assert tier.flush(60)
    for hash_ in request.page_hashes[1::3]:
        DiskFiles(tmp_path / "pages", b"i" * 16).path(hash_).write_bytes(b"damaged")
    after = World(tier, num_pages=32)
    request = after.add("a1", 200, 1)
    after.drain()
    assert request.num_cached == (12 - 4) * PAGE
    assert tier.use().num_lost == 4
    after.write_all()
    assert tier.flush(60)
    healed = World(tier, num_pages=32)
    request = healed.add("a2", 200, 1)
    healed.drain()
    assert request.num_cached == 12 * PAGE


def test_a_request_does_not_wait_for_pages_that_do_not_come(
    tier: DiskTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    on_disk(tier)
    now, held = 0.0, []
    poll = tier.poll
    monkeypatch.setattr(tier, "poll", lambda: [held.append(answer) for answer in poll()] and [])
    monkeypatch.setattr(tier, "wait", lambda _: None)
    world = World(tier, num_pages=32, clock=lambda: now)
    request = world.add("a1", 200, 1)
    world.step()
    assert request.loading is not None
    assert world.transfers.is_reading
    now = 6.0
    world.drain()
    assert request.num_cached == 0
    assert not world.transfers.is_reading
    assert "12 pages of request a1 are computed" in caplog.text
    assert world.scheduler.reset_prefix_cache()
    late = world.add("a2", 200, 1)  # nothing is asked of a disk that owes an answer
    world.drain()
    assert late.num_cached == 0
    assert tier.flush(60)
    late_answers = [*held, *poll()]
    assert late_answers
    monkeypatch.setattr(tier, "poll", lambda: late_answers)
    world.transfers.before_plan()  # too late: goes nowhere
    monkeypatch.setattr(tier, "poll", poll)
    assert world.scheduler.reset_prefix_cache()
    again = world.add("a3", 200, 1)
    world.drain()
    assert again.num_cached == 192


def test_while_the_disk_is_read_each_step_is_read_before_the_next_plan(tier: DiskTier) -> None:
    """On Metal the pages are written in place: no unread step may use the pool."""
    on_disk(tier)
    world = World(tier, num_pages=32)
    request = world.add("a1", 200, 1)
    assert not world.transfers.plan_writes()
    world.step()
    assert request.loading is not None
    assert world.transfers.plan_writes()
    world.drain()
    assert request.num_cached == 192
    assert not world.transfers.plan_writes()


def test_a_request_that_was_aborted_leaves_its_pages_alone(tier: DiskTier) -> None:
    on_disk(tier)
    world = World(tier, num_pages=32)
    request = world.add("a1", 200, 1)
    chunks = world.scheduler.schedule()
    assert not chunks
    world.transfers.before_launch()
    world.scheduler.abort(request.id)
    other = world.add("b", 200, 30)
    assert tier.flush(60)
    world.drain()
    assert len(other.token_ids) == 230


def test_after_a_failure_no_answer_is_taken(tier: DiskTier) -> None:
    on_disk(tier)
    world = World(tier, num_pages=32)
    world.add("a1", 200, 1)
    world.scheduler.schedule()
    world.transfers.before_launch()
    assert world.transfers.is_reading
    world.transfers.restart(world.scheduler.moves)
    assert not world.transfers.is_reading
    tier.wait(60)
    world.transfers.before_plan()
    assert not world.memory.pages


@pytest.mark.parametrize("seconds", [1e-9, 1e9])
def test_what_is_computed_faster_is_not_read(tier: DiskTier, seconds: float) -> None:
    pace = StepTimeModel(None)
    disk = DiskCache(tier, pace, [page_records(SIZE)], page_size=PAGE)
    assert disk.pays(PAGE, {"pages": 1})  # nothing is known yet
    assert disk.patience(1) > 2, "a long wait, as computing may take longer"
    on_disk(tier)
    world = World(tier, num_pages=32)
    request = world.add("a1", 200, 1)
    world.drain()
    assert tier.use().read_rate
    assert disk.pays(PAGE, {"pages": 1})
    pace.observe([Chunk(request, 0, 192, as_page_table(), samples=False)], seconds)
    assert disk.pays(192, {"pages": 12}) == (seconds > 1)
    assert (disk.patience(12) > 1) == (seconds > 1)


def test_a_window_may_pay_where_all_pages_do_not(tier: DiskTier) -> None:
    pace = StepTimeModel(None)
    kinds = [page_records(SIZE), window_records(10 * SIZE)]
    disk = DiskCache(tier, pace, kinds, page_size=PAGE)
    on_disk(tier)
    world = World(tier, num_pages=32)
    request = world.add("a1", 200, 1)
    world.drain()
    seconds = 5.5 * SIZE / tier.use().read_rate  # as long as reading half a page of the window
    pace.observe([Chunk(request, 0, 192, as_page_table(), samples=False)], seconds)
    assert disk.pays(192, {"pages": 5})
    assert not disk.pays(192, {"pages": 6})
    assert not disk.pays(192, {"pages": 0, "windows": 1})
    assert disk.pays(384, {"pages": 0, "windows": 1})


def test_forgotten_pages_and_states_leave_memory_and_disk(tier: DiskTier) -> None:
    world = World(tier, num_pages=40, num_state_slots=20)
    engine = world.engine()
    for name in "ab":
        world.add(name, 200, 1)
    world.drain()
    world.write_all()
    assert tier.flush(60)
    num_before = tier.use().num_pages
    forgotten = engine.forget_prompts([[ord("a")] * 200], [], b"")
    assert (forgotten.num_pages, forgotten.num_on_disk) == (12, 12)
    world.write_all()
    assert tier.flush(60)
    assert tier.use().num_pages == num_before // 2, "pages and states, and not written again"
    assert engine.forget_prompts([[ord("a")] * 200], [], b"") == Forgotten()
    after = World(tier, num_pages=32, num_state_slots=20)
    requests = [after.add(name, 200, 1) for name in ("a1", "b1")]
    after.drain()
    assert [request.num_cached for request in requests] == [0, 192]
