"""Moves: what the engine moves between two steps, and what the scheduler makes of it.

copies           pages that begin as others do        before a plan, and before its launch
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
    """Over the page tables of one pool. `disk` plans what is written to disk and read from it; `pool`,
    `kinds` and `ends` are there to read."""

    def __init__(self, tables: PageTables, roster: Roster, stats: SchedulerStats) -> None:
        self.pool = tables.pool
        self.kinds = tables.kinds
        self.ends = tables.ends
        self.disk = tables.disk
        self.balance: Balance | None = None  # where kinds share memory; has the arrays' new sizes
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

    def finish_load(self, load: Load, num_pages: int, *, has_ends: bool = False) -> None:
        """The first `num_pages` pages of the load hold what was on disk; the others are lost.

        has_ends: what other kinds need to go on after them was read as well
        """
        request, first = load.request, load.run.first
        self._tables.finish_load(request, load, num_pages, has_ends=has_ends)
        self._roster.pages_published(request.page_hashes[first : first + num_pages])
        self._tables.release_unused()

    def pop_dropped(self) -> Sequence[tuple[str, list[int]]]:
        """Units that are not needed once the planned step is launched, of each kind that names its units."""
        if not self.ends:
            return ()
        return [(end.name, end.pop_dropped()) for end in self.ends if end.names_units]

    def unit_names(self) -> dict[str, set[int]]:
        """All units that were planned and not dropped, of each kind that names its units."""
        return {end.name: end.ids() for end in self.ends if end.names_units}
