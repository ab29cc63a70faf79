"""Swapper: moves pages between the pool and the disk, as the scheduler plans.

Called by the engine between two steps, on its thread. The scheduler says what, the runner has the
arrays, the store the files.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable

from mlxserve.cache.store import PageStore
from mlxserve.model.runner import ModelRunner
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.scheduler.swap import LOAD_PAGES, Load, Save

log = logging.getLogger("mlxserve.swap")

_WAIT_SECONDS = 0.05  # for the disk when nothing can be computed, before the next calls are run
PATIENCE_SECONDS = 10.0  # then pages that the disk has not returned are computed again


class Swapper:
    """Knows which pages are being read, and for which requests."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        store: PageStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._store = store
        self._clock = clock
        # With the times of the calls, in the order in which the store answers. A run may be loaded
        # twice: its request lost the pages it was read into, and waits again.
        self._loads: deque[tuple[Load, float]] = deque()

    @property
    def num_bytes(self) -> int:
        """On disk."""
        return self._store.num_bytes

    @property
    def is_reading(self) -> bool:
        """Whether a request waits for pages that are being read."""
        return any(self._scheduler.accepts(load) for load, _ in self._loads)

    def restore(self) -> None:
        """Write what was read to the pages that wait for it. Every step must have been collected."""
        is_alive = self._store.is_alive  # asked first: the last answers come before the end
        for loaded in self._store.poll():
            load, _ = self._loads.popleft()
            assert (loaded.key, loaded.first) == (load.run.key, load.run.first), "out of order"
            if not self._scheduler.accepts(load):
                continue
            num_pages = len(loaded.payloads)
            if num_pages:
                self._runner.write_pages(load.pages[:num_pages], loaded.payloads)
            self._scheduler.finish_load(load, num_pages)
        self._give_up(asked_before=self._clock() - PATIENCE_SECONDS if is_alive else math.inf)
        if not is_alive:
            self._loads.clear()

    def _give_up(self, *, asked_before: float) -> None:
        """Compute again what a stalled disk has not returned in time."""
        late = [load for load, asked in self._loads if asked < asked_before]
        for load in filter(self._scheduler.accepts, late):
            log.warning("Swapped pages do not come back from the disk and are computed again")
            self._scheduler.finish_load(load, 0)

    def transfer(self) -> None:
        """Hand over what has to leave the pool, or to come back, before the next launch."""
        plan = self._scheduler.pop_swap_plan()
        for key in plan.drops:
            self._store.drop(key)
        for save in plan.saves:
            self._save(save)
        for load in plan.loads:
            self._loads.append((load, self._clock()))
            self._store.load(load.run.key, load.run.first, load.run.hashes)

    def _save(self, save: Save) -> None:
        """In batches, because the pages pass through memory."""
        for begin in range(0, len(save.pages), LOAD_PAGES):
            part = slice(begin, begin + LOAD_PAGES)
            payloads = self._runner.read_pages(save.pages[part])
            first = save.run.first + begin
            if not self._store.save(save.run.key, first, save.run.hashes[part], payloads):
                return

    def wait(self) -> None:
        """Wait for a moment, until something has been read."""
        self._store.wait(_WAIT_SECONDS)

    def close(self) -> None:
        self._store.close()
