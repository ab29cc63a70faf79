"""Engine: decide, compute, commit. One step of everything that runs, on one thread.

    ── schedule n+1 ── launch n+1 ── collect n ── update n ──▶ outputs of n ── start n+1 ──
                       (graph only)  (waits)                                   (device)

Step n+1 is planned and built before step n is read; the token that a decode of n+1 starts from is
taken from n's pending array. Where the pool's writes are in place, n+1 starts when it is launched,
before n is read, so that Python's time hides behind the device's. Elsewhere whoever waits for the
outputs of n gets them first: on a CPU mlx works while it is being handed work, and `start` takes
most of a step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from mlxserve.engine.pace import Pace, PiecePace
from mlxserve.engine.snapshot import Snapshot, view
from mlxserve.engine.trace import Spans
from mlxserve.engine.transfers import Swapper
from mlxserve.errors import MlxServeError
from mlxserve.model.embedding import Embedding
from mlxserve.model.runner import ModelRunner, Pending
from mlxserve.request import Chunk, FinishReason, LiveRequest, Output, Pooling, Request, Resized
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.stats import PoolStats, Rate, Stats, StepStats, SwapStats

_MOST_EMBEDDED = 256  # tokens of a text's piece: a request that comes meanwhile waits for it


class Engine:
    """Everything between a token list and a token list. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        pace: Pace,
        clock: Callable[[], float] = time.perf_counter,
        swapper: Swapper | None = None,
        spans: Spans | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._pace = pace
        self._pieces = PiecePace(pace.target, _MOST_EMBEDDED)
        self._is_disturbed = False  # a text was embedded since the last read, which took time, too
        self._clock = clock
        self._swapper = swapper
        self._spans = spans
        self._unread: Pending | None = None
        self._early: list[Output] = []  # read between two steps
        self._is_started = True  # the unread step, by the device
        self._began = 0.0  # when the device could begin with the unread step
        self._last_read = 0.0
        self._last_plan: Sequence[Chunk] = ()
        self._prefill_budget: int | None = None
        self._stats = StepStats()
        self._generated = Rate()
        self._timeline = _Timeline(clock, self._stats)

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._early)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus answer; `resize_cache` changes it."""
        return self._scheduler.max_model_len

    def close(self) -> None:
        """Remove what is on disk, end the trace. Nothing may be called after it."""
        if self._swapper is not None:
            self._swapper.close()
        if self._spans is not None:
            self._spans.close()

    def add(self, request: Request) -> LiveRequest:
        """Queue a request; its progress, to be read only. Raises what `Scheduler.add` does."""
        live = self._scheduler.add(request)
        self._timeline.arrived(request.id)
        return live

    def add_all(self, requests: Sequence[Request]) -> list[LiveRequest]:
        """Queue all of them, or none. Raises what `Scheduler.add` does for one of them."""
        added: list[LiveRequest] = []
        for request in requests:
            try:
                added.append(self.add(request))
            except MlxServeError:
                for other in added:
                    self._scheduler.abort(other.id)
                    self._timeline.forget(other.id)
                raise
        return added

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Output]:
        """End a request at this step boundary."""
        outputs = self._scheduler.abort(request_id, reason)
        self._transfer()
        return self._counted(outputs)

    def abort_all(self) -> list[Output]:
        """End every request."""
        outputs = self._scheduler.abort_all()
        self._transfer()
        return self._counted(outputs)

    def unpin(self, request_id: str) -> None:
        """The pages of a prefix, computed by a request that pins, may be evicted again."""
        self._scheduler.unpin(request_id)

    def step(self) -> list[Output]:
        """Launch the next step and read the one before it: outputs of the latter."""
        outputs, self._early = self._early, []
        self.start()
        self._scheduler.expire(self._clock())
        is_reading = self._swapper is not None and self._swapper.is_reading
        if self._unread is not None and (is_reading or self._scheduler.might_preempt()):
            outputs += self._read(None)
        if self._swapper is not None:
            self._swapper.restore()
        self._copy_pages()
        self._prefill_budget = self._budget()
        chunks = self._scheduler.schedule(self._prefill_budget)
        self._copy_pages()
        self._transfer()
        launched = self._runner.launch(chunks, self._unread) if chunks else None
        outputs += self._read(launched)
        self._stats.num_steps += launched is not None
        self._transfer()
        if not chunks and not outputs and self._swapper is not None and self._swapper.is_reading:
            self._swapper.wait()  # nothing can be computed meanwhile
        return self._counted(outputs)

    def _copy_pages(self) -> None:
        if copies := self._scheduler.pop_copies():
            self._runner.copy_pages([c.source for c in copies], [c.target for c in copies])

    def _transfer(self) -> None:
        if self._swapper is not None:
            self._swapper.transfer()

    def _budget(self) -> int | None:
        """Prompt tokens of the next step, judged by the last plan: it samples who will decode."""
        num_decodes = sum(chunk.samples for chunk in self._last_plan)
        context = max((c.end for c in self._last_plan if not c.samples), default=0)
        return self._pace.budget(num_decodes, context)

    def _read(self, launched: Pending | None) -> list[Output]:
        """Read the unread step, commit what was read; the launched one is unread from now on."""
        unread, self._unread = self._unread, launched
        sampled = []
        if unread is not None:
            sampled = self._runner.collect(unread)
            now = self._clock()
            if not self._is_disturbed:
                self._pace.observe(unread.chunks, now - max(self._began, self._last_read))
            self._is_disturbed = False
            self._last_read = now
        if launched is not None:
            self._began = self._clock()
            self._is_started = False
            self._last_plan = launched.chunks
            self._timeline.launched(launched.chunks)
        return self._scheduler.update(unread.chunks, sampled) if unread is not None else []

    def start(self) -> None:
        """Let the device begin with what the last step launched, unless it has.

        `step` does so itself, too late for the outputs it returned before: deliver those first.
        """
        if self._unread is not None and not self._is_started:
            self._is_started = True
            self._runner.start(self._unread)

    def _counted(self, outputs: list[Output]) -> list[Output]:
        num_tokens = sum(len(output.token_ids) for output in outputs)
        self._stats.generation_tokens += num_tokens
        self._generated.add(self._clock(), num_tokens)
        for output in outputs:
            self._timeline.got(output)
            if output.finish_reason is not None:
                self._stats.request_success[output.finish_reason] += 1
        return outputs

    def keep_pages(self, request: Request, seconds: float) -> None:
        """Protect a request's cached pages from eviction for `seconds`, also after its end."""
        self._scheduler.keep_pages(request, self._clock() + seconds)

    def embedding(
        self, token_ids: Sequence[int], pooling: Pooling, dimensions: int | None
    ) -> Embedding:
        """As `ModelRunner.embedding`."""
        return self._runner.embedding(token_ids, pooling, dimensions)

    def embed(self, embedding: Embedding) -> list[float] | None:
        """One piece of it, short while answers wait for their next token; the vector at its end."""
        began, before = self._clock(), embedding.num_done
        vector = embedding.advance(self._pieces.size(is_busy=self._scheduler.has_work))
        self._pieces.observe(embedding.num_done - before, self._clock() - began)
        self._is_disturbed = True
        return vector

    def reset_prefix_cache(self, *, force: bool = False) -> bool:
        """Forget every cached page but those of named prefixes.

        False, and nothing happened, while requests hold pages. `force` takes theirs away first:
        they compute them again.
        """
        if force and self._unread is not None:
            self._early += self._read(None)
        return self._scheduler.reset_prefix_cache(force=force)

    def resize_cache(self, num_pages: int) -> Resized:
        """Give the cache so many pages, and memory back to the machine or take it from there.

        Answers go on: what they hold moves, and where there is no room for all of them some start
        again later, as in any shortage. Raises InvalidParameter, OutOfMemory, PrefixQuotaExceeded
        where named prefixes would be too many, and QueueFull where a request has grown too long
        for so few pages; nothing happened then.
        """
        if self._unread is not None:
            self._early += self._read(None)
        if num_pages > self._scheduler.pool.num_pages:
            self._runner.resize(num_pages, {})  # first: it may be refused
        resized = self._scheduler.resize(num_pages)
        self._transfer()  # what is saved is read before anything moves
        self._runner.resize(num_pages, resized.moves)
        return resized.public()

    def check(self) -> None:
        """Audit requests and pages. Raises AssertionError."""
        self._scheduler.check()

    def stats(self) -> Stats:
        most = self._scheduler.config.max_num_batched_tokens
        budget = self._prefill_budget
        self._stats.sched_budget_tokens = most if budget is None else budget
        return Stats(
            scheduler=self._scheduler.stats(),
            pool=PoolStats.of(self._scheduler.pool),
            engine=self._stats.copy(),
            swap=SwapStats.of(self._swapper) if self._swapper else SwapStats(),
        )

    def snapshot(self) -> Snapshot:
        """Requests and pages as they are now: costs time by their number, so not for every step."""
        now = self._clock()
        running, waiting = self._scheduler.requests()
        age = self._timeline.age
        return Snapshot(
            stats=self.stats(),
            memory=self._runner.memory(),
            page_size=self._scheduler.pool.page_size,
            pages=self._scheduler.pool.states(),
            requests=(
                *(view(r, age=age(r, now), position=None) for r in running),
                *(view(r, age=age(r, now), position=n) for n, r in enumerate(waiting, 1)),
            ),
            prefill_rate=self._timeline.prefilled.per_second(now),
            generation_rate=self._generated.per_second(now),
        )


class _Timeline:
    """When requests arrived and started, as distributions."""

    def __init__(self, clock: Callable[[], float], stats: StepStats) -> None:
        self.prefilled = Rate()
        self._stats = stats
        self._clock = clock
        self._arrived: dict[str, float] = {}  # of every live request
        self._queued: set[str] = set()  # requests that wait for their first step
        self._started: dict[str, float] = {}  # those that wait for their first token

    def arrived(self, request_id: str) -> None:
        self._arrived[request_id] = self._clock()
        self._queued.add(request_id)

    def age(self, request: LiveRequest, now: float) -> float:
        return now - self._arrived[request.id]

    def launched(self, chunks: Sequence[Chunk]) -> None:
        self._stats.iteration_tokens.observe(sum(chunk.length for chunk in chunks))
        now = self._clock()
        num_prefilled = sum(c.length for c in chunks if c.start < c.request.prefill_end)
        self._stats.prefill_tokens += num_prefilled
        self.prefilled.add(now, num_prefilled)
        for chunk in chunks:
            if chunk.request.id in self._queued:
                self._queued.remove(chunk.request.id)
                self._stats.queue_seconds.observe(now - self._arrived[chunk.request.id])
                self._started[chunk.request.id] = now

    def got(self, output: Output) -> None:
        started = self._started.pop(output.request_id, None)
        if started is not None and output.token_ids:
            self._stats.prefill_seconds.observe(self._clock() - started)
        if output.finish_reason is not None:
            self.forget(output.request_id)

    def forget(self, request_id: str) -> None:
        self._arrived.pop(request_id, None)
        self._queued.discard(request_id)
