"""A failure inside the engine ends what it concerns; the same engine answers the next request."""

from __future__ import annotations

import asyncio
import logging
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from itertools import compress
from typing import Any

import mlx.core as mx
import pytest

from mlxserve import (
    AsyncLLM,
    EngineFailed,
    EngineStopped,
    OutOfMemory,
    PagesPromised,
    PrefixQuotaExceeded,
    QueueFull,
    SamplingParams,
)
from mlxserve.build import build_text_model
from mlxserve.cache.kv import KVPool
from mlxserve.chat.text_model import TextModel
from mlxserve.core.config import EngineConfig
from mlxserve.engine import async_engine
from mlxserve.engine.engine import Engine
from mlxserve.engine.memory import MemoryWatch
from mlxserve.engine.monitor import EngineMonitor
from mlxserve.engine.throughput_log import ThroughputLog
from mlxserve.engine.transfers import Transfers
from mlxserve.model.embedding import Embedding
from mlxserve.model.runner import ModelRunner
from mlxserve.scheduler.fairness import FairShare
from mlxserve.scheduler.page_tables import PageTables
from mlxserve.scheduler.roster import Roster
from mlxserve.scheduler.scheduler import Scheduler
from tests.device_errors import broken
from tests.reliability.faults import Fault, Point, all_planted
from tests.together import begun_together

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
PROMPT = [7, 8, 9, 10] * 12
OPTIONS: Any = {"num_pages": 64, "page_size": 16, "disable_log_stats": True}
ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="macOS enforces no RLIMIT_AS")


def planted() -> RuntimeError:
    return RuntimeError("planted")


def is_busy(subject: Any) -> bool:
    return not isinstance(subject, Engine) or subject.has_work


def make_chat(**options: Any) -> TextModel:
    return build_text_model(EngineConfig().with_options(**OPTIONS | options))


async def tokens(
    chat: TextModel, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY
) -> Any:
    [answer] = await (await chat.writer.submit(prompt, params)).whole()
    return answer.token_ids


@pytest.fixture(scope="module")
def shared() -> Iterator[TextModel]:
    """One engine for many failures."""
    chat = make_chat(max_engine_failures=1000)
    yield chat
    chat.close()


@pytest.fixture(scope="module")
def wanted(shared: TextModel) -> Any:
    """What the shared engine answers to PROMPT."""
    return asyncio.run(tokens(shared))


def run(scenario: Callable[[TextModel], Coroutine[Any, Any, None]], **options: Any) -> None:
    chat = make_chat(**options)
    try:
        asyncio.run(asyncio.wait_for(scenario(chat), 60))
    finally:
        chat.close()


async def a_vector(chat: TextModel) -> None:
    await chat.vectors.embed([PROMPT])


async def a_snapshot(chat: TextModel) -> None:
    await chat.engine.snapshot()


async def a_larger_cache(chat: TextModel) -> None:
    await chat.engine.resize_cache(80)


async def a_smaller_cache(chat: TextModel) -> None:
    await chat.engine.resize_cache(20)


async def a_reset(chat: TextModel) -> None:
    await chat.engine.reset_prefix_cache()


async def an_answer(chat: TextModel) -> None:
    await tokens(chat)


@pytest.mark.parametrize(
    ("ask", "point", "error"),
    [
        (a_vector, Point(Embedding, "advance"), RuntimeError),
        (a_vector, Point(ModelRunner, "embedding"), MemoryError),
        (a_snapshot, Point(EngineMonitor, "snapshot"), OSError),
        (a_larger_cache, Point(ModelRunner, "resize"), RuntimeError),
        (a_larger_cache, Point(ModelRunner, "resize"), MemoryError),
        (a_larger_cache, Point(Scheduler, "resize"), OSError),
        (a_smaller_cache, Point(Scheduler, "resize"), RuntimeError),
        (a_smaller_cache, Point(ModelRunner, "resize"), MemoryError),
        (a_reset, Point(Scheduler, "reset_prefix_cache"), OSError),
        (an_answer, Point(Scheduler, "add"), RuntimeError),
        (an_answer, Point(FairShare, "arrive"), MemoryError),
    ],
    ids=lambda value: str(value) if isinstance(value, Point) else value.__name__,
)
def test_an_exception_in_a_call_reaches_its_caller_and_the_engine_goes_on(
    shared: TextModel,
    wanted: Any,
    ask: Callable[[TextModel], Coroutine[Any, Any, None]],
    point: Point,
    error: type[Exception],
) -> None:
    async def scenario(chat: TextModel) -> None:
        fault = Fault(point, lambda: error("planted"))
        with fault.planted(), pytest.raises(EngineFailed) as caught:
            await ask(chat)
        assert isinstance(caught.value.__cause__, error)
        assert await tokens(chat) == wanted
        await chat.engine.check()
        await chat.engine.resize_cache(64)

    asyncio.run(asyncio.wait_for(scenario(shared), 60))


RESIZE = Scheduler.resize


@pytest.mark.parametrize("at", range(3))
def test_nothing_computes_what_a_failed_call_has_queued_and_could_not_take_back(
    shared: TextModel, wanted: Any, at: int
) -> None:
    """The third sample fails to be queued, and the first one to be aborted, before it is or half way."""
    third = Fault(Point(Scheduler, "add"), planted, at=2)
    points = Point(Scheduler, "abort"), Point(Roster, "end"), Point(PageTables, "end")
    abort = Fault(points[at], lambda: OSError("planted"))

    async def scenario() -> None:
        params = replace(GREEDY, n=3)
        with all_planted([third, abort]), pytest.raises(EngineFailed):
            await shared.writer.submit_all([PROMPT], params)
        await shared.engine.check()
        assert not (await shared.engine.snapshot()).requests
        assert await tokens(shared) == wanted

    asyncio.run(asyncio.wait_for(scenario(), 60))
    assert third.has_happened
    assert abort.has_happened


def half_resized(scheduler: Scheduler, num_pages: int) -> None:
    """The scheduler has other pages, and the arrays are as before."""
    RESIZE(scheduler, num_pages)
    raise PrefixQuotaExceeded("planted")


def all_forgotten(scheduler: Scheduler, _num_pages: int) -> None:
    for request in list(scheduler.roster.live):
        scheduler.abort(request.id)
    raise PrefixQuotaExceeded("planted")


@pytest.mark.parametrize(("resize", "num_lost"), [(half_resized, 0), (all_forgotten, 3)])
def test_a_refusal_that_is_half_done_ends_what_it_lost_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, resize: Callable[..., None], num_lost: int
) -> None:
    async def scenario(chat: TextModel) -> None:
        prompts = [[20 + number, *PROMPT] for number in range(3)]
        wanted = [await tokens(chat, prompt) for prompt in prompts]
        monkeypatch.setattr(Scheduler, "resize", resize)
        with begun_together(9):
            streams = [await chat.writer.submit(prompt, GREEDY) for prompt in prompts]
            with pytest.raises(PrefixQuotaExceeded, match="planted"):
                await chat.engine.resize_cache(20)
        answers = [await whole(stream) for stream in streams]
        assert [isinstance(answer, EngineFailed) for answer in answers].count(True) == num_lost
        assert answers[num_lost:] == wanted[num_lost:]
        assert await tokens(chat) is not None
        await chat.engine.check()

    async def whole(stream: Any) -> Any:
        try:
            [answer] = await stream.whole()
        except EngineFailed as error:
            return error
        return answer.token_ids

    run(scenario)


def test_a_caller_goes_on_after_an_assertion_that_restarts_the_engine(wanted: Any) -> None:
    """The restart frees what the failed call held, and nothing of its caller."""
    is_raised = threading.Event()

    def late() -> AssertionError:
        assert is_raised.wait(30)
        return AssertionError("planted in the audit")

    async def scenario(chat: TextModel) -> None:
        assert await tokens(chat) == wanted
        fault = Fault(Point(Scheduler, "check"), lambda: AssertionError("planted"))
        again = Fault(Point(ModelRunner, "check"), late)
        with fault.planted(), again.planted():
            with pytest.raises(AssertionError, match="planted"):
                await chat.engine.check()
            is_raised.set()
            await chat.engine.snapshot()  # after the restart
        assert await tokens(chat) == wanted
        assert chat.engine.stats().engine.engine_failures == 1

    run(scenario)


def test_a_refusal_that_changed_nothing_costs_no_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit takes time in proportion to the pool, and a client may send any number of such requests."""

    def audit(*_: Any) -> None:
        raise AssertionError("audited")

    async def scenario(chat: TextModel) -> None:
        monkeypatch.setattr(Engine, "check", audit)
        with begun_together(9):
            await chat.writer.submit(PROMPT, GREEDY)
            with pytest.raises(QueueFull):  # the first is queued, and is gone with the second
                await chat.writer.submit_all([PROMPT] * 2, GREEDY)
            with pytest.raises(PagesPromised):
                await chat.engine.resize_cache(3)
        assert chat.engine.stats().engine.engine_failures == 0

    run(scenario, max_num_waiting=2)


def test_an_exception_in_a_call_without_a_caller_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(chat: TextModel) -> None:
        with Fault(Point(Engine, "unpin"), planted).planted():
            await chat.writer.prefixes.add("p", PROMPT)
            chat.writer.prefixes.remove("p")
            await chat.engine.check()
        assert "that has no caller failed" in caplog.text

    run(scenario)


def test_a_prefix_is_added_and_can_be_removed_if_counting_fails_after_the_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(chat: TextModel) -> None:
        fault = Fault(Point(EngineMonitor, "stats"), planted, is_meant=is_busy)
        with fault.planted():
            await chat.writer.prefixes.add("p", PROMPT)
        assert fault.has_happened
        assert "could not be counted after a call" in caplog.text
        assert (await chat.engine.snapshot()).stats.engine.engine_failures == 0
        assert chat.engine.stats().pool.num_pinned == 3
        chat.writer.prefixes.remove("p")
        await chat.engine.check()
        assert (await chat.engine.snapshot()).stats.pool.num_pinned == 0

    run(scenario)


@pytest.mark.parametrize(
    "point",
    [
        Point(Scheduler, "schedule"),
        Point(Scheduler, "update"),
        Point(ModelRunner, "launch"),
        Point(ModelRunner, "start"),
        Point(ModelRunner, "collect"),
        Point(Transfers, "before_plan"),
        Point(Transfers, "after_read"),
    ],
    ids=str,
)
@pytest.mark.parametrize("at", [2, 5])
def test_a_failed_step_ends_its_request_with_an_error_and_the_next_is_answered(
    shared: TextModel, wanted: Any, point: Point, at: int
) -> None:
    async def scenario(chat: TextModel) -> None:
        before = (await chat.engine.snapshot()).stats.engine
        fault = Fault(point, planted, at, is_meant=is_busy)
        with fault.planted(), pytest.raises(EngineFailed) as caught:
            await tokens(chat)
        assert str(caught.value.__cause__) == "planted"
        assert await tokens(chat) == wanted
        await chat.engine.check()
        stats = (await chat.engine.snapshot()).stats
        assert stats.engine.engine_failures == before.engine_failures + 1
        assert stats.engine.lost_requests == before.lost_requests + 1
        assert stats.pool.num_used == 0

    asyncio.run(asyncio.wait_for(scenario(shared), 60))


@pytest.mark.slow
@pytest.mark.parametrize(
    "point",
    [
        Point(EngineMonitor, "stats"),
        Point(Engine, "watch_memory"),
        Point(MemoryWatch, "look"),
        Point(ThroughputLog, "write"),
    ],
    ids=str,
)
def test_a_failure_of_what_only_looks_and_counts_ends_no_answer(
    point: Point, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(async_engine, "STATS_SECONDS", 0.0)  # counted after every step

    def fail(*_: object, **__: object) -> None:
        raise planted()

    async def scenario(chat: TextModel) -> None:
        wanted = await tokens(chat)
        with monkeypatch.context() as patch:
            patch.setattr(point.owner, point.method, fail)
            assert await tokens(chat) == wanted
            assert await tokens(chat) == wanted
        await chat.engine.check()
        assert (await chat.engine.snapshot()).stats.engine.engine_failures == 0
        said = Counter(r.thread for r in caplog.records if "it goes on" in r.message)
        assert set(said.values()) == {1}, "each engine of this process says it once"

    run(scenario)


def test_requests_that_wait_survive_a_failed_step_of_others() -> None:
    async def scenario(chat: TextModel) -> None:
        others = [[20 + number, *PROMPT] for number in range(3)]
        wanted = [await tokens(chat, other) for other in others]
        with Fault(Point(ModelRunner, "collect"), planted, 4).planted():
            answers = await asyncio.gather(
                tokens(chat), *(tokens(chat, other) for other in others), return_exceptions=True
            )
        assert isinstance(answers[0], EngineFailed)
        assert answers[1:] == wanted
        await chat.engine.check()

    run(scenario, max_num_seqs=1, max_num_batched_tokens=64)


@pytest.mark.slow
@pytest.mark.parametrize("interval", [32, pytest.param(8, marks=pytest.mark.long)])
def test_a_preempted_answer_survives_with_the_tokens_it_has(interval: int) -> None:
    async def scenario(chat: TextModel) -> None:
        params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        prompts = [[20 + number, *PROMPT[:30]] for number in range(3)]
        wanted = [await tokens(chat, prompt, params) for prompt in prompts]
        for at in range(20, 110, interval):
            fault = Fault(Point(ModelRunner, "launch"), planted, at)
            with fault.planted(), begun_together(len(prompts)):
                answers = await asyncio.gather(
                    *(tokens(chat, prompt, params) for prompt in prompts), return_exceptions=True
                )
            survived = [not isinstance(answer, EngineFailed) for answer in answers]
            assert any(survived), at
            assert list(compress(answers, survived)) == list(compress(wanted, survived)), at
            await chat.engine.check()
        assert chat.engine.stats().scheduler.num_preemptions > 0

    run(scenario, num_pages=10, max_engine_failures=100)


def test_a_waiting_request_that_makes_each_step_fail_is_ended_by_the_second_failure() -> None:
    async def scenario(chat: TextModel) -> None:
        def poisoned(*_: Any, **__: Any) -> Any:
            raise RuntimeError("planted")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scheduler, "schedule", poisoned)
            with pytest.raises(EngineFailed):
                await tokens(chat)
        await tokens(chat)
        assert chat.engine.stats().engine.engine_failures == 2

    run(scenario)


def test_a_named_prefix_survives_a_failed_step_until_it_is_removed() -> None:
    async def scenario(chat: TextModel) -> None:
        await chat.writer.prefixes.add("rules", PROMPT)
        await chat.engine.reset_prefix_cache()
        num_pinned = chat.engine.stats().pool.num_pinned
        with Fault(Point(ModelRunner, "collect"), planted).planted(), pytest.raises(EngineFailed):
            await tokens(chat)
        await tokens(chat, [99] * 5)  # by then it is computed again
        [answer] = await (await chat.writer.submit([*PROMPT, 3, 4], GREEDY)).whole()
        assert (chat.engine.stats().pool.num_pinned, num_pinned) == (3, 3)
        assert answer.usage.cached_tokens >= 48
        chat.writer.prefixes.remove("rules")
        await chat.engine.check()
        await tokens(chat)
        assert (await chat.engine.snapshot()).stats.pool.num_pinned == 0

    run(scenario)


def test_a_prefix_that_is_removed_while_it_is_computed_again_leaves_no_page_pinned() -> None:
    async def scenario(chat: TextModel) -> None:
        await chat.writer.prefixes.add("rules", PROMPT)
        with Fault(Point(ModelRunner, "collect"), planted).planted(), pytest.raises(EngineFailed):
            await tokens(chat)
        chat.writer.prefixes.remove("rules")
        await tokens(chat)
        await chat.engine.check()
        assert (await chat.engine.snapshot()).stats.pool.num_pinned == 0

    run(scenario)


def test_one_lost_choice_ends_all_choices_of_its_request() -> None:
    async def scenario(chat: TextModel) -> None:
        params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, n=3)
        with Fault(Point(ModelRunner, "collect"), planted, 3).planted():
            stream = await chat.writer.submit_all([PROMPT], params)
            with pytest.raises(EngineFailed):
                await stream.whole()
        await tokens(chat)
        assert (await chat.engine.snapshot()).requests == ()

    run(scenario, max_num_seqs=2)


def test_too_many_failures_within_a_minute_end_the_engine() -> None:
    async def scenario(chat: TextModel) -> None:
        def fails(*_: Any, **__: Any) -> Any:
            raise RuntimeError("the device is gone")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ModelRunner, "launch", fails)
            for _ in range(2):
                with pytest.raises(EngineFailed):
                    await tokens(chat)
            with pytest.raises(EngineStopped, match="the device is gone"):
                await tokens(chat)
        assert chat.engine.has_failed()
        assert not chat.engine.is_alive()

    run(scenario, max_engine_failures=3)


def test_an_engine_that_was_closed_has_not_failed() -> None:
    chat = make_chat()
    chat.close()
    assert not chat.engine.has_failed()


def test_a_failure_while_it_restarts_is_one_more_failure() -> None:
    async def scenario(chat: TextModel) -> None:
        wanted = await tokens(chat)
        with (
            Fault(Point(ModelRunner, "collect"), planted).planted(),
            Fault(Point(KVPool, "restart"), planted).planted(),
            pytest.raises(EngineFailed),
        ):
            await tokens(chat)
        assert await tokens(chat) == wanted
        await chat.engine.check()

    run(scenario)


def test_a_restart_frees_the_arrays_of_the_failed_step() -> None:
    async def scenario(chat: TextModel) -> None:
        await tokens(chat)
        before = mx.get_active_memory()
        for _ in range(3):
            fault = Fault(Point(ModelRunner, "collect"), planted)
            with fault.planted(), pytest.raises(EngineFailed):
                await tokens(chat)
        await chat.engine.check()
        pool = (await chat.engine.snapshot()).memory.kv_cache
        assert mx.get_active_memory() < before + pool // 2

    run(scenario, num_pages=512)


@pytest.mark.parametrize("at", [0, 1, 5])
def test_an_error_of_the_device_in_a_step_is_raised_and_never_read_as_tokens(
    monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    async def scenario(chat: TextModel) -> None:
        wanted = await tokens(chat)
        real, num_calls = ModelRunner.logits, 0

        def logits_of(runner: ModelRunner, batch: Any, ids: mx.array, **options: Any) -> mx.array:
            nonlocal num_calls
            num_calls += 1
            logits = real(runner, batch, ids, **options)
            if num_calls != at + 1:
                return logits
            return logits + broken().sum()

        monkeypatch.setattr(ModelRunner, "logits", logits_of)
        with pytest.raises(EngineFailed) as caught:
            await tokens(chat)
        assert "Inverse" in str(caught.value.__cause__)
        assert await tokens(chat) == wanted
        await chat.engine.check()

    run(scenario)


def test_memory_refused_in_the_middle_of_growing_changes_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(chat: TextModel) -> None:
        wanted = await tokens(chat)
        backend = (await backend_of(chat)).__class__
        fault = Fault(Point(backend, "resize_pool"), lambda: MemoryError("refused"), at=5)
        with fault.planted(), pytest.raises(OutOfMemory, match=r"80 pages .* refused"):
            await chat.engine.resize_cache(80)
        assert chat.engine.stats().engine.engine_failures == 0
        await chat.engine.check()
        before = chat.engine.stats().scheduler.prefix_hits
        assert await tokens(chat) == wanted
        assert chat.engine.stats().scheduler.prefix_hits > before, "the cache is as it was"

    async def backend_of(chat: TextModel) -> Any:
        found: list[Any] = []
        real = KVPool.write

        def looking(pool: KVPool, *args: Any) -> None:
            found.append(pool.backends[0])
            real(pool, *args)

        monkeypatch.setattr(KVPool, "write", looking)
        await tokens(chat)
        monkeypatch.undo()
        return found[0]

    run(scenario)


def _limited(gib: float) -> Callable[[], None]:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (int(gib * (1 << 30)),) * 2)

    return limit


@ONLY_LINUX
@pytest.mark.slow
def test_a_resize_that_the_address_space_refuses_is_one_sentence_and_changes_nothing() -> None:
    script = """
import asyncio
from mlxserve import LLM, OutOfMemory, SamplingParams
with LLM(num_pages=64, disable_log_stats=True) as llm:
    params = SamplingParams(max_tokens=8, temperature=0)
    [before] = llm.generate("Hello", params, use_tqdm=False)
    try:
        llm.resize_cache(60_000)
    except OutOfMemory as error:
        print("refused:", error)
    [after] = llm.generate("Hello", params, use_tqdm=False)
    print("same" if before.token_ids == after.token_ids else "different")
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        preexec_fn=_limited(2.5),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    refusal, verdict = done.stdout.splitlines()
    assert refusal.startswith("refused: 60000 pages")
    assert verdict == "same"
    assert "Traceback" not in done.stderr


@ONLY_LINUX
@pytest.mark.slow
@pytest.mark.parametrize("gib", [0.5, 1.0])
def test_a_start_with_too_few_addresses_is_one_sentence(gib: float) -> None:
    done = _serve_until_ready(gib)
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert line.startswith(f"error: this process may have {gib:.2f} GiB of addresses")


@ONLY_LINUX
@pytest.mark.slow
def test_a_cache_that_is_larger_than_the_address_space_is_one_sentence() -> None:
    done = _serve_until_ready(1.5, "--num-pages", "60000")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "60000" in last
    assert "7.32 GiB" in last
    assert "Traceback" not in done.stderr


@ONLY_LINUX
@pytest.mark.slow
@pytest.mark.parametrize("gib", [1.5, 2.0])
def test_the_cache_is_sized_to_fit_into_the_address_space(gib: float) -> None:
    done = _serve_until_ready(gib)
    assert done.stdout.startswith("mlxserve is ready")
    assert "Traceback" not in done.stderr


def _serve_until_ready(gib: float, *flags: str) -> subprocess.CompletedProcess[str]:
    """`mlxserve serve` with so many GiB of addresses, stopped once it has written a line."""
    command = [sys.executable, "-m", "mlxserve", "serve", "--port", "0", *flags]
    with subprocess.Popen(
        command,
        preexec_fn=_limited(gib),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        if first:
            process.terminate()
        _, errors = process.communicate(timeout=60)
        return subprocess.CompletedProcess(command, process.returncode, first, errors)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full is Linux's")
def test_a_trace_on_a_full_disk_stops_with_one_warning_and_the_engine_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        llm = AsyncLLM(**OPTIONS, trace="/dev/full")
        params = SamplingParams(max_tokens=100, temperature=0, ignore_eos=True)
        for _ in range(3):
            assert len((await llm.generate("Hello", params)).token_ids) == 100
        llm.close()
        assert llm.stats().engine.engine_failures == 0

    with caplog.at_level(logging.WARNING):
        asyncio.run(scenario())
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) == 1
    assert "Tracing has stopped" in caplog.text
