"""What the engine's thread does between two steps, and what its callers get from it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any, Self

import pytest

from mlxserve.core.errors import EngineFailed, EngineStopped
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.core.stats import PoolStats, SchedulerStats, Stats, StepStats
from mlxserve.engine import async_engine
from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.engine.output_stream import OutputStream
from mlxserve.request import FinishReason, Output, Request


class Waiting:
    """Replaces an Engine. Notes whether the reader has an output when the next step starts."""

    max_model_len = 4

    def __init__(self) -> None:
        self.tokens_left = 3
        self.live: list[Request] = []
        self.read = threading.Semaphore(0)
        self.in_time: list[bool] = []

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add_all(self, requests: Sequence[Request]) -> None:
        self.live += requests

    def step(self) -> list[Output]:
        self.tokens_left -= 1
        reason = None if self.tokens_left else FinishReason.LENGTH
        outputs = [Output(request.id, (7,), reason, 1, 0, None, ()) for request in self.live]
        if reason is not None:
            self.live.clear()
        return outputs

    def start(self) -> None:
        self.in_time.append(self.read.acquire(timeout=60))

    @property
    def monitor(self) -> Self:
        """Its own monitor."""
        return self

    def stats(self) -> Stats:
        return Stats()

    def mark(self) -> tuple[int, ...]:
        return (len(self.live),)

    def abort_all(self) -> list[Output]:
        return []

    def close(self, *, keeps_pages: bool) -> None:
        pass


def test_outputs_are_delivered_before_the_next_step_starts() -> None:
    async def scenario() -> None:
        stand_in: Any = Waiting()
        engine = AsyncEngine(lambda: stand_in)
        stream = await engine.submit([Request("a", [1], SamplingParams(max_tokens=3))])
        tokens = 0
        async for output in stream:
            tokens += len(output.token_ids)
            stand_in.read.release()
        engine.close()
        assert tokens == 3
        assert stand_in.in_time == [True] * 3

    asyncio.run(scenario())


class Counted(Waiting):
    """Counts how often it is counted."""

    num_counted = 0

    @property
    def monitor(self) -> Self:
        """Its own monitor."""
        return self

    def stats(self) -> Stats:
        self.num_counted += 1
        return Stats(engine=StepStats(num_steps=3 - self.tokens_left))


def test_a_step_that_ends_nothing_is_counted_with_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_engine, "STATS_SECONDS", 3600.0)

    async def scenario() -> None:
        stand_in: Any = Counted()
        engine = AsyncEngine(lambda: stand_in)
        stream = await engine.submit([Request("a", [1], SamplingParams(max_tokens=3))])
        async for output in stream:
            if output.finish_reason is not None:
                assert engine.stats().engine.num_steps == 3, "before its reader has the end"
                assert stand_in.num_counted == 4, (
                    "at first, after the call, the first and the last step"
                )
            stand_in.read.release()
        engine.close()

    asyncio.run(scenario())


def test_the_time_that_loading_took_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    def load() -> Any:
        monkeypatch.setattr(time, "monotonic", lambda: began + 900.0)
        return Waiting()

    began = time.monotonic()
    engine = AsyncEngine(load)
    silence = engine.seconds_since_beat()
    monkeypatch.undo()
    engine.close()
    assert silence < 1.0


class Holding(Waiting):
    """A request's page stays in use until the step after its abort, which waits to be let go."""

    def __init__(self) -> None:
        super().__init__()
        self.page_in_use = False
        self.is_last = threading.Event()

    @property
    def has_work(self) -> bool:
        return self.page_in_use

    def add_all(self, requests: Sequence[Request]) -> None:
        super().add_all(requests)
        self.page_in_use = True

    def abort(self, request_id: str, reason: FinishReason) -> list[Output]:
        self.live.clear()
        return []

    def step(self) -> list[Output]:
        if not self.live:
            self.is_last.set()
            self.read.acquire(timeout=60)
            self.page_in_use = False
        return []

    def start(self) -> None:
        pass

    @property
    def monitor(self) -> Self:
        """Its own monitor."""
        return self

    def stats(self) -> Stats:
        return Stats(
            scheduler=SchedulerStats(num_running=len(self.live)),
            pool=PoolStats(num_used=int(self.page_in_use)),
        )


def test_an_aborted_request_is_counted_as_gone_when_its_pages_are_free() -> None:
    async def scenario() -> None:
        stand_in: Any = Holding()
        engine = AsyncEngine(lambda: stand_in)
        await engine.submit([Request("a", [1], SamplingParams(max_tokens=3))])
        assert (engine.stats().scheduler.num_running, engine.stats().pool.num_used) == (1, 1)
        engine.abort("a")
        assert await asyncio.to_thread(stand_in.is_last.wait, 10)
        assert engine.stats().scheduler.num_running == 1
        stand_in.read.release()
        engine.close()
        assert (engine.stats().scheduler.num_running, engine.stats().pool.num_used) == (0, 0)

    asyncio.run(scenario())


class Aborts:
    """Replaces an AsyncEngine. Keeps which requests were ended, and why."""

    def __init__(self) -> None:
        self.ended: list[tuple[str, FinishReason]] = []

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        self.ended.append((request_id, reason))


def stream_of(*names: str) -> tuple[OutputStream, Aborts]:
    engine: Any = Aborts()
    requests = [Request(name, [1], SamplingParams()) for name in names]
    return OutputStream(engine, requests), engine


def test_a_stream_of_several_requests_ends_with_the_last_of_them() -> None:
    async def scenario() -> None:
        stream, _ = stream_of("a", "b")
        outputs = [
            Output("a", (1,)),
            Output("b", (2,), FinishReason.STOP),
            Output("a", (3,), FinishReason.LENGTH),
        ]
        for output in outputs:
            stream.deliver(output)
        assert [output async for output in stream] == outputs

    asyncio.run(scenario())


def test_outputs_of_a_request_that_its_reader_has_ended_are_dropped() -> None:
    async def scenario() -> None:
        stream, engine = stream_of("a", "b")
        stream.deliver(Output("a", (1,)))
        stream.deliver(Output("a", (2,)))
        stream.deliver(Output("b", (3,), FinishReason.STOP))
        assert (await anext(stream)).token_ids == (1,)
        stream.finish("a", FinishReason.STOP)
        stream.finish("a", FinishReason.ABORT)
        assert [output.token_ids async for output in stream] == [(3,)]
        assert engine.ended == [("a", FinishReason.STOP)]

    asyncio.run(scenario())


def test_closing_a_stream_aborts_only_requests_that_have_not_ended() -> None:
    async def scenario() -> None:
        stream, engine = stream_of("a", "b")
        stream.deliver(Output("a", (1,), FinishReason.STOP))
        await anext(stream)
        stream.close()
        assert engine.ended == [("b", FinishReason.ABORT)]
        assert [output async for output in stream] == []

    asyncio.run(scenario())


def test_a_request_that_a_failure_ended_ends_the_others_of_its_stream() -> None:
    async def scenario() -> None:
        stream, engine = stream_of("a", "b")
        stream.deliver(Output("a", (1,), FinishReason.STOP))
        stream.deliver(EngineFailed("lost"))
        await anext(stream)
        with pytest.raises(EngineFailed, match="lost"):
            await anext(stream)
        assert engine.ended == [("b", FinishReason.ABORT)]

    asyncio.run(scenario())


def test_the_end_of_the_engine_is_raised_once_for_all_requests_of_a_stream() -> None:
    class Failing(Waiting):
        def step(self) -> list[Output]:
            raise RuntimeError("a kernel failed")

    async def scenario() -> None:
        stand_in: Any = Failing()
        engine = AsyncEngine(lambda: stand_in, max_failures=1)
        requests = [Request(name, [1], SamplingParams()) for name in "ab"]
        stream = await engine.submit(requests)
        with pytest.raises(EngineStopped, match="a kernel failed"):
            await anext(stream)
        assert [output async for output in stream] == []
        engine.close()

    asyncio.run(scenario())
