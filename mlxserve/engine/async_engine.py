"""AsyncEngine: the engine on a thread of its own, and the only way to it for other threads.

    any thread ── calls ──> inbox ──> engine's thread     run between two steps
    event loop <── outputs, one callback per loop and step ──┘

The thread builds the engine itself, because every mlx array belongs to the thread that made it.
"""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from mlxserve.engine.engine import Engine
from mlxserve.engine.snapshot import Snapshot
from mlxserve.engine.worker import WORKERS
from mlxserve.errors import EngineStopped, MlxServeError
from mlxserve.request import FinishReason, Output, Pooling, Request, Resized
from mlxserve.stats import Stats

log = logging.getLogger("mlxserve.engine")

_HEARTBEAT = 1.0  # seconds between two signs of life of an idle engine


class OutputStream:
    """The outputs of requests that were submitted together, in their caller's event loop.

    Ends when all of the requests have ended.
    """

    def __init__(self, engine: AsyncEngine, requests: Sequence[Request]) -> None:
        self.loop = asyncio.get_running_loop()
        self._engine = engine
        self._live = {request.id for request in requests}
        # Not an asyncio.Queue: with one reader a deque and a future do, at half its time.
        self._items: deque[Output | EngineStopped] = deque()
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> AsyncIterator[Output]:
        return self

    async def __anext__(self) -> Output:
        """Raises EngineStopped when the engine ends before the requests do."""
        while self._live:
            while not self._items:
                self._waiter = self.loop.create_future()
                await self._waiter
            item = self._items.popleft()
            if isinstance(item, EngineStopped):
                self._live.clear()
                raise item
            if item.request_id in self._live:
                if item.finish_reason is not None:
                    self._live.remove(item.request_id)
                return item
        raise StopAsyncIteration

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End one request at the next step boundary, for a reason that its reader has found.

        Its further outputs are dropped. No-op if it has ended.
        """
        if request_id in self._live:
            self._live.remove(request_id)
            self._engine.abort(request_id, reason)

    def close(self) -> None:
        """Abort the requests that have not ended."""
        for request_id in list(self._live):
            self.finish(request_id, FinishReason.ABORT)

    def deliver(self, item: Output | EngineStopped) -> None:
        """Called in the caller's event loop."""
        self._items.append(item)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


@dataclass(frozen=True, slots=True)
class _Call:
    """A function to run on the engine's thread, and the future of its result."""

    work: Callable[[Engine], Any]
    result: Future[Any]

    def run(self, engine: Engine) -> None:
        if not self.result.set_running_or_notify_cancel():
            return
        try:
            self.result.set_result(self.work(engine))
        except (MlxServeError, AssertionError) as error:
            self.result.set_exception(error)

    def refuse(self, reason: EngineStopped) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(reason)


class AsyncEngine:
    """A named thread owns the Engine and all arrays. The methods may be called from any thread."""

    def __init__(self, build: Callable[[], Engine], *, log_interval: float | None = None) -> None:
        """Build the engine on its thread and wait until it is ready. Raises what `build` raises.

        log_interval: seconds between log lines about throughput; None for no lines
        """
        self._inbox: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._streams: dict[str, OutputStream] = {}  # by request id; only for the engine's thread
        self._log_interval = log_interval
        self._stopped: EngineStopped | None = None
        self._beat = time.monotonic()
        self._stats = Stats()
        self.max_model_len = 0  # longest prompt plus answer, as of the last change
        ready: Future[None] = Future()
        self._worker = WORKERS.hire()
        self._ended = self._worker.start(lambda: self._run(build, ready))
        ready.result()
        atexit.register(self.close)

    async def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Queue requests without a step in between, all or none; returns once they are queued.

        Raises PromptTooLong, QueueFull, InvalidParameter, PrefixQuotaExceeded, EngineStopped.
        """
        stream = OutputStream(self, requests)

        def add(engine: Engine) -> None:
            engine.add_all(requests)
            self._streams |= dict.fromkeys((request.id for request in requests), stream)

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
        self, token_ids: Sequence[int], pooling: Pooling, dimensions: int | None = None
    ) -> list[float]:
        """A text's vector, computed in pieces between the engine's steps.

        Raises InvalidRequest, InvalidParameter, EngineStopped.
        """
        make = self._call(lambda engine: engine.embedding(token_ids, pooling, dimensions))
        embedding = await asyncio.wrap_future(make)
        try:
            while True:
                piece = self._call(lambda engine: engine.embed(embedding))
                vector: list[float] | None = await asyncio.wrap_future(piece)
                if vector is not None:
                    return vector
        finally:
            self._call(lambda _: embedding.release())  # arrays are freed on the engine's thread

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request at the next step boundary; no-op if it has ended."""
        self._call(lambda engine: self._deliver(engine.abort(request_id, reason)))

    def unpin(self, request_id: str) -> None:
        """Let the pages of a named prefix be evicted, from the next step boundary on."""
        self._call(lambda engine: engine.unpin(request_id))

    def keep_pages(self, request: Request, seconds: float) -> None:
        """As `Engine.keep_pages`, at the next step boundary."""
        self._call(lambda engine: engine.keep_pages(request, seconds))

    async def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """As `Engine.reset_prefix_cache`."""
        call = self._call(lambda engine: engine.reset_prefix_cache(force=force))
        done: bool = await asyncio.wrap_future(call)
        return done

    async def resize_cache(self, num_pages: int) -> Resized:
        """As `Engine.resize_cache`, at the next step boundary."""

        def resize(engine: Engine) -> Resized:
            resized = engine.resize_cache(num_pages)
            # Not after the await: the caller may be cancelled by then.
            self.max_model_len, self._stats = engine.max_model_len, engine.stats()
            log.info(
                "The KV cache has %d pages now, and the context %d tokens: %d pages moved, "
                "%d forgotten, %d requests preempted",
                resized.num_pages,
                resized.max_model_len,
                resized.num_moved,
                resized.num_forgotten,
                resized.num_preempted,
            )
            return resized

        resized: Resized = await asyncio.wrap_future(self._call(resize))
        return resized

    async def check(self) -> None:
        """Audit requests and pages between two steps. Raises AssertionError."""
        await asyncio.wrap_future(self._call(Engine.check))

    async def snapshot(self) -> Snapshot:
        """As `Engine.snapshot`, at the next step boundary. Raises EngineStopped."""
        taken: Snapshot = await asyncio.wrap_future(self._call(Engine.snapshot))
        return taken

    def stats(self) -> Stats:
        """As of the last step."""
        return self._stats

    def is_alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._stopped is None

    def seconds_since_beat(self) -> float:
        """Since the thread last ended a step, or woke up without work."""
        return time.monotonic() - self._beat

    def close(self) -> None:
        """Abort every request and end the thread. Idempotent."""
        atexit.unregister(self.close)
        self._inbox.put(None)
        if threading.current_thread() is not self._worker.thread:
            self._ended.wait()

    def _call(self, work: Callable[[Engine], Any]) -> Future[Any]:
        """Run `work` on the engine's thread at the next step boundary."""
        call = _Call(work, Future())
        self._inbox.put(call)
        if self._stopped is not None:  # the thread no longer reads its inbox
            self._refuse_calls(self._stopped)
        return call.result

    def _run(self, build: Callable[[], Engine], ready: Future[None]) -> None:
        try:
            engine = build()
            self.max_model_len = engine.max_model_len
        except BaseException as error:  # noqa: BLE001  (raised again by the thread that waits)
            self._stopped = EngineStopped("The engine could not be built.")
            ready.set_exception(error)
            return
        ready.set_result(None)
        reason = EngineStopped("The engine was closed.")
        try:
            self._loop(engine)
        except BaseException as error:
            log.exception("The engine failed in a step")
            reason = EngineStopped(f"The engine failed: {type(error).__name__}: {error}")
        self._end(reason)
        engine.close()
        del engine
        _free_arrays()

    def _loop(self, engine: Engine) -> None:
        reporter = _Reporter(self._log_interval)
        while self._take_calls(engine):
            if engine.has_work:
                self._deliver(engine.step())
                engine.start()
            self._beat = time.monotonic()
            self._stats = engine.stats()
            reporter.report(self._stats, self._beat)
        self._deliver(engine.abort_all())

    def _take_calls(self, engine: Engine) -> bool:
        """Run the calls in the inbox; without other work, wait for one. False to end the engine."""
        try:
            call = (
                self._inbox.get_nowait() if engine.has_work else self._inbox.get(timeout=_HEARTBEAT)
            )
            while call is not None:
                call.run(engine)
                call = self._inbox.get_nowait()
        except queue.Empty:
            return True
        return False

    def _deliver(self, outputs: list[Output]) -> None:
        """Hand outputs to their callers' event loops, with one callback for each loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[OutputStream, Output]]] = {}
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.finish_reason is not None:
                del self._streams[output.request_id]
            by_loop.setdefault(stream.loop, []).append((stream, output))
        for loop, items in by_loop.items():
            _hand_over(loop, items)

    def _end(self, reason: EngineStopped) -> None:
        self._stopped = reason
        for stream in set(self._streams.values()):
            _hand_over(stream.loop, [(stream, reason)])
        self._streams.clear()
        self._refuse_calls(reason)

    def _refuse_calls(self, reason: EngineStopped) -> None:
        """Refuse the calls that arrived after the end."""
        while True:
            try:
                call = self._inbox.get_nowait()
            except queue.Empty:
                return
            if call is not None:
                call.refuse(reason)


def _hand_over(
    loop: asyncio.AbstractEventLoop,
    items: Sequence[tuple[OutputStream, Output | EngineStopped]],
) -> None:
    def deliver() -> None:
        for stream, item in items:
            stream.deliver(item)

    try:
        loop.call_soon_threadsafe(deliver)
    except RuntimeError:  # the loop is closed, so these outputs have no reader
        log.debug("outputs for a closed event loop are dropped")


def _free_arrays() -> None:
    """Free the arrays of an ended engine on the thread that made them."""
    import mlx.core as mx

    gc.collect()
    mx.synchronize()
    mx.clear_cache()


class _Reporter:
    """Logs a line about throughput every `interval` seconds in which the engine took steps."""

    def __init__(self, interval: float | None) -> None:
        self._interval = interval
        self._last = Stats()
        self._time = time.monotonic()

    def report(self, stats: Stats, now: float) -> None:
        if self._interval is None or now - self._time < self._interval:
            return
        last, seconds = self._last, now - self._time
        self._last, self._time = stats, now
        if stats.engine.num_steps == last.engine.num_steps:
            return
        queries = stats.scheduler.prefix_queries - last.scheduler.prefix_queries
        hits = stats.scheduler.prefix_hits - last.scheduler.prefix_hits
        generated = stats.engine.generation_tokens - last.engine.generation_tokens
        log.info(
            "Prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, "
            "running: %d, waiting: %d, KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%",
            queries / seconds,
            generated / seconds,
            stats.scheduler.num_running,
            stats.scheduler.num_waiting,
            100 * stats.pool.usage,
            100 * hits / queries if queries else 0.0,
        )
