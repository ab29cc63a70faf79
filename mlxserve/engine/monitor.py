"""EngineMonitor: the engine's counters, requests and pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mlxserve.cache.kinds.full_pages import FullPages
from mlxserve.cache.kinds.kind import find
from mlxserve.cache.kinds.state_slots import StateSlots
from mlxserve.cache.kinds.window_pages import WindowPages
from mlxserve.cache.pages import PagePool
from mlxserve.core.stats import (
    DiskStats,
    PlannedMemory,
    PoolStats,
    RankStats,
    StateStats,
    Stats,
    StepStats,
    StoreStats,
    VisionStats,
    WindowStats,
)
from mlxserve.engine.disk_cache import DiskCache
from mlxserve.engine.snapshot import PageState, Snapshot, view
from mlxserve.engine.timeline import Timeline
from mlxserve.model.runner import ModelRunner
from mlxserve.model.workers import Workers
from mlxserve.scheduler.scheduler import Scheduler


class EngineMonitor:
    """Reads the counters of the engine's parts, on its thread. It changes nothing."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        timeline: Timeline,
        steps: StepStats,
        clock: Callable[[], float],
        *,
        disk: DiskCache | None = None,
        workers: Workers | None = None,
        planned: PlannedMemory | None = None,
    ) -> None:
        """planned: bytes of weights, a step, recurrent states (in the field `pool`) and a page."""
        self._scheduler = scheduler
        self._runner = runner
        self._timeline = timeline
        self._steps = steps
        self._clock = clock
        self._disk = disk
        self._workers = workers
        self._planned = planned or PlannedMemory()

    def stats(self) -> Stats:
        tables = self._scheduler.page_tables
        states, windows = find(tables.ends, StateSlots), find(tables.ends, WindowPages)
        disk, store = (None, None) if self._disk is None else (self._disk.disk, self._disk.store)
        return Stats(
            scheduler=self._scheduler.stats(),
            pool=PoolStats.from_owner(self._scheduler.pool),
            engine=self._steps.copy(),
            disk=DiskStats() if disk is None else DiskStats.from_owner(disk.use()),
            store=StoreStats() if store is None else StoreStats.from_owner(store.use()),
            states=StateStats() if states is None else states.stats.copy(),
            windows=WindowStats() if windows is None else WindowStats.from_owner(windows.pool),
            ranks=RankStats() if self._workers is None else self._workers.stats(),
            vision=VisionStats() if self._runner.vision is None else self._runner.vision.stats(),
            planned=self._planned_now(),
        )

    def _planned_now(self) -> PlannedMemory:
        pages = self._scheduler.pool.num_pages * self._planned.page
        return replace(self._planned, pool=self._planned.pool + pages)

    def _page_states(self) -> bytes:
        """States of full pages, which tell cached pages that are on disk as well."""
        return self._states_of(FullPages.name, self._scheduler.pool)

    def _window_page_states(self) -> bytes:
        """States of window pages; empty if those layers have no pool of their own."""
        windows = find(self._scheduler.page_tables.ends, WindowPages)
        return b"" if windows is None else self._states_of(windows.name, windows.pool)

    def _states_of(self, kind: str, pool: PagePool) -> bytes:
        if self._disk is None:
            return pool.states()
        return _stored_states(pool, partial(self._disk.has, kind))

    def _no_draft_reason(self) -> str:
        drafts = self._scheduler.drafts
        if drafts is None:
            return self._runner.no_drafts_reason
        refusal = drafts.controller.refusal
        return "" if refusal is None else str(refusal)

    def snapshot(self) -> Snapshot:
        """Return the current requests and pages. Its time grows with them: not for every step."""
        now = self._clock()
        running, waiting = self._scheduler.requests()
        age = self._timeline.age
        return Snapshot(
            stats=self.stats(),
            memory=self._runner.memory(),
            page_size=self._scheduler.pool.page_size,
            pages=self._page_states(),
            window_pages=self._window_page_states(),
            requests=(
                *(view(r, age=age(r, now), position=None) for r in running),
                *(view(r, age=age(r, now), position=n) for n, r in enumerate(waiting, 1)),
            ),
            prefill_rate=self._timeline.prefilled.per_second(now),
            generation_rate=self._timeline.generated.per_second(now),
            no_draft_reason=self._no_draft_reason(),
        )


def _stored_states(pool: PagePool, is_on_disk: Callable[[bytes], bool]) -> bytes:
    """Return a byte per page, marking cached pages that are on disk as well."""
    states = bytearray(pool.states())
    for page in pool.order.first():
        if states[page] == PageState.CACHED and is_on_disk(pool.index.hash_of(page) or b""):
            states[page] = PageState.STORED
    return bytes(states)
