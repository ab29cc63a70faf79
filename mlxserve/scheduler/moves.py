"""Moves: the copies, reads and writes that the engine makes between two steps, and their results.

copies           pages with the content of others     before a plan, and before its launch
disk             saves and loads, pages to write      before the launch, and while idle
dropped units    recurrent states that are not kept   after the launch
"""

from __future__ import annotations

from collections.abc import Sequence

from mlxserve.core.stats import SchedulerStats
from mlxserve.scheduler.balance import Balance
from mlxserve.scheduler.disk_pages import Load, Save
from mlxserve.scheduler.page_tables import PageCopy, PageTables
from mlxserve.scheduler.preemption import warn
from mlxserve.scheduler.roster import Roster


class Moves:
    """The moves of one scheduler's pages.

    `disk` plans reads and writes of the disk; `pool`, `kinds` and `ends` may be read by others.
    """

    def __init__(self, tables: PageTables, roster: Roster, stats: SchedulerStats) -> None:
        self.pool = tables.pool
        self.kinds = tables.kinds
        self.ends = tables.ends
        self.disk = tables.disk
        self.balance: Balance | None = None  # if kinds share memory; has the new sizes of arrays
        self._tables = tables
        self._roster = roster
        self._stats = stats

    def pop_copies(self) -> Sequence[PageCopy]:
        """Return the pages to copy before the next plan, and before a planned step is launched.

        After that their sources may be overwritten.
        """
        return self._tables.pop_copies()

    def finish_save(self, save: Save, num_pages: int) -> None:
        """Count the first `num_pages` pages of a save, which the disk took."""
        self._stats.swapped_tokens += num_pages * self._tables.pool.page_size
        if save.number is not None:
            warn(save.request_id, save.number, is_swapped=num_pages > 0)

    def finish_load(
        self, load: Load, num_pages: int, *, has_ends: bool = False, num_from_store: int = 0
    ) -> None:
        """Commit the first `num_pages` pages of a load; the others are lost.

        has_ends: the units that other kinds need to continue after them were read, too
        num_from_store: pages of these that came from a page store
        """
        request, first, end = load.request, load.run.first, load.run.first + num_pages
        request.num_from_store += num_from_store
        self._tables.finish_load(request, load, num_pages, has_ends=has_ends)
        if has_ends:
            first = request.disk_base  # pages that were of no use without what was read
        self._roster.pages_published(request.page_hashes[first:end])
        self._tables.release_unused()

    def pop_dropped(self) -> Sequence[tuple[str, list[int]]]:
        """Return (kind, names) of the units to drop once the planned step is launched."""
        if not self.ends:
            return ()
        return [(end.name, end.pop_dropped()) for end in self.ends if end.names_units]

    def unit_names(self) -> dict[str, set[int]]:
        """Return the names of all units that were planned and not dropped, by kind."""
        return {end.name: end.ids() for end in self.ends if end.names_units}
