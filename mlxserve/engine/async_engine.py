"""AsyncEngine: an engine on a thread of its own, and the only way for other threads to use it.

    any thread ── calls ──> inbox ──> engine's thread     run between two steps
    event loop <── outputs, one callback per loop and step ──┘

The thread builds the engine itself, because every mlx array belongs to the thread that made it.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from typing import Any

from mlxserve.core.errors import EngineStopped
from mlxserve.core.stats import Stats
from mlxserve.engine import gc_freeze, sleep_inhibitor
from mlxserve.engine.calls import EngineCall, Inbox, audit
from mlxserve.engine.engine import Engine
from mlxserve.engine.memory import MemoryWatch
from mlxserve.engine.open_streams import OpenStreams
from mlxserve.engine.output_stream import OutputStream
from mlxserve.engine.sleep_inhibitor import SleepInhibitor
from mlxserve.engine.snapshot import Snapshot
from mlxserve.engine.text_queue import QueuedText, TextQueue
from mlxserve.engine.threads import THREADS, result_of
from mlxserve.engine.throughput_log import ThroughputLog
from mlxserve.model.dense_text import Result, TextWork
from mlxserve.model.workers import Workers
from mlxserve.request import (
    FinishReason,
    Forgotten,
    Output,
    Pooling,
    Request,
    Resized,
    TokenLogprob,
    check_num_pages,
)
from mlxserve.system import metal_memory
from mlxserve.system.suspend_clock import RUNNING

log = logging.getLogger("mlxserve.engine")

_MINUTE = 60.0  # seconds
STATS_SECONDS = 0.1  # between two copies of the counters while nothing ends
_LOSS_SECONDS = 1.0  # for what a connection tells that ended a moment ago
_STUCK_SECONDS = 5.0  # for a thread that may wait for a lost rank for ever


class _Failures:
    """Counts the failures of the last minute."""

    def __init__(self, limit: int) -> None:
        self._times: deque[float] = deque(maxlen=limit)

    def is_one_too_many(self) -> bool:
        """Count a failure; True if it is the last of `limit` within a minute."""
        now = time.monotonic()
        self._times.append(now)
        return len(self._times) == self._times.maxlen and now - self._times[0] <= _MINUTE


class AsyncEngine:
    """A named thread owns the Engine and all arrays. Thread-safe.

    A failure ends the requests that it concerns, and the engine restarts with an empty cache
    (`Engine.restart`); too many of them within a minute end it.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        *,
        log_interval: float | None = None,
        max_failures: int = 5,
        memory: MemoryWatch | None = None,
        workers: Workers | None = None,
    ) -> None:
        """Build the engine on its thread and wait until it is ready. Raises the errors of `build`.

        log_interval: seconds between log lines about throughput; None for no lines
        max_failures: number of failures within a minute that ends the engine
        memory: limits running requests if memory is short; None for no watch
        workers: the engine's other ranks; the loss of one ends it
        """
        self._inbox = Inbox()
        self._streams = OpenStreams()  # used by the engine's thread only
        self._texts = TextQueue()
        self._log_interval = log_interval
        self._failures = _Failures(max_failures)
        self._memory = memory
        self._workers = workers
        self._has_failed = False
        self._has_forgiven = False  # a failure that ended nothing was logged
        self._has_more = False  # there may be more to write to disk while idle
        self._stopped: EngineStopped | None = None
        RUNNING.start()
        self._beat = RUNNING.now()
        self._stats = Stats()
        self._next_stats = 0.0  # time of the next copy
        self.max_model_len = 0  # maximum tokens of prompt and answer, as of the last change
        self._ready: Future[None] = Future()
        self._frozen = gc_freeze.frozen()  # the frozen objects before the engine's
        self._ending = threading.Lock()
        if workers is not None:
            workers.attach(self.fail, self.seconds_since_beat)
        self._thread = THREADS.hire()
        self._ended = self._thread.start(lambda: self._run(build))
        try:
            result_of(self._ready)
        except BaseException:
            if workers is not None:
                # The thread tells the other ranks to end.
                self._ended.wait(_STUCK_SECONDS)
            raise
        atexit.register(self.close)

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Queue requests without a step in between, all or none; returns once they are queued.

        Raises PromptTooLong, QueueFull, InvalidParameter, PrefixQuotaExceeded, EngineStopped.
        """
        stream = OutputStream(self, requests)

        def add(engine: Engine) -> None:
            engine.add_all(requests)
            self._streams.open(stream, requests)

        added = asyncio.wrap_future(self._call(add))
        try:
            await asyncio.shield(added)
        except asyncio.CancelledError:
            stream.close()
            # The caller is gone; a refusal must not be logged as an exception never retrieved.
            added.add_done_callback(lambda future: future.cancelled() or future.exception())
            raise
        return stream

    async def embed(
        self,
        token_ids: Sequence[int],
        pooling: Pooling,
        dimensions: int | None = None,
        client: str = "",
        adapter: int | None = None,
    ) -> list[float]:
        """Compute the vector of a text in pieces between the engine's steps, in the client's turn.

        adapter: its number among the model's

        Raises InvalidRequest, InvalidParameter, EngineStopped.
        """
        return await self.compute(
            client,
            len(token_ids),
            lambda engine: engine.side_work.embedding(token_ids, pooling, dimensions, adapter),
        )

    async def score(
        self,
        token_ids: Sequence[int],
        num_top: int,
        client: str = "",
        adapter: int | None = None,
    ) -> list[TokenLogprob]:
        """Compute log-probabilities of a text's tokens but the first, in pieces as `embed` does."""
        return await self.compute(
            client,
            len(token_ids),
            lambda engine: engine.side_work.scoring(token_ids, num_top, adapter),
        )

    async def see(self, request: Request) -> None:
        """Encode a request's images that have no features yet, in its client's turn.

        Raises InvalidRequest, EngineStopped.
        """
        seeing = await asyncio.wrap_future(
            self._call(lambda engine: engine.side_work.image_encoding(request))
        )
        if seeing is not None:
            try:
                await self.compute(request.client, seeing.num_rows, lambda _: seeing)
            finally:
                seeing.leave()

    async def compute(
        self, client: str, num_tokens: int, make: Callable[[Engine], TextWork[Result]]
    ) -> Result:
        """Compute other work on texts, in pieces as `embed` does."""
        text = QueuedText(client, num_tokens, make)
        try:
            await asyncio.wrap_future(self._call(lambda _: self._texts.push(text)))
            return await asyncio.wrap_future(text.result)
        finally:
            text.leave()

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request at the next step boundary; no-op if it has ended."""
        self._inbox.tell(lambda engine: self._streams.deliver(engine.abort(request_id, reason)))

    def unpin(self, request_id: str) -> None:
        """Let the pages of a named prefix be evicted, from the next step boundary on."""
        self._inbox.tell(lambda engine: engine.unpin(request_id))

    def keep_pages(self, request: Request, seconds: float) -> None:
        """Call `Engine.keep_pages` at the next step boundary."""
        self._inbox.tell(lambda engine: engine.keep_pages(request, seconds))

    async def reset_prefix_cache(self, *, force: bool = False, disk: bool = False) -> bool:
        """Call `Engine.reset_prefix_cache` at the next step boundary."""
        call = self._call(lambda engine: engine.reset_prefix_cache(force=force, disk=disk))
        done: bool = await asyncio.wrap_future(call)
        return done

    async def forget_prompts(
        self, prompts: Sequence[Sequence[int]], kept: Sequence[Sequence[int]], salt: bytes
    ) -> Forgotten:
        """Call `Engine.forget_prompts` at the next step boundary."""
        call = self._call(lambda engine: engine.forget_prompts(prompts, kept, salt))
        forgotten: Forgotten = await asyncio.wrap_future(call)
        return forgotten

    async def resize_cache(self, num_pages: int) -> Resized:
        """Call `Engine.resize_cache` at the next step boundary."""
        check_num_pages(num_pages)

        def resize(engine: Engine) -> Resized:
            resized = engine.resize_cache(num_pages)
            # Not after the await: the caller may be cancelled by then.
            self.max_model_len = engine.max_model_len
            log.info(
                "The KV cache has %d pages now, and the context %d tokens: %d cached "
                "pages forgotten, %d requests preempted",
                resized.num_pages,
                resized.max_model_len,
                resized.num_forgotten,
                resized.num_preempted,
            )
            return resized

        resized: Resized = await asyncio.wrap_future(self._call(resize))
        return resized

    async def check(self) -> None:
        """Audit requests and pages between two steps. Raises AssertionError."""
        await asyncio.wrap_future(self._call(lambda engine: engine.check(self._streams.ids())))

    async def snapshot(self) -> Snapshot:
        """Take a snapshot at the next step boundary. Raises EngineStopped."""
        taken: Snapshot = await asyncio.wrap_future(
            self._call(lambda engine: engine.monitor.snapshot())
        )
        return taken

    def stats(self) -> Stats:
        """The engine's counters.

        They include every answer that has ended and every call that has returned; while requests
        run, they are at most `STATS_SECONDS` older than the last step.
        """
        return self._stats

    def is_alive(self) -> bool:
        """True while the engine's thread runs."""
        return self._stopped is None

    def has_failed(self) -> bool:
        """True if the engine has ended by itself, and not because it was closed."""
        return self._has_failed

    def seconds_since_beat(self) -> float:
        """Seconds since the thread ended a step or woke up without work, excluding pauses."""
        return RUNNING.now() - self._beat

    def fail(self, reason: str) -> None:
        """End the engine from any thread, as its own may wait for another rank for ever."""
        log.error("The engine has failed and ends: %s", reason)
        starts_again = self._workers is not None and self._workers.starts_again
        advice = (
            "It starts again by itself: ask again" if starts_again else "Start the server again"
        )
        stopped = EngineStopped(
            f"The engine failed: {reason}. {advice}.", starts_again=starts_again
        )
        self._has_failed = True
        self._end(stopped)
        self._inbox.end()
        # It may have been ready before.
        with contextlib.suppress(InvalidStateError):
            self._ready.set_exception(stopped)

    def close(self) -> None:
        """Abort every request and end the thread. Idempotent."""
        atexit.unregister(self.close)
        self._inbox.end()
        if threading.current_thread() is not self._thread.thread:
            is_stuck = self._workers is not None and self._has_failed
            self._ended.wait(_STUCK_SECONDS if is_stuck else None)

    def _call(self, work: Callable[[Engine], Any]) -> Future[Any]:
        """Run `work` on the engine's thread at the next step boundary.

        Its effect is in `stats` before the caller learns the result.
        """

        def counted(engine: Engine) -> Any:
            result = work(engine)
            try:
                self._stats = engine.monitor.stats()
            except Exception:
                # Not the caller's: what it wanted is done. The loop counts again after its calls.
                log.exception("The engine could not be counted after a call")
            return result

        return self._inbox.put(counted)

    def _run(self, build: Callable[[], Engine]) -> None:
        try:
            self._build_and_run(build)
        finally:
            if self._workers is not None:
                self._workers.close()

    def _build_and_run(self, build: Callable[[], Engine]) -> None:
        try:
            engine = build()
            self.max_model_len, self._stats = engine.max_model_len, engine.monitor.stats()
            # Loading may have taken minutes.
            self._beat = RUNNING.now()
        except BaseException as error:  # noqa: BLE001  (raised again by the thread that waits)
            self._stopped = EngineStopped("The engine could not be built.")
            # `fail` may have been first.
            with contextlib.suppress(InvalidStateError):
                self._ready.set_exception(error)
            return
        with contextlib.suppress(InvalidStateError):
            self._ready.set_result(None)
        reason = EngineStopped("The engine was closed.")
        try:
            self._loop(engine)
        except BaseException as error:
            log.exception("The engine has failed and ends")
            reason = EngineStopped(f"The engine failed: {type(error).__name__}: {error}")
            self._has_failed = True
            if self._workers is not None:
                # A lost rank may be the cause, and then `fail` names it first.
                self._workers.wait_for_loss(_LOSS_SECONDS)
        self._end(reason)
        try:
            engine.close(keeps_pages=not self._has_failed)
            del engine
            _free_arrays(self._frozen)
        except Exception:
            log.exception("The engine could not be closed in order")

    def _loop(self, engine: Engine) -> None:
        throughput, is_open = ThroughputLog(self._log_interval), True
        command = sleep_inhibitor.assertion()
        machine = None if command is None else SleepInhibitor(command)
        while is_open and self._stopped is None:
            outputs: list[Output] = []
            try:
                is_busy = bool(engine.has_work or self._texts.unanswered or self._has_more)
                is_open = self._inbox.run_calls(engine, self._streams.ids, is_busy=is_busy)
                if self._texts.unanswered:
                    self._advance_text(engine)
                try:
                    if self._memory is not None:
                        engine.watch_memory(self._memory)
                    if machine is not None:
                        is_busy = engine.has_work or bool(self._texts.unanswered)
                        machine.look(time.monotonic(), is_busy=is_busy)
                    throughput.write(self._stats, time.monotonic())
                except Exception as error:  # noqa: BLE001  (logged there)
                    self._forgive(engine, error)
                if is_open and engine.has_work:
                    outputs = engine.step()
                    self._count(engine, outputs)
                    self._streams.deliver(outputs)
                    engine.start()
                elif is_open and not self._texts.unanswered:
                    # Reset first, in case `idle` fails.
                    self._has_more = False
                    self._has_more = engine.idle()
                    self._count(engine, ())
            except Exception as error:  # noqa: BLE001  (logged there)
                self._restart(engine, error, {output.request_id for output in outputs})
            self._beat = RUNNING.now()
        if machine is not None:
            machine.end()
        self._streams.deliver(engine.abort_all())

    def _count(self, engine: Engine, outputs: Sequence[Output]) -> None:
        """Refresh the stats after a step that ended a request or all work, else periodically."""
        now = time.monotonic()
        has_ended = any(output.finish_reason is not None for output in outputs)
        if has_ended or now >= self._next_stats or not engine.has_work:
            try:
                self._stats, self._next_stats = engine.monitor.stats(), now + STATS_SECONDS
            except Exception as error:  # noqa: BLE001  (logged there)
                self._forgive(engine, error)

    def _forgive(self, engine: Engine, error: Exception) -> None:
        """Handle an error of counting or watching: it ends no answer, and is logged once.

        Raises the engine's own error if an audit finds one.
        """
        if not self._has_forgiven:
            self._has_forgiven = True
            log.error("The engine could not be counted or watched; it goes on", exc_info=error)
        audit(engine, error)

    def _restart(self, engine: Engine, error: Exception, lost: set[str]) -> None:
        """Restart the engine, and end the streams of the requests that it dropped.

        lost: requests whose last outputs may not have been delivered

        Raises the error if there were too many.
        """
        while True:
            # With other ranks there is no second beginning: they may wait in a collective.
            if self._workers is not None or self._failures.is_one_too_many():
                raise error
            log.error("The engine failed; it begins again with an empty cache", exc_info=error)
            # The frames of the failed step hold arrays, and the arrays their memory.
            for cause in _chain(error):
                traceback.clear_frames(cause.__traceback__)
            try:
                self._streams.deliver(engine.restart(lost, self._streams.ids()))
                self._streams.fail_others(engine.live_ids, error)
                self.max_model_len, self._stats = engine.max_model_len, engine.monitor.stats()
            except Exception as another:  # noqa: BLE001  (logged in the next turn, or raised)
                error, lost = another, engine.live_ids
            else:
                return

    def _advance_text(self, engine: Engine) -> None:
        """Compute a piece of the text whose turn it is."""
        text = self._texts.next()
        if text is None:
            return
        piece = EngineCall(text.advance, Future())
        error = piece.run(engine)
        if text.is_done:
            self._texts.answer(text, piece.result.exception() or piece.result.result())
        if error is not None:
            audit(engine, error, self._streams.ids())

    def _end(self, reason: EngineStopped) -> None:
        with self._ending:
            # The first reason counts.
            self._stopped = reason = self._stopped or reason
        self._streams.end(reason)
        self._texts.refuse(reason)
        self._inbox.close(reason)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and its causes."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _free_arrays(since: gc_freeze.Frozen) -> None:
    """Free the arrays of an ended engine on its own thread, and the memory wired for them."""
    import mlx.core as mx

    gc_freeze.collect(since)
    mx.synchronize()
    mx.clear_cache()
    metal_memory.METAL_MEMORY.apply()
