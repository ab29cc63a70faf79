"""EngineUnderTest: a whole engine under fuzz, with what it was asked and what it has to answer.

The judge. Whatever is done to the engine:

    every request ends, with the tokens of mlx-lm's dense path; with an error only if something was broken
    meanwhile on purpose, and cut only where its pages were never promised
    after every call that fails the engine passes its audit, and a refused resize has changed nothing
    named prefixes stay pinned, all of their pages, until they are removed or the log says that they are lost
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import mlxserve.build
from mlxserve import MlxServeError, SamplingParams
from mlxserve.cache.groups import Window
from mlxserve.chat.answers import RequestOutput
from mlxserve.chat.request_options import RequestOptions
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import EngineFailed, EngineStopped
from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.engine.engine import Engine
from mlxserve.request import FinishReason
from tests.reliability.faults import Fault
from tests.reliability.greedy_reference import GreedyReference
from tests.reliability.shared_memory import shared_memory
from tests.reliability.step_gate import StepGate

MAX_STEPS = 20_000  # without work left to do, every answer ends long before
_LOOK_SECONDS = 0.05  # until it is looked at whether the engine has run out of work
_LOST_PREFIXES = "named prefixes are not kept"
_LOST_CALL = "that has no caller failed"

T = TypeVar("T")
Tokens = tuple[int, ...]


@dataclass(eq=False, slots=True)
class AskedAnswer:
    """A request, and what is known of its answer.

    room: tokens that prompt and answer may have at any rate, by the pages that were there
    num_faults: that had happened when it was asked
    """

    prompt: Tokens
    max_tokens: int
    room: int
    num_faults: int
    task: asyncio.Task[list[RequestOutput]]
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class AskedPrefix:
    token_ids: Tokens
    salt: str | None


class LogOfLosses(logging.Handler):
    """Counts what the engine's log says is lost, and keeps its errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.num_lost_prefixes = self.num_lost_calls = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        self.num_lost_prefixes += _LOST_PREFIXES in text
        self.num_lost_calls += _LOST_CALL in text


@contextmanager
def unhurried(memory: MemoryLevels) -> Iterator[LogOfLosses]:
    """No clock decides: the disk writes and reads everything, memory is as short as the test says, at once."""
    log, logger = LogOfLosses(), logging.getLogger("mlxserve")
    was_propagated = logger.propagate
    with ExitStack() as stack:
        for name, value in {
            "mlxserve.engine.transfers.CLOSING_SECONDS": 300.0,
            "mlxserve.disk.tier.STALL_SECONDS": 300.0,
            "mlxserve.engine.disk_cache.DiskCache.pays": lambda *_: True,
            "mlxserve.engine.disk_cache.DiskCache.patience": lambda *_: 300.0,
            "mlxserve.engine.memory.INTERVAL": 0.0,
            "mlxserve.system.machine.memory_used": memory.used,
            "mlxserve.system.machine.memory_pressure": lambda: 0,
            "mlxserve.system.machine.return_free_memory": lambda: None,
        }.items():
            stack.enter_context(patch(name, value))
        logger.addHandler(log)
        logger.propagate = False
        try:
            yield log
        finally:
            logger.removeHandler(log)
            logger.propagate = was_propagated


class MemoryLevels:
    """The share of the machine's memory that is in use."""

    def __init__(self) -> None:
        self.share = 0.1

    def used(self) -> float:
        return self.share


class EngineUnderTest:
    """Calls that are queued when they return, and steps that are made when `turn` is called."""

    def __init__(
        self,
        folder: Path,
        reference: GreedyReference,
        max_length: int,
        options: dict[str, Any],
        window: Window,
    ) -> None:
        """max_length: of the model's context. window: of its layers that have one"""
        self.loop = asyncio.new_event_loop()
        self._made = asyncio.Event()
        self.gate = StepGate(lambda: self.loop.call_soon_threadsafe(self._made.set))
        self.asked: list[AskedAnswer] = []
        self.ended: list[tuple[Tokens, Tokens]] = []  # prompts with their answers, the last ones
        self.prefixes: dict[str, AskedPrefix] = {}
        self.num_faults = 0  # that have happened
        self.num_answers = self.num_tokens = self.num_refused = self.num_lost = 0
        self._adding: dict[str, asyncio.Task[None]] = {}
        self._folder, self._reference, self._max_length = folder, reference, max_length
        self._window = window
        self._are_pins_known = True
        self._fault: Fault | None = None
        self._planting = ExitStack()
        self._memory = MemoryLevels()
        self._patches = ExitStack()
        self._log = self._patches.enter_context(unhurried(self._memory))
        self._build(options)

    def _build(self, options: dict[str, Any]) -> None:
        self.options = {
            "model": str(self._folder),
            "trial_process": "never",
            "disable_log_stats": True,
            "max_engine_failures": 1 << 30,
            **options,
        }
        build = mlxserve.build.build_engine

        def build_with_gate(*args: Any, **named: Any) -> tuple[Engine, int]:
            engine, vocab_size = build(*args, **named)
            self._engine, self._thread = engine, threading.get_ident()
            self.gate.attach(engine)
            return engine, vocab_size

        memory = shared_memory(options, self._window)
        with (
            patch("mlxserve.build.build_engine", build_with_gate),
            patch("mlxserve.engine_part.pool_memory", lambda *_: memory),
        ):
            self.model = mlxserve.build.build_text_model(
                EngineConfig().with_options(**self.options)
            )
        self.num_pages = self._engine.monitor.stats().pool.num_pages

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """What every rule of the machine is run by."""
        return self.loop.run_until_complete(work)

    @property
    def engine(self) -> AsyncEngine:
        return self.model.engine

    @property
    def pending(self) -> list[AskedAnswer]:
        return [one for one in self.asked if not one.task.done()]

    # ---- what is asked

    async def ask(self, prompt: Tokens, params: SamplingParams, options: RequestOptions) -> None:
        whole = prompt
        if options.prefix_name is not None:
            whole = self.prefixes[options.prefix_name].token_ids + prompt
        pinned = int(float(self.options["max_pinned_fraction"]) * self.num_pages)
        room = (self.num_pages - pinned) * int(self.options["page_size"])
        num_faults = self.num_faults
        stream = await self._refusable(
            self.model.require_writer().submit_all([prompt], params, options)
        )
        if stream is None:
            return

        async def consume() -> list[RequestOutput]:
            try:
                return await stream.whole()
            finally:
                await stream.aclose()

        task = self.loop.create_task(consume())
        assert params.max_tokens is not None
        self.asked.append(AskedAnswer(whole, params.max_tokens, room, num_faults, task))

    async def cancel(self, asked: AskedAnswer) -> None:
        """Its client leaves."""
        asked.is_cancelled = True
        asked.task.cancel()
        with suppress(asyncio.CancelledError, EngineFailed, EngineStopped):
            await asked.task
        await self.settle()

    async def add_prefix(self, name: str, prefix: AskedPrefix, client: str, share: float) -> None:
        """Begin to compute a named prefix; no other one of this name may be under way."""
        work = self.model.require_writer().prefixes.add(
            name, prefix.token_ids, cache_salt=prefix.salt, client=client, max_share=share
        )

        async def add() -> None:
            if await self._refusable(self._done(work)):
                self.prefixes[name] = prefix

        self._adding[name] = self.loop.create_task(add())
        await self.settle()

    @staticmethod
    async def _done(work: Coroutine[Any, Any, None]) -> bool:
        await work
        return True

    @property
    def adding(self) -> set[str]:
        """Names of prefixes that are being computed."""
        self._adding = {name: task for name, task in self._adding.items() if not task.done()}
        return set(self._adding)

    async def remove_prefix(self, name: str) -> None:
        self.model.require_writer().prefixes.remove(name)
        del self.prefixes[name]
        await self.settle()

    async def resize(self, num_pages: int) -> None:
        before = await self._state()
        num_faults = self.num_faults
        resized = await self._refusable(self.engine.resize_cache(num_pages))
        if resized is not None:
            assert resized.num_pages == num_pages
            self.num_pages = num_pages
            return
        if self._count_faults() == num_faults:
            assert await self._state() == before, "a refused resize has changed something"
        else:
            self.num_pages = self._engine.monitor.stats().pool.num_pages

    async def _state(self) -> tuple[object, ...]:
        """What no refused call changes; the step that is read meanwhile goes on with requests."""
        pool = (await self.snapshot()).stats.pool
        return (
            pool.num_pages,
            self.engine.max_model_len,
            self.model.require_writer().prefixes.sizes(),
        )

    async def reset(self, *, force: bool, disk: bool) -> None:
        await self._refusable(self.engine.reset_prefix_cache(force=force, disk=disk))

    async def forget(self, prompts: Sequence[Tokens]) -> None:
        await self._refusable(self.model.forget(prompts))

    async def embed(self, token_ids: Tokens) -> None:
        await self._refusable(self.model.require_vectors().embed([token_ids]))

    async def press_memory(self, share: float) -> None:
        self._memory.share = share
        await self.settle()

    async def _refusable(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of a call; None where it was refused, or failed by a fault. Then the engine is audited."""
        num_faults = self.num_faults
        try:
            return await work
        except (EngineFailed, EngineStopped):
            assert self._count_faults() > num_faults or self._is_closing, "failed without a fault"
            self.num_lost += 1
        except MlxServeError:
            self.num_refused += 1
        if not self._is_closing:
            await self.audit()
        return None

    # ---- faults

    def plant(self, fault: Fault) -> None:
        """Have one call fail, which the engine's thread will make. It replaces one that has not happened."""
        self._count_faults()
        self._planting.close()
        fault.is_meant = lambda _: threading.get_ident() == self._thread
        self._fault = fault
        self._planting.enter_context(fault.planted())

    def _count_faults(self) -> int:
        if self._fault is not None and self._fault.has_happened:
            self.num_faults += 1
            self._planting.close()
            self._fault = None
        return self.num_faults

    def unplant(self) -> None:
        self._count_faults()
        self._planting.close()
        self._fault = None

    # ---- steps

    async def turn(self, num_steps: int) -> None:
        """As many steps, or fewer if the engine runs out of work."""
        self._made.clear()
        self.gate.allow(num_steps)
        while not self.gate.is_idle and self._engine.has_work and self.engine.is_alive():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._made.wait(), _LOOK_SECONDS)
        self.gate.close()
        await self.settle()

    async def settle(self) -> None:
        """Until calls that were begun have been answered, and what was delivered has been read."""
        for _ in range(2):
            await self.snapshot()
            await asyncio.sleep(0)
        self._judge_ended()

    async def snapshot(self) -> Any:
        """Between two steps. Again if a fault was planted there."""
        while True:
            try:
                return await self.engine.snapshot()
            except EngineFailed:
                num_faults = self.num_faults
                assert self._count_faults() > num_faults, "failed without a fault"

    async def audit(self) -> None:
        try:
            await self.engine.check()
        except EngineFailed:
            num_faults = self.num_faults
            assert self._count_faults() > num_faults, "failed without a fault"
            await self.engine.check()

    async def drain(self) -> None:
        """Make steps until nothing is under way; then nothing is held but named prefixes."""
        self.unplant()
        self._memory.share = 0.1
        end, began = self.gate.num_steps + MAX_STEPS, time.monotonic()
        while self.pending or self.adding or self._engine.has_work:
            await self.turn(20)
            assert self.gate.num_steps < end, f"no end of {self._waits()}"
            assert time.monotonic() < began + 300, f"no end of {self._waits()} in 300 s"
        await self.audit()
        await self._judge_prefixes()

    def _waits(self) -> str:
        return f"{len(self.pending)} answers and {len(self.adding)} prefixes"

    # ---- judged

    def _judge_ended(self) -> None:
        for asked in [one for one in self.asked if one.task.done()]:
            self.asked.remove(asked)
            self._judge(asked)

    def _judge(self, asked: AskedAnswer) -> None:
        if asked.task.cancelled():
            assert asked.is_cancelled
            return
        error = asked.task.exception()
        if error is not None:
            assert isinstance(error, EngineFailed | EngineStopped), repr(error)
            is_excused = self._count_faults() > asked.num_faults or self._is_closing
            assert is_excused or asked.is_cancelled, f"an answer failed without a fault: {error!r}"
            self.num_lost += 1
            return
        for output in asked.task.result():
            self._judge_tokens(asked, output)

    def _judge_tokens(self, asked: AskedAnswer, output: RequestOutput) -> None:
        tokens = tuple(output.token_ids)
        wanted = self._reference.answer(asked.prompt)[: asked.max_tokens]
        assert tokens == wanted[: len(tokens)], f"{tokens} after {asked.prompt}, not {wanted}"
        if output.finish_reason is FinishReason.ABORT:
            assert self._is_closing or asked.is_cancelled, "an answer was aborted by nobody"
            return
        is_whole = len(tokens) == asked.max_tokens
        is_full = len(asked.prompt) + len(tokens) >= min(asked.room, self._max_length)
        assert is_whole or is_full, f"an answer of {asked.max_tokens} is cut at {len(tokens)}"
        self.num_answers += 1
        self.num_tokens += len(tokens)
        self.ended = [*self.ended[-3:], (asked.prompt, tokens)]

    async def _judge_prefixes(self) -> None:
        """`drain` has computed those that were lost with a smaller cache."""
        assert set(self.model.require_writer().prefixes.sizes()) == set(self.prefixes)
        assert not self._log.num_lost_prefixes or self.num_faults, (
            "a prefix is lost without a fault"
        )
        if self._log.num_lost_prefixes or self._log.num_lost_calls or not self._are_pins_known:
            return
        pool = (await self.snapshot()).stats.pool
        num_pages = len(self._pages_of_prefixes())
        assert pool.num_pinned == num_pages, f"{pool.num_pinned} of {num_pages} pages are pinned"
        assert pool.num_used == pool.num_pinned, "a page is held by nobody"

    def _pages_of_prefixes(self) -> set[tuple[str | None, Tokens]]:
        """The tokens up to the end of each page."""
        size, pages = int(self.options["page_size"]), set()
        has_tails = self.options["page_tail"] == "copy" and not self._has_ends
        for prefix in self.prefixes.values():
            ids = prefix.token_ids
            ends = [*range(size, len(ids) + 1, size)]
            if has_tails and len(ids) % size:
                ends.append(len(ids))
            pages |= {(prefix.salt, ids[:end]) for end in ends}
        return pages

    @property
    def _has_ends(self) -> bool:
        stats = self._engine.monitor.stats()
        return bool(stats.windows.num_pages or stats.states.num_slots)

    # ---- begins and ends

    _is_closing = False

    async def restart(self, options: dict[str, Any]) -> None:
        """Close the engine with what is under way, and begin another one with the same disk."""
        self.unplant()
        await self._close()
        self._memory.share = 0.1
        self._build(options)
        self._log.num_lost_prefixes = self._log.num_lost_calls = 0
        assert set(self.model.require_writer().prefixes.sizes()) == set(self.prefixes)
        # Their pages are not pinned until they are computed, for which a smaller cache may have no room.
        self._are_pins_known = not self.prefixes
        self._adding["every name"] = self.loop.create_task(
            self.model.require_writer().prefixes.restore()
        )
        await self.settle()

    async def _close(self) -> None:
        self._is_closing = True
        await self.loop.run_in_executor(None, self.model.close)
        for task in [*(one.task for one in self.asked), *self._adding.values()]:
            with suppress(asyncio.CancelledError, EngineFailed, EngineStopped):
                await task
        self._judge_ended()
        self._is_closing = False

    def close(self) -> None:
        """Whatever has happened."""
        self._planting.close()
        try:
            self.run(self._close())
        finally:
            self._patches.close()
            self.loop.run_until_complete(self.loop.shutdown_default_executor())
            self.loop.close()
