"""Transfers: moves what pages hold, as the scheduler plans it: within the pool, to disk and back.

    before_plan     pages that were read from disk, copies made by the last update
    before_launch   copies, saves and loads that the plan asks for
    after_read      runs on disk that are not needed any more

Called by the engine between two steps, on its thread. The scheduler says what to move, the runner
has the arrays, the store the files.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from mlxserve.cache.store import LoadedPages, PageStore
from mlxserve.model.runner import ModelRunner
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.scheduler.swap import LOAD_PAGES, Load, Save

log = logging.getLogger("mlxserve.swap")

_WAIT_SECONDS = 0.05  # for the disk when nothing can be computed; then calls are taken again
PATIENCE_SECONDS = 10.0  # then nothing more is asked of the disk, until it answers


class Transfers:
    """Without a `store` nothing is swapped, and the scheduler must not plan that."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        store: PageStore | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._store = store
        self._clock = clock
        # With the times of the calls, in the order in which the store answers. A run may be loaded
        # twice: its request lost the pages it was read into, and waits again.
        self._loads: deque[tuple[Load, float]] = deque()
        self._loaded: deque[LoadedPages] = deque()  # polled, but not written to the pool yet

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return self._store.num_bytes if self._store is not None else 0

    @property
    def is_reading(self) -> bool:
        """Whether a request waits for pages that are being read."""
        return any(self._scheduler.accepts(load) for load, _ in self._loads)

    def before_plan(self) -> None:
        """While pages are being read from disk, every step must have been collected."""
        if self._store is not None:
            self._finish_loads(self._store)
        self._copy()

    def before_launch(self) -> None:
        """After this, the planned step may write to the pages that were copied or saved."""
        self._copy()
        self.hand_over()

    def after_read(self, *, is_idle: bool) -> None:
        """`is_idle`: nothing was launched and nothing read, so wait a moment for the disk."""
        self.hand_over()
        if is_idle and self.is_reading:
            assert self._store is not None
            self._store.wait(_WAIT_SECONDS)

    def hand_over(self) -> None:
        """Give the store what the scheduler planned since the last call."""
        plan = self._scheduler.pop_swap_plan()
        if self._store is None:
            assert not plan, "there is nowhere to swap to"
            return
        for key in plan.drops:
            self._store.drop(key)
        is_stalled = self._is_stalled()
        for save in plan.saves:
            num_pages = 0 if is_stalled else self._save(self._store, save)
            self._scheduler.finish_save(save, num_pages)
        for load in plan.loads:
            if is_stalled:
                self._scheduler.finish_load(load, 0)
            else:
                self._store.load(load.run.key, load.run.first, load.run.hashes)
                self._loads.append((load, self._clock()))

    def _is_stalled(self) -> bool:
        """Whether the disk owes an answer for too long: until then nothing more is asked of it."""
        return bool(self._loads) and self._loads[0][1] < self._clock() - PATIENCE_SECONDS

    def restart(self) -> None:
        """After a failure: what was swapped is not needed any more; answers to loads are dropped."""
        if self._store is not None:
            self._store.drop_all()

    def close(self) -> None:
        """Remove what is on disk."""
        if self._store is not None:
            self._store.close()

    def _copy(self) -> None:
        if copies := self._scheduler.pop_copies():
            self._runner.copy_pages([c.source for c in copies], [c.target for c in copies])

    def _save(self, store: PageStore, save: Save) -> int:
        """How many of the pages the store takes: a few at a time, as they pass through memory."""
        for begin in range(0, len(save.pages), LOAD_PAGES):
            part = slice(begin, begin + LOAD_PAGES)
            payloads = self._runner.read_pages(save.pages[part])
            first, hashes = save.run.first + begin, save.run.hashes[part]
            num_taken = store.save(save.run.key, first, hashes, payloads)
            if num_taken < len(payloads):
                return begin + num_taken
        return len(save.pages)

    def _finish_loads(self, store: PageStore) -> None:
        """Write what has been read to the pages that wait for it."""
        is_alive = store.is_alive  # asked first: the last answers come before the end
        self._loaded += store.poll()
        while self._loaded:
            loaded, (load, _) = self._loaded.popleft(), self._loads.popleft()
            assert (loaded.key, loaded.first) == (load.run.key, load.run.first), "out of order"
            if not self._scheduler.accepts(load):
                continue
            num_pages = len(loaded.payloads)
            if num_pages:
                self._runner.write_pages(load.pages[:num_pages], loaded.payloads)
            self._scheduler.finish_load(load, num_pages)
        if not is_alive or self._is_stalled():
            self._give_up()
        if not is_alive:
            self._loads.clear()

    def _give_up(self) -> None:
        """Compute again what the disk has not returned, and what it has just been asked for."""
        lost = [load for load, _ in self._loads if self._scheduler.accepts(load)]
        for load in lost:
            self._scheduler.finish_load(load, 0)
        if lost:
            log.warning(
                "Swapped pages do not come back from the disk and are computed again. Nothing is "
                "swapped until it answers"
            )
