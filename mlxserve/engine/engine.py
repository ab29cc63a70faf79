"""Engine: decide, compute, commit. One step of everything that runs, on one thread.

    ── schedule n+1 ── launch n+1 ── collect n ── update n ──▶ outputs of n ── start n+1 ──
                       (graph only)  (waits)                                   (device)

Step n+1 is planned and built before step n is read; the token that a decode of n+1 starts from is
taken from n's pending array. Where the pool's writes are in place, n+1 starts when it is launched,
before n is read, so that the device does not wait for Python. Elsewhere the outputs of n are
delivered first: on a CPU mlx computes in the call that hands it work, and `start` takes most of a
step.

Tried on a CPU: a plan made as late as the running step allows (at 60 and at 80 % of it) did not bring
a short prompt's first token sooner (4.2 -> 4.7 and 4.6 steps of one decode). Starting n+1 before n is
read took 0.81 to 1.0 of the time for one answer and 0.98 to 1.06 for four, and delivered every token
a step later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.core.errors import OutOfMemory
from mlxserve.core.stats import (
    PlannedMemory,
    StepStats,
)
from mlxserve.engine.disk_cache import DiskCache
from mlxserve.engine.memory import MemoryLevel, MemoryWatch
from mlxserve.engine.monitor import EngineMonitor
from mlxserve.engine.side_work import SideWork
from mlxserve.engine.step_time_model import (
    StepTimeModel,
    StepTimer,
)
from mlxserve.engine.timeline import Timeline
from mlxserve.engine.trace import Trace
from mlxserve.engine.transfers import Transfers
from mlxserve.model.runner import ModelRunner, Pending
from mlxserve.model.workers import Workers
from mlxserve.request import (
    Chunk,
    FinishReason,
    Forgotten,
    LiveRequest,
    Output,
    Request,
    Resized,
    check_num_pages,
)
from mlxserve.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from mlxserve.cache.events import PageEvents

_GUIDE_SECONDS = 0.005  # to wait for a mask without looking at the inbox


class Engine:
    """Turns token ids into token ids. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        pace: StepTimeModel,
        clock: Callable[[], float] = time.perf_counter,
        disk: DiskCache | None = None,
        trace: Trace | None = None,
        workers: Workers | None = None,
        planned: PlannedMemory | None = None,
        events: PageEvents | None = None,
    ) -> None:
        """planned: as in EngineMonitor. events: what the pool reports to, to end with the engine."""
        self._scheduler = scheduler
        self._workers = workers
        self._runner = runner
        self._pace = pace
        self._clock = clock
        self._transfers = Transfers(scheduler.moves, runner, disk, clock)
        self._disk = disk
        self._trace = trace
        self._events = events
        self._unread: Pending | None = None
        self._early: list[Output] = []  # outputs that were read before the next step was launched
        self._has_read = True  # a step was read since the last failure
        self._is_started = True  # the device has begun the unread step
        self._last_plan: Sequence[Chunk] = ()
        self._timer = StepTimer()
        self._stats = StepStats()
        self._timeline = Timeline(clock, self._stats)
        self.side_work = SideWork(scheduler, runner, self._timer, pace.target, clock)
        self.monitor = EngineMonitor(
            scheduler,
            runner,
            self._timeline,
            self._stats,
            clock,
            disk=disk,
            workers=workers,
            planned=planned,
        )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._early)

    @property
    def max_model_len(self) -> int:
        """Maximum tokens of a prompt and its answer; `resize_cache` changes it."""
        return self._scheduler.max_model_len

    @property
    def disk_folder(self) -> Path | None:
        """The folder of this model's pages on disk; None without a disk cache."""
        disk = None if self._disk is None else self._disk.disk
        return None if disk is None else disk.folder

    def close(self, *, keeps_pages: bool = True) -> None:
        """End the trace; with `keeps_pages` write cached pages to disk first, for a bounded time.

        Nothing may be called afterwards.
        """
        if self._workers is not None and keeps_pages:
            # The other ranks are computing the unread step.
            self._read_early()
        self._transfers.close(keeps_pages=keeps_pages)
        if self._events is not None:
            self._events.close()
        if self._trace is not None:
            self._trace.close()

    def add(self, request: Request) -> LiveRequest:
        """Queue a request, and return its progress, which is read-only.

        Raises the errors of `Scheduler.add`.
        """
        live = self._scheduler.add(request, self._clock())
        try:
            self._timeline.arrived(request.id)
        except Exception:
            self._scheduler.abort(request.id)  # nobody would wait for its answer
            raise
        return live

    def add_all(self, requests: Sequence[Request]) -> list[LiveRequest]:
        """Queue all requests, or none. Raises the errors of `Scheduler.add`."""
        added: list[LiveRequest] = []
        for request in requests:
            try:
                added.append(self.add(request))
            except Exception:
                for other in added:
                    self._scheduler.abort(other.id)
                    self._timeline.forget(other.id)
                raise
        return added

    def abort(self, request_id: str, reason: FinishReason = FinishReason.ABORT) -> list[Output]:
        """End a request at this step boundary."""
        outputs = self._scheduler.abort(request_id, reason)
        self._transfers.submit_to_disk()
        self._timeline.got(outputs)
        return outputs

    def abort_all(self) -> list[Output]:
        """End every request."""
        live = list(self._scheduler.roster.live)
        return [output for request in live for output in self.abort(request.id)]

    def unpin(self, request_id: str) -> None:
        """Let the pages of a named prefix be evicted. `request_id`: the request that computed them."""
        self._scheduler.unpin(request_id)

    def step(self) -> list[Output]:
        """Launch the next step, read the one before it, and return the latter's outputs."""
        self.start()
        self._before_plan()
        chunks = self._scheduler.schedule(self._budget(), self._pace.work_budget())
        self._transfers.before_launch()
        launched = self._runner.launch(chunks, self._unread) if chunks else None
        self._keep(self._read(launched))
        self._transfers.after_read()
        if not chunks and not self._early:
            self._wait()
        return self._pop_early()

    def _before_plan(self) -> None:
        self._scheduler.page_tables.expire(self._clock())
        if self._transfers.plan_writes() or self._scheduler.must_read():
            self._read_early()
        self._transfers.before_plan()

    def _wait(self) -> None:
        """Wait a moment for the disk or for a guide's mask, as nothing can be computed."""
        self._timer.idle()
        self._transfers.wait()
        if (guide := self._scheduler.roster.awaited_guide()) is not None:
            guide.wait(_GUIDE_SECONDS)

    def idle(self) -> bool:
        """Write a few cached units to disk while idle; True if there may be more."""
        return self._transfers.write_idle()

    def watch_memory(self, memory: MemoryWatch) -> None:
        """Check the memory between two steps, and limit running requests if it is short."""
        before, has_changed = memory.level, memory.look(self._clock())
        self._stats.memory_used = memory.share
        if not has_changed:
            return
        self._stats.memory_level = int(memory.level)
        self._stats.memory_alarms += memory.level > before
        self._scheduler.limit_running(1 if memory.level >= MemoryLevel.HIGH else None)
        if memory.level is MemoryLevel.CRITICAL:
            self._read_early()
            self._scheduler.preemption.preempt_to(1)

    def start(self) -> None:
        """Start the last launched step on the device, unless it runs already.

        `step` does so itself, but too late for the outputs it returned before: deliver those first.
        """
        if self._unread is not None and not self._is_started:
            self._is_started = True
            self._runner.start(self._unread)

    def _budget(self) -> int | None:
        """Prompt tokens of the next step. What the last plan samples will decode in it."""
        num_decodes = sum(chunk.samples + len(chunk.draft) for chunk in self._last_plan)
        context = max((c.end for c in self._last_plan if not c.samples), default=0)
        return self._pace.budget(num_decodes, context)

    def _read(self, launched: Pending | None) -> list[Output]:
        """Read the unread step and commit it; the launched one becomes the unread one."""
        unread, self._unread = self._unread, launched
        sampled = []
        if unread is not None:
            sampled = self._runner.collect(unread)
            seconds = self._timer.read(self._clock())
            if seconds is not None:
                self._pace.observe(unread.chunks, seconds, self._timer.waited)
        if launched is not None:
            self._timer.launched(self._clock())
            self._is_started = False
            self._last_plan = launched.chunks
            self._timeline.launched(launched.chunks)
        if unread is None:
            return []
        try:
            outputs = self._scheduler.update(unread.chunks, sampled)
        except BaseException:
            # A call that fails here ends no request if the audit finds nothing wrong.
            self._keep(self._scheduler.commit.take_unreturned())
            raise
        self._has_read = True
        return outputs

    def _read_early(self) -> None:
        """Read the unread step before planning the next one, which returns its outputs as well."""
        if self._unread is not None:
            self._keep(self._read(None))

    def _keep(self, outputs: list[Output]) -> None:
        """Keep outputs until they are returned, after the restart if the rest of the step fails."""
        self._early += outputs
        # Not when they leave: a named prefix that ends here may live again by then, in an empty cache.
        self._timeline.got(outputs)

    def _pop_early(self) -> list[Output]:
        outputs, self._early = self._early, []
        return outputs

    def keep_pages(self, request: Request, seconds: float) -> None:
        """Protect a request's cached pages from eviction for `seconds`, also after its end."""
        self._scheduler.keep_pages(request, self._clock() + seconds)

    def reset_prefix_cache(self, *, force: bool = False, disk: bool = False) -> bool:
        """Forget every cached page except those of named prefixes; with `disk` also those on disk.

        Returns False and changes nothing while requests hold pages. `force` preempts them first,
        and they recompute their pages.
        """
        if force:
            self._read_early()
        is_done = self._scheduler.reset_prefix_cache(force=force)
        self._transfers.after_read()
        if is_done and disk and self._disk is not None:
            self._disk.tier.clear()
        return is_done

    def forget_prompts(
        self, prompts: Sequence[Sequence[int]], kept: Sequence[Sequence[int]], salt: bytes
    ) -> Forgotten:
        """Call `Scheduler.forget_prompts`, and delete the pages on disk as well."""
        num_before = self._scheduler.pool.num_evicted
        hashes = self._scheduler.forget_prompts(prompts, kept, salt)
        self._transfers.after_read()
        num_on_disk = 0 if self._disk is None else self._disk.delete(hashes)
        return Forgotten(self._scheduler.pool.num_evicted - num_before, num_on_disk)

    def resize_cache(self, num_pages: int) -> Resized:
        """Resize the cache to `num_pages`, returning memory to the machine or taking it.

        Answers continue. A smaller cache begins empty: running requests wait, and recompute their
        pages; so do named prefixes. Raises, before anything changes, InvalidParameter, OutOfMemory,
        PrefixQuotaExceeded if named prefixes, or those of one client, have too many pages, and
        PagesPromised if an answer would be cut.
        """
        check_num_pages(num_pages)
        self._read_early()
        if num_pages >= self._scheduler.pool.num_pages:
            self._runner.back(FullPages.name, self._scheduler.pool.blank.num_open)
            # First, as only the device may refuse a larger cache.
            self._runner.resize(num_pages)
            return self._scheduler.resize(num_pages)
        resized = self._scheduler.resize(num_pages)
        self._transfers.restart(self._scheduler.moves)
        self._timeline.restart(self.live_ids)
        try:
            self._runner.resize(num_pages)
        except OutOfMemory as error:
            # `check` fails until `restart`.
            raise MemoryError(f"the cache cannot be made smaller: {error}") from error
        return resized

    def restart(
        self, lost: Collection[str] = (), awaited: Collection[str] | None = None
    ) -> list[Output]:
        """Restart after a failure with the loaded model, and return the outputs read before it.

        Everything that a failure may leave half done is created anew: page tables, pool, arrays.
        Requests that hold pages are dropped, those in `lost`, and those that nobody waits for: a
        call that failed may have queued them. Other waiting requests stay, unless no step was read
        since the last failure: one of them may be the cause. Named prefixes are computed again.
        Raises the device's error if it refuses new arrays.

        awaited: as in `check`
        """
        self._unread, self._is_started, self._last_plan = None, True, ()
        before = self.live_ids
        dropped = before if not self._has_read else {*lost, *self._unawaited(awaited)}
        self._scheduler.restart(dropped)
        self._has_read = False
        self._transfers.restart(self._scheduler.moves)
        self._runner.restart(self._scheduler.pool.num_pages)
        live = self.live_ids
        self._timeline.restart(live)
        self._timer.restart()
        self._stats.engine_failures += 1
        self._stats.lost_requests += len(before - live)
        return self._pop_early()

    @property
    def live_ids(self) -> set[str]:
        """Ids of waiting and running requests."""
        return self._scheduler.roster.ids

    def _unawaited(self, awaited: Collection[str] | None) -> set[str]:
        """Return the ids of live requests that are not `awaited`, except named prefixes."""
        if awaited is None:
            return set()
        return self.live_ids.difference(awaited, self._scheduler.roster.prefixes)

    def mark(self) -> tuple[int, ...]:
        """Counts of requests and pages: if they differ after a call, it has changed something.

        Taken for every call: `check` takes 0.5 s for a pool of 100,000 pages.
        """
        roster, pool = self._scheduler.roster, self._scheduler.pool
        pins = self._scheduler.page_tables.pins
        requests = len(roster.live), len(roster.running), len(roster.prefixes), pins.num_pages
        return *requests, pool.num_pages, pool.num_free, pool.num_cached, pool.num_pinned

    def check(self, awaited: Collection[str] | None = None) -> None:
        """Audit requests, pages and arrays. Raises AssertionError.

        awaited: ids of requests that callers wait for; each is live, or has an undelivered last
            output, and only named prefixes being recomputed live besides. None if they are not known
        """
        if awaited is not None:
            ended = {output.request_id for output in self._early if output.finish_reason}
            lost = set(awaited) - self.live_ids - ended
            assert not lost, f"nothing computes the answers of {', '.join(sorted(lost))}"
            idle = self._unawaited(awaited)
            assert not idle, f"nobody waits for the answers of {', '.join(sorted(idle))}"
        num_unread = self._scheduler.page_tables.num_unread
        assert num_unread == (self._unread is not None), (
            "a planned step was lost before it was read"
        )
        self._scheduler.check()
        self._runner.check(self._scheduler.pool.num_pages, self._scheduler.moves.unit_names())
