"""Transfers: moves what pages hold: within the pool, to disk and back.

    before_plan     pages about to be evicted that are not on disk, pages that were read from disk,
                    copies made by the last update, memory of one layer for pages that are used soon
    before_launch   copies, saves and loads that the plan asks for
    after_read      recurrent states that are not kept any more
    write_idle      other cached pages that are not on disk yet, while nothing runs and at the end

Called by the engine between two steps, on its thread. The scheduler's moves say what to move, the
runner has the arrays, the disk tier the files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxserve.engine.disk_cache import DiskCache, state_name, window_name
from mlxserve.model.runner import ModelRunner
from mlxserve.scheduler.disk_pages import LOAD_PAGES, Load, Save
from mlxserve.scheduler.moves import Moves

log = logging.getLogger("mlxserve.disk")

CLOSING_SECONDS = 4.0  # to write what is cached at the end
# Written between two steps. Reading 8 MiB out of the pool took 6 ms of the included model, whose steps take 4;
# this takes 1.2. A page of a large model is more, and is written alone.
WRITE_BYTES = 2 << 20
_MAX_PAGES = 256  # written at once, however small
_STATES = 2  # recurrent states written at once: each may be as large as a hundred pages
_WAIT_SECONDS = 0.05  # for the disk when nothing can be computed; then calls are taken again
_PAUSE_SECONDS = 10.0  # after the disk has refused a page


@dataclass(frozen=True, slots=True)
class _Asked:
    """A load that the disk was asked for, and when it is given up."""

    load: Load
    deadline: float


class Transfers:
    """Without a `disk` nothing leaves the memory, and the scheduler must not plan that."""

    def __init__(
        self,
        moves: Moves,
        runner: ModelRunner,
        disk: DiskCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._moves = moves
        self._runner = runner
        self._disk = disk
        self._clock = clock
        self._asked: dict[int, _Asked] = {}  # by the disk's ticket
        self._endangered: list[tuple[bytes, int]] = []  # (hash, page) to write before the plan
        self._write_after = 0.0  # the disk has refused pages, and is left alone until then
        self._are_pages_written = False  # nothing is left to write since the last plan

    @property
    def is_reading(self) -> bool:
        """Whether a request waits for pages that are being read."""
        return any(asked.load.is_wanted for asked in self._asked.values())

    def must_collect(self) -> bool:
        """Whether the unread step has to be collected for what happens before the next plan."""
        self._endangered = []
        if self._disk is None:
            return False
        if not self._is_left_alone():
            self._endangered = self._moves.disk.endangered(self._max_pages(self._disk.page_bytes))
        return bool(self._endangered) or self.is_reading

    def before_plan(self) -> None:
        """Every step must have been collected where `must_collect` says so."""
        if self._disk is not None:
            if self._endangered:
                self._write_pages(self._disk, self._endangered)
            self._finish_loads(self._disk)
        self._copy()
        windows = self._moves.windows
        if (soon := self._moves.pool.open_soon) is not None:
            self._runner.back_ahead(soon)
        elif windows is not None and (soon := windows.pool.open_soon) is not None:
            self._runner.back_windows_ahead(soon)

    def before_launch(self) -> None:
        """After this, the planned step may write to the pages that were copied or saved."""
        self._are_pages_written = False
        self._copy()
        self.submit_to_disk()

    def after_read(self) -> None:
        if (dropped := self._moves.pop_dropped_states()) is not None:
            self._runner.drop_states(dropped)
        self.submit_to_disk()

    def wait(self) -> None:
        """Nothing can be computed: wait a moment for the disk if it is being read."""
        if self._disk is not None and self.is_reading:
            self._disk.tier.wait(_WAIT_SECONDS)

    def submit_to_disk(self) -> None:
        """Give the disk what the scheduler planned since the last call."""
        if self._disk is None:
            return
        plan = self._moves.disk.pop_plan()
        for save in plan.saves:
            self._moves.finish_save(save, self._save(self._disk, save))
        for load in plan.loads:
            names = list(load.run.hashes)
            if load.windows:
                names += [window_name(hash_) for hash_, _ in load.windows]
            elif load.with_state and self._moves.windows is None:
                names.append(state_name(names[-1]))
            ticket = self._disk.tier.load(names)
            deadline = self._clock() + self._disk.patience(len(load.pages))
            self._asked[ticket] = _Asked(load, deadline)

    def write_idle(self) -> bool:
        """Without other work, write a few cached pages, or else states; whether there may be more."""
        if self._disk is None or self._is_left_alone():
            return False
        if not self._are_pages_written:
            if unwritten := self._moves.disk.unwritten(self._max_pages(self._disk.page_bytes)):
                return self._write_pages(self._disk, unwritten)
            num_windows = self._max_pages(self._disk.window_bytes)
            if windows := self._moves.disk.unwritten_windows(num_windows):
                return self._write_windows(self._disk, windows)
            self._are_pages_written = True
        return self._write_states(self._disk)

    def _write_pages(self, disk: DiskCache, unwritten: Sequence[tuple[bytes, int]]) -> bool:
        """Every step must have been collected. False if the disk refuses."""
        hashes, pages = zip(*unwritten, strict=True)
        payloads = self._runner.read_pages(pages)
        return self._offer(disk, list(zip(hashes, payloads, strict=True)))

    def _write_windows(self, disk: DiskCache, unwritten: Sequence[tuple[bytes, int]]) -> bool:
        """Every step must have been collected. False if the disk refuses."""
        payloads = self._runner.read_window_pages([page for _, page in unwritten])
        names = [window_name(hash_) for hash_, _ in unwritten]
        return self._offer(disk, list(zip(names, payloads, strict=True)))

    def _is_left_alone(self) -> bool:
        return self._clock() < self._write_after

    @staticmethod
    def _max_pages(page_bytes: int) -> int:
        """Pages written at once."""
        # Pages of a model without attention are empty: their hashes alone lead to its states.
        return min(_MAX_PAGES, max(1, WRITE_BYTES // max(1, page_bytes)))

    def _write_states(self, disk: DiskCache) -> bool:
        records = [
            (state_name(hash_), self._runner.read_state(id_))
            for hash_, id_ in self._moves.unwritten_states(_STATES)
        ]
        return self._offer(disk, records) and bool(records)

    def _offer(self, disk: DiskCache, records: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether the disk takes all of them; if not, it is left alone for a while."""
        is_taken = disk.save(records) == len(records)
        if not is_taken:
            self._write_after = self._clock() + _PAUSE_SECONDS
        return is_taken

    def restart(self, moves: Moves) -> None:
        """With an empty pool: requests that waited for pages of the old one are gone, or begin again."""
        self._moves = moves
        self._asked.clear()

    def close(self, *, keeps_pages: bool) -> None:
        """End the disk's thread. `keeps_pages`: write what is cached first, for a bounded time."""
        if self._disk is None:
            return
        end = self._clock() + CLOSING_SECONDS
        try:
            while keeps_pages and self._clock() < end and self.write_idle():
                pass
        finally:
            self._disk.tier.close(max(0.1, end - self._clock()))

    def _copy(self) -> None:
        self._runner.back(self._moves.pool.num_open)  # memory of pages allocated for the first time
        if self._moves.windows is not None:
            self._runner.back_windows(self._moves.windows.pool.num_open)
        if copies := self._moves.pop_copies():
            self._runner.copy_pages([c.source for c in copies], [c.target for c in copies])

    def _save(self, disk: DiskCache, save: Save) -> int:
        """How many of the pages the disk takes: a few at a time, as they pass through memory."""
        for begin in range(0, len(save.pages), LOAD_PAGES):
            part = slice(begin, begin + LOAD_PAGES)
            payloads = self._runner.read_pages(save.pages[part])
            num_taken = disk.save(list(zip(save.hashes[part], payloads, strict=True)))
            if num_taken < len(payloads):
                return begin + num_taken
        for window in save.windows:  # each may be large
            if not self._write_windows(disk, [window]):
                break
        return len(save.pages)

    def _finish_loads(self, disk: DiskCache) -> None:
        """Write what has been read to the pages that wait for it, and give up what takes too long."""
        for answer in disk.poll():
            asked = self._asked.pop(answer.ticket, None)
            if asked is not None and asked.load.is_wanted:
                self._finish(asked.load, answer.payloads)
        now = self._clock()
        for ticket in [name for name, asked in self._asked.items() if asked.deadline < now]:
            load = self._asked.pop(ticket).load
            disk.give_up(ticket)
            if load.is_wanted:
                log.info(
                    "%d pages of request %s are computed, as the disk takes longer to return them",
                    len(load.pages),
                    load.request.id,
                )
                self._finish(load, ())

    def _finish(self, load: Load, payloads: Sequence[bytes]) -> None:
        """`payloads`: of the pages, and then perhaps of the state or the window after them."""
        pages, others = payloads[: len(load.pages)], payloads[len(load.pages) :]
        if pages:
            self._runner.write_pages(load.pages[: len(pages)], pages)
        has_end = bool(others)
        if self._moves.windows is not None:
            is_whole = len(payloads) == len(load.pages) + len(load.windows)
            has_end = load.with_state and is_whole
            if has_end and load.windows:
                self._runner.write_window_pages([page for _, page in load.windows], others)
        state_id = self._moves.finish_load(load, len(pages), has_state=has_end)
        if state_id is not None:
            self._runner.write_state(state_id, others[0])
