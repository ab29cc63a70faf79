"""Moves: what the engine moves between two steps, and what the scheduler makes of it.

copies           pages that begin as others do        before a plan, and before its launch
disk             saves and loads, pages to write      before the launch, and while idle
dropped states   recurrent states that are not kept   after the launch
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve.core.stats import SchedulerStats
from mlxserve.scheduler.disk_pages import Load, Save
from mlxserve.scheduler.page_tables import PageCopy, PageTables
from mlxserve.scheduler.preemption import warn
from mlxserve.scheduler.roster import Roster


class Moves:
    """Over the page tables of one pool. `disk` plans what is written to disk and read from it; `pool`
    and `windows` are there to read."""

    def __init__(self, tables: PageTables, roster: Roster, stats: SchedulerStats) -> None:
        self.pool = tables.pool
        self.windows = tables.windows
        self.disk = tables.disk
        self._tables = tables
        self._roster = roster
        self._stats = stats

    def pop_copies(self) -> Sequence[PageCopy]:
        """Pages to copy before the next step is planned, and before the planned one is launched:
        after that their sources may be written to."""
        return self._tables.pop_copies()

    def finish_save(self, save: Save, num_pages: int) -> None:
        """The disk took the first `num_pages` pages of this save."""
        self._stats.swapped_tokens += num_pages * self._tables.pool.page_size
        if save.number is not None:
            warn(save.request_id, save.number, is_swapped=num_pages > 0)

    def finish_load(self, load: Load, num_pages: int, *, has_state: bool = False) -> int | None:
        """The first `num_pages` pages of the load hold what was on disk; the others are lost.

        has_state: the recurrent state was read as well; the id under which it is to be kept from now on,
        or None if it is not needed
        """
        request, first = load.request, load.run.first
        state_id = self._tables.finish_load(request, load, num_pages, has_state=has_state)
        self._roster.pages_published(request.page_hashes[first : first + num_pages])
        self._tables.release_unused()
        return state_id

    def unwritten_states(self, limit: int) -> list[tuple[bytes, int]]:
        """Up to `limit` (hash of the page before, id) of recurrent states that should be on disk and
        are not, for an idle engine to write; the last used first."""
        if self._tables.snapshots is None:
            return []
        known = self._tables.snapshots.known()
        return [(hash_, known[hash_]) for hash_ in self.disk.unwritten_states(known, limit)]

    def pop_dropped_states(self) -> list[int] | None:
        """Snapshots that are not needed once the planned step is launched; None without recurrent
        states."""
        snapshots = self._tables.snapshots
        return None if snapshots is None else snapshots.pop_dropped()

    def state_ids(self) -> set[int] | None:
        """Ids of all snapshots that were planned and not dropped; None without recurrent states."""
        snapshots = self._tables.snapshots
        return None if snapshots is None else snapshots.ids()
