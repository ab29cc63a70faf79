"""Engine: the order of decide, compute and commit, with a runner that only writes down its calls."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.errors import OutOfMemory, QueueFull
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.stats import MemoryUse
from mlxserve.disk.files import DiskFiles
from mlxserve.disk.tier import DiskTier
from mlxserve.engine.disk_cache import DiskCache, page_records
from mlxserve.engine.engine import Engine
from mlxserve.engine.snapshot import PageState, Phase
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.engine.timeline import Timeline
from mlxserve.request import Chunk, FinishReason, Request, Sampled
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.pins import Pins
from mlxserve.scheduler.scheduler import Scheduler
from tests.reliability.faults import Fault, Point

PAGE = 16
PAGE_BYTES = 8


@dataclass(frozen=True)
class Step:
    number: int
    chunks: tuple[Chunk, ...]


class Recorder:
    """A runner whose every token is 7, and a clock that its steps move."""

    vision = None
    no_drafts_reason = ""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.steps: list[Step] = []
        self.now = 0.0

    def launch(self, chunks: Sequence[Chunk], previous: Step | None) -> Step:
        step = Step(len(self.steps), tuple(chunks))
        if any(chunk.is_lazy for chunk in chunks):
            assert previous is not None
            assert previous.number == step.number - 1
        self.steps.append(step)
        self.calls.append(f"launch {step.number}")
        return step

    def back(self, kind: str, num_pages: int) -> None:
        """Its pages take no memory."""

    def read(self, kind: str, pages: Sequence[int]) -> list[bytes]:
        return [page.to_bytes(PAGE_BYTES, "big") for page in pages]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert len(sources) == len(targets)
        self.calls.append(f"copy {len(sources)}")

    def start(self, step: Step) -> None:
        self.calls.append(f"start {step.number}")

    def collect(self, step: Step) -> list[Sampled | None]:
        self.calls.append(f"collect {step.number}")
        self.now += 0.01 + 0.001 * sum(chunk.length for chunk in step.chunks)
        return [Sampled(7) if chunk.samples else None for chunk in step.chunks]

    def restart(self, num_pages: int) -> None:
        self.calls.append(f"restart {num_pages}")

    def resize(self, num_pages: int) -> None:
        if num_pages > 99:
            raise OutOfMemory("so much there is not")
        self.calls.append(f"resize {num_pages}")

    def check(self, num_pages: int, units: Mapping[str, Collection[int]]) -> None:
        assert num_pages > 0
        assert not units

    def memory(self) -> MemoryUse:
        return MemoryUse(kv_cache=1, active=2, reserved=3, peak=4, kv_cache_dtype="q8")

    def clock(self) -> float:
        return self.now


def build(
    num_pages: int = 64,
    target: float | None = None,
    tier: DiskTier | None = None,
    **options: Any,
) -> tuple[Engine, Recorder]:
    pool = PagePool(num_pages, PAGE)
    settings = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 512, **options}
    pace = StepTimeModel(target)
    disk = tier and DiskCache(tier, pace, [page_records(PAGE_BYTES)], page_size=PAGE)
    scheduler = Scheduler(SchedulerConfig(**settings), pool, disk=disk)
    runner = Recorder()
    engine = Engine(scheduler, runner, pace, runner.clock, disk)  # type: ignore[arg-type]
    return engine, runner


def request(name: str, length: int, max_tokens: int) -> Request:
    tokens = [hash((name, i)) % 1000 for i in range(length)]
    return Request(name, tokens, SamplingParams(max_tokens=max_tokens, temperature=0))


def drain(engine: Engine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    for _ in range(2000):
        if not engine.has_work:
            break
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    assert not engine.has_work
    return tokens


def test_a_step_is_launched_before_the_one_before_it_is_read_and_started_after() -> None:
    engine, runner = build()
    engine.add(request("a", 5, max_tokens=3))
    drain(engine)
    assert runner.calls == [
        *("launch 0", "start 0"),
        *("launch 1", "collect 0", "start 1"),
        *("launch 2", "collect 1", "start 2"),
        "collect 2",
    ]


def test_what_was_read_is_returned_before_the_next_step_starts() -> None:
    engine, runner = build()
    engine.add(request("a", 5, max_tokens=3))
    assert engine.step() == []
    assert runner.calls == ["launch 0"]
    engine.start()
    [output] = engine.step()
    assert output.token_ids == (7,)
    assert runner.calls[1:] == ["start 0", "launch 1", "collect 0"]
    engine.start()
    engine.start()
    assert runner.calls[4:] == ["start 1"], "a step starts once"


def test_what_was_committed_before_a_call_failed_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The call reads a step, in which a named prefix is pinned after an answer's token was committed."""
    engine, _ = build()
    engine.add(request("a", 5, max_tokens=6))
    engine.add(replace(request("p", 20, max_tokens=1), pins=True))
    assert engine.step() == []

    def fail(*_: object) -> list[int]:
        raise RuntimeError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(Pins, "fulfil", fail)
        with pytest.raises(RuntimeError, match="planted"):
            engine.reset_prefix_cache(force=True)
    outputs = [output for _ in range(8) for output in engine.step()]
    tokens = [output.token_ids for output in outputs if output.request_id == "a"]
    assert tokens == [(7,)] * 6


def test_an_output_is_not_returned_again_where_the_next_commit_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither where nothing of it began, nor where it failed before its first token."""
    for owner, method in ((Scheduler, "update"), (PageTables, "step_read")):
        engine, _ = build()
        engine.add(request("a", 5, max_tokens=6))
        tokens = [output for _ in range(3) for output in engine.step()]
        assert len(tokens) == 2
        with monkeypatch.context() as patch:
            patch.setattr(owner, method, raise_planted)
            with pytest.raises(OSError, match="planted"):
                engine.step()
        assert engine.restart() == []


def raise_planted(*_: object) -> None:
    raise OSError("planted")


def test_pages_are_copied_before_the_step_that_writes_to_the_copies() -> None:
    engine, runner = build()
    leader = request("a", 5, max_tokens=2)
    forks = [replace(request("a", 5, max_tokens=2), id=name, fork_of=leader.id) for name in "bc"]
    engine.add_all([leader, *forks])
    tokens = drain(engine)
    assert {name: len(ids) for name, ids in tokens.items()} == {"a": 2, "b": 2, "c": 2}
    at = runner.calls.index("copy 2")
    assert runner.calls[at - 1 : at + 2] == ["start 1", "copy 2", "launch 2"]
    assert [chunk.request.id for chunk in runner.steps[2].chunks] == ["b", "c"]


def test_a_request_and_its_forks_are_queued_all_or_none() -> None:
    engine, _ = build(max_num_waiting=2)
    leader = request("a", 5, max_tokens=2)
    forks = [replace(request("a", 5, max_tokens=2), id=name, fork_of=leader.id) for name in "bc"]
    with pytest.raises(QueueFull):
        engine.add_all([leader, *forks])
    assert not engine.has_work
    assert engine.monitor.stats().engine.request_success == {}


def test_a_request_that_is_queued_and_cannot_be_timed_is_not_queued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, _ = build()

    def failing(self: Timeline, request_id: str) -> None:
        raise RuntimeError(f"no time for {request_id}")

    monkeypatch.setattr(Timeline, "arrived", failing)
    with pytest.raises(RuntimeError):
        engine.add_all([request("a", 10, max_tokens=3)])
    assert not engine.live_ids
    engine.monitor.snapshot()


def test_memory_that_could_run_out_makes_it_read_before_it_plans() -> None:
    engine, runner = build(num_pages=4)
    for name in "abc":
        engine.add(request(name, 14, max_tokens=30))
    tokens = drain(engine)
    assert {name: len(ids) for name, ids in tokens.items()} == {"a": 30, "b": 30, "c": 30}
    assert engine.monitor.stats().scheduler.num_preemptions > 0
    pairs = list(pairwise(runner.calls))
    assert any(a.startswith("collect") and b.startswith("launch") for a, b in pairs)


class StuckFiles(DiskFiles):
    """A disk that does not return from a write, until the gate is opened."""

    def __init__(self, base: Path) -> None:
        super().__init__(base, b"i" * 16)
        self.gate, self.entered = threading.Event(), threading.Event()

    def write(self, name: bytes, payload: bytes, used: float | None = None) -> None:
        self.entered.set()
        self.gate.wait()
        super().write(name, payload, used)


def test_no_step_waits_for_a_disk_that_stands_still(tmp_path: Path) -> None:
    files = StuckFiles(tmp_path)
    tier = DiskTier(tmp_path, identity=b"i" * 16, limit=1 << 20, daily_writes=1 << 20, files=files)
    try:
        engine, _ = build(tier=tier)
        old = engine.add(request("old", 160, max_tokens=1))
        drain(engine)
        while engine.idle():  # writes what is cached
            pass
        assert files.entered.wait(60)
        assert tier.num_leading(old.page_hashes) == 10
        assert engine.reset_prefix_cache()
        engine.add(request("stream", 20, max_tokens=120))
        other = engine.add(request("other", 100, max_tokens=1))
        for _ in range(20):
            engine.step()
        assert tier.num_leading(other.page_hashes) == 6  # handed over beside the stream
        engine.add(replace(request("old", 160, max_tokens=2), id="again"))  # is to be read
        for _ in range(30):
            assert [output.request_id for output in engine.step()] == ["stream"]
        assert [r.phase for r in engine.monitor.snapshot().requests if r.id == "again"] == [
            Phase.LOADING
        ]
        tokens = drain(engine)  # what does not come is computed
        assert len(tokens["again"]) == 2
        use = tier.use()
        assert (use.num_written, use.num_read) == (0, 0)
    finally:
        files.gate.set()
        tier.close()


def test_an_abort_between_steps_drops_the_token_in_flight_and_frees_the_pages() -> None:
    engine, _ = build()
    engine.add(request("a", 40, max_tokens=50))
    engine.step()
    engine.step()
    (end,) = engine.abort("a")
    assert end.finish_reason is FinishReason.ABORT
    assert end.token_ids == ()
    assert engine.abort("a") == []
    drain(engine)
    assert engine.monitor.stats().pool.num_used == 0
    assert engine.monitor.stats().engine.request_success == {"abort": 1}


def test_an_abort_that_failed_half_way_is_found_though_a_token_was_read_early() -> None:
    """The audit took the undelivered token for the end of the answer, which then never came."""
    engine, _ = build()
    engine.add(request("a", 40, max_tokens=50))
    engine.step()
    engine.step()
    engine.resize_cache(engine.monitor.stats().pool.num_pages + 1)  # reads the step under way
    fault = Fault(Point(PageTables, "end"), lambda: OSError("planted"))
    with fault.planted(), pytest.raises(OSError, match="planted"):
        engine.abort("a")
    with pytest.raises(AssertionError, match="nothing computes the answers of a"):
        engine.check(["a"])
    (token,) = engine.restart(awaited=["a"])
    assert token.finish_reason is None
    assert len(token.token_ids) == 1
    assert engine.live_ids == set()


def test_tokens_and_ends_are_counted() -> None:
    engine, _ = build()
    engine.add(request("a", 20, max_tokens=4))
    engine.add(request("b", 30, max_tokens=2))
    drain(engine)
    stats = engine.monitor.stats()
    assert stats.scheduler.prefix_queries == 50
    assert stats.engine.generation_tokens == 6
    assert stats.engine.request_success == {"length": 2}
    assert stats.pool.usage == 0


@pytest.mark.parametrize(("target", "longest"), [(None, 256), (0.05, 48)])
def test_prompts_beside_a_stream_keep_its_steps_near_the_target(
    target: float | None, longest: int
) -> None:
    engine, runner = build(target=target, long_prefill_token_threshold=0)
    engine.add(request("stream", 64, max_tokens=200))
    for _ in range(20):
        engine.step()
    first = len(runner.steps)
    engine.add(request("long", 400, max_tokens=1))
    tokens = drain(engine)
    assert len(tokens["stream"]) <= 200
    chunks = [c for step in runner.steps[first:] for c in step.chunks if c.request.id == "long"]
    assert sum(chunk.length for chunk in chunks) == 400
    # 10 ms and 1 ms a token: 39 tokens fit beside one decode, 32 of them in whole pages.
    assert max(chunk.length for chunk in chunks) <= longest
    if target is None:
        assert max(chunk.length for chunk in chunks) > 200
    assert all(chunk.length == 32 for chunk in chunks[:-1]) is (target is not None)


def test_histograms_show_how_long_requests_wait_and_how_full_steps_are() -> None:
    engine, runner = build(max_num_seqs=1)
    engine.add(request("a", 100, max_tokens=10))
    engine.add(request("b", 20, max_tokens=1))
    engine.add(request("gone", 20, max_tokens=1))
    engine.abort("gone")
    drain(engine)
    stats = engine.monitor.stats().engine
    assert sum(stats.queue_seconds.counts) == 2  # the aborted one never started
    # "a" starts at once; "b" waits for its 10 steps: 110 ms, then 9 times 11 ms.
    assert stats.queue_seconds.total == pytest.approx(0.11 + 9 * 0.011, abs=0.02)
    assert stats.prefill_seconds.total == pytest.approx(0.11 + 0.03, abs=0.001)
    assert sum(stats.iteration_tokens.counts) == len(runner.steps)
    assert stats.iteration_tokens.total == sum(c.length for s in runner.steps for c in s.chunks)
    above_64 = stats.iteration_tokens.bounds.index(128)
    assert stats.iteration_tokens.counts[above_64] == 1


def test_the_tokens_of_ended_requests_are_counted_by_request() -> None:
    engine, _ = build(max_num_seqs=1)
    engine.add(request("a", 100, max_tokens=10))
    engine.add(request("gone", 20, max_tokens=4))
    engine.abort("gone")
    drain(engine)
    stats = engine.monitor.stats().engine
    assert stats.request_prompt_tokens.total == 120
    assert stats.request_generation_tokens.total == 10
    assert sum(stats.request_generation_tokens.counts) == 2


def test_a_forced_reset_loses_no_token_of_the_step_that_was_unread() -> None:
    expected, _ = build()
    engine, _ = build()
    for e in (expected, engine):
        e.add(request("a", 40, 20))
    wanted = drain(expected)
    tokens: dict[str, list[int]] = {}
    for number in range(500):
        if not engine.has_work:
            break
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if number in (3, 9):
            assert not engine.reset_prefix_cache()
            assert engine.reset_prefix_cache(force=True)
            assert engine.monitor.stats().pool.num_cached == 0
        engine.check()
    assert tokens == wanted


def test_a_resize_reads_the_unread_step_and_loses_none_of_its_tokens() -> None:
    expected, _ = build()
    engine, runner = build()
    for e in (expected, engine):
        e.add(request("a", 40, 20))
        e.add(request("b", 90, 12))
    wanted = drain(expected)
    tokens: dict[str, list[int]] = {}
    sizes = iter((20, 40, 9, 8, 50, 64))
    for number in range(500):
        if not engine.has_work:
            break
        for output in engine.step():
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if number % 3 == 2 and (size := next(sizes, None)):
            runner.calls.clear()
            engine.resize_cache(size)
            assert [call.split()[0] for call in runner.calls[:2]] == ["collect", "resize"]
            assert engine.monitor.stats().pool.num_pages == size
        engine.check()
    assert next(sizes, None) is None
    assert tokens == wanted


def test_memory_that_is_not_there_leaves_the_cache_as_it_is() -> None:
    engine, _ = build(num_pages=8)
    with pytest.raises(OutOfMemory):
        engine.resize_cache(100)
    assert engine.monitor.stats().pool.num_pages == 8
    assert engine.max_model_len == 8 * PAGE


def test_pages_are_kept_for_a_time_and_then_evicted_like_others() -> None:
    engine, runner = build(num_pages=8)
    first = request("a", 48, 1)

    def hits_after_others() -> int:
        for name in ("b", "c", "d"):
            engine.add(request(f"{name} at {runner.now}", 48, 1))
            drain(engine)
        before = engine.monitor.stats().scheduler.prefix_hits
        engine.add(replace(first, id=f"a at {runner.now}"))
        drain(engine)
        return engine.monitor.stats().scheduler.prefix_hits - before

    engine.add(first)
    drain(engine)
    engine.keep_pages(first, 100.0)
    runner.now += 90
    assert hits_after_others() == 47, "all but the last token"
    runner.now += 101
    assert hits_after_others() == 0


def test_a_snapshot_shows_every_request_and_every_page() -> None:
    engine, runner = build(num_pages=32, max_num_seqs=2, max_num_batched_tokens=64)
    for name in ("a", "b", "c", "d"):
        engine.add(request(name, 40, max_tokens=8))
    for _ in range(3):
        engine.step()
    seen = engine.monitor.snapshot()
    assert [one.id for one in seen.requests] == ["a", "b", "c", "d"]
    assert [one.position for one in seen.requests] == [None, None, 1, 2]
    assert [one.phase for one in seen.requests[2:]] == [Phase.QUEUED] * 2
    assert seen.requests[0].phase is Phase.DECODING
    assert all(one.age == runner.now > 0 for one in seen.requests)
    assert len(seen.pages) == 32
    held = {page for one in seen.requests for page in one.page_table}
    assert seen.num_pages(PageState.ACTIVE) == len(held)
    assert all(seen.pages[page] == PageState.ACTIVE for page in held)
    assert seen.memory == MemoryUse(1, 2, 3, 4, "q8")
    assert seen.prefill_rate > 0
    drain(engine)
    seen = engine.monitor.snapshot()
    assert seen.requests == ()
    assert seen.num_pages(PageState.CACHED) == seen.stats.pool.num_cached > 0
    assert seen.stats.engine.prefill_tokens == 160


def test_a_snapshot_of_a_shared_prefix_shows_its_pages_as_shared() -> None:
    engine, _ = build()
    engine.add(request("a", 64, max_tokens=8))
    for _ in range(3):
        engine.step()
    engine.add(replace(request("a", 64, max_tokens=8), id="twin"))
    engine.step()
    first, second = engine.monitor.snapshot().requests
    shared = set(first.page_table) & set(second.page_table)
    assert len(shared) == 3  # the fourth page holds the last token, which is computed by each
    pages = engine.monitor.snapshot().pages
    assert {page for page in range(64) if pages[page] == PageState.SHARED} == shared
    drain(engine)


@pytest.mark.parametrize("is_failure", [False, True])
def test_a_named_prefix_that_ends_in_the_step_read_before_a_restart_has_an_age_again(
    is_failure: bool,
) -> None:
    """Its end is not delivered yet when it is queued anew in the empty cache."""
    engine, _ = build(num_pages=32)
    engine.add(replace(request("prefix", 40, max_tokens=1), pins=True))
    engine.step()
    assert engine.has_work, "its only token is not read yet"
    if is_failure:
        engine.reset_prefix_cache(force=True)  # reads it
        outputs = engine.restart()
    else:
        engine.resize_cache(16)
        outputs = engine.step()
    assert [output.finish_reason for output in outputs] == [FinishReason.LENGTH]
    assert [one.id for one in engine.monitor.snapshot().requests] == ["prefix"]
    drain(engine)
    assert engine.monitor.stats().engine.request_success[FinishReason.LENGTH] == 2
    assert engine.monitor.stats().pool.num_pinned == 3


def test_the_audit_finds_a_step_whose_results_were_lost_on_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its requests would wait for ever: the engine begins again."""
    engine, runner = build()
    engine.add(request("a", 10, max_tokens=8))
    engine.step()
    engine.step()
    engine.check()
    runner.now += 1

    def failing(*_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(StepTimeModel, "observe", failing)
    with pytest.raises(RuntimeError):
        engine.reset_prefix_cache(force=True)
    with pytest.raises(AssertionError, match="lost before it was read"):
        engine.check()
    engine.restart()
    engine.check()
