"""Transfers: moves the contents of pages within the pool, to disk and back.

    before_plan     pages and windows about to be evicted that are not on disk, pages that were read from disk,
                    copies made by the last update, memory of one layer for pages that are used soon
    before_launch   memory exchanged between kinds; copies, saves and loads of the plan
    after_read      recurrent states that are dropped
    write_idle      other cached units that are not on disk yet, while idle and at the end

Called by the engine between two steps, on its thread. The scheduler's moves say what to move, the
runner has the arrays, the disk tier the files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxserve.cache.kinds.kind import Units
from mlxserve.engine.disk_cache import DiskCache
from mlxserve.model.runner import ModelRunner
from mlxserve.scheduler.disk_pages import LOAD_PAGES, Load, Save
from mlxserve.scheduler.moves import Moves

log = logging.getLogger("mlxserve.disk")

CLOSING_SECONDS = 4.0  # to write what is cached at the end
# Written between two steps. Reading 8 MiB out of the pool took 6 ms of the included model, whose steps take 4;
# this takes 1.2. A page of a large model is more, and is written alone.
WRITE_BYTES = 2 << 20
_WAIT_SECONDS = 0.05  # for the disk when nothing can be computed; then calls are taken again
_PAUSE_SECONDS = 10.0  # after the disk has refused a page


@dataclass(frozen=True, slots=True)
class _PendingLoad:
    """A load that the disk was asked for, and when it is given up."""

    load: Load
    deadline: float


class Transfers:
    """Moves pages. Without a `disk` nothing leaves the memory, and the scheduler must not plan it."""

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
        self._pending: dict[int, _PendingLoad] = {}  # by the disk's ticket
        # By kind, (hash, unit) of what is to be written before the plan.
        self._endangered: dict[str, list[tuple[bytes, int]]] = {}
        self._write_after = 0.0  # time until which the disk is paused, as it has refused pages
        # Kinds with nothing left to write since the last step.
        self._written: set[str] = set()

    @property
    def is_reading(self) -> bool:
        """True if a request waits for pages that are being read."""
        return any(pending.load.is_wanted for pending in self._pending.values())

    def plan_writes(self) -> bool:
        """Choose units to write before they are evicted; True if the unread step must be read first."""
        self._endangered.clear()
        if self._disk is None:
            return False
        if not self._is_left_alone():
            pages, *ends = self._moves.kinds
            if units := self._moves.disk.endangered(self._max_units(self._disk, pages.name)):
                self._endangered[pages.name] = units
            for kind in ends:
                max_units = self._max_units(self._disk, kind.name)
                if units := self._moves.disk.endangered_at_end(kind, max_units):
                    self._endangered[kind.name] = units
        return bool(self._endangered) or self.is_reading

    def before_plan(self) -> None:
        """Write, read and copy units. No step may be unread if `plan_writes` returned True."""
        if self._disk is not None:
            for kind, units in self._endangered.items():
                self._write(self._disk, kind, units)
            self._finish_loads(self._disk)
        self._copy()
        if (soon := self._moves.pool.blank.open_soon) is not None:
            self._runner.back_ahead(self._moves.kinds[0].name, soon)
            return
        for end in self._moves.ends:
            if end.pool is not None and (soon := end.pool.blank.open_soon) is not None:
                self._runner.back_ahead(end.name, soon)
                return

    def before_launch(self) -> None:
        """Copy, save and load as planned. Then the step may overwrite those pages."""
        self._written.clear()
        self._copy()
        self.submit_to_disk()

    def after_read(self) -> None:
        self._written.clear()
        for kind, dropped in self._moves.pop_dropped():
            self._runner.drop(kind, dropped)
        self.submit_to_disk()

    def wait(self) -> None:
        """Wait a moment for the disk if it is being read, as nothing can be computed."""
        if self._disk is not None and self.is_reading:
            self._disk.tier.wait(_WAIT_SECONDS)

    def submit_to_disk(self) -> None:
        """Submit the scheduler's saves and loads since the last call."""
        if self._disk is None:
            return
        plan = self._moves.disk.pop_plan()
        for save in plan.saves:
            self._moves.finish_save(save, self._save(self._disk, save))
        for load in plan.loads:
            names = list(load.run.hashes)
            for end, units in zip(self._moves.ends, load.ends, strict=load.is_last):
                names += map(self._disk.kinds[end.name].record, _hashes(units))
            ticket = self._disk.tier.load(names)
            deadline = self._clock() + self._disk.patience(load.num_saved)
            self._pending[ticket] = _PendingLoad(load, deadline)

    def write_idle(self) -> bool:
        """Write a few cached units of one kind while idle; True if there may be more."""
        if self._disk is None or self._is_left_alone():
            return False
        for kind in self._moves.kinds:
            if kind.name not in self._written:
                max_units = self._max_units(self._disk, kind.name)
                if unwritten := self._moves.disk.unwritten(kind, max_units):
                    return self._write(self._disk, kind.name, unwritten)
                self._written.add(kind.name)
        return False

    def _write(self, disk: DiskCache, kind: str, units: Sequence[tuple[bytes, int]]) -> bool:
        """Write units; False if the disk refuses them, and is then paused. No step may be unread."""
        is_taken = self._num_taken(disk, kind, units) == len(units)
        if not is_taken:
            self._write_after = self._clock() + _PAUSE_SECONDS
        return is_taken

    def _num_taken(self, disk: DiskCache, kind: str, units: Sequence[tuple[bytes, int]]) -> int:
        """Write units, and return how many leading ones the disk accepts."""
        payloads = self._runner.read(kind, [unit for _, unit in units])
        return disk.save(kind, units, payloads)

    def _is_left_alone(self) -> bool:
        return self._clock() < self._write_after

    @staticmethod
    def _max_units(disk: DiskCache, kind: str) -> int:
        """Maximum units to write at once."""
        records = disk.kinds[kind]
        # Pages of a model without attention are empty: their hashes alone lead to its states.
        return min(records.max_at_once, max(1, WRITE_BYTES // max(1, records.unit_bytes)))

    def restart(self, moves: Moves) -> None:
        """Drop all pending loads, as the pool is empty: their requests are gone or restarted."""
        self._moves = moves
        self._pending.clear()
        self._written.clear()

    def close(self, *, keeps_pages: bool) -> None:
        """End the disk's thread. `keeps_pages`: write cached units first, for a bounded time."""
        if self._disk is None:
            return
        end = self._clock() + CLOSING_SECONDS
        try:
            while keeps_pages and self._clock() < end and self.write_idle():
                pass
        finally:
            self._disk.tier.close(max(0.1, end - self._clock()))

    def _copy(self) -> None:
        if self._moves.balance is not None:
            for resize in self._moves.balance.pop_resizes():
                if resize.dropped:
                    self._runner.drop(resize.kind, resize.dropped)
                else:
                    self._runner.shrink(
                        resize.kind, resize.sources, resize.targets, resize.num_units
                    )
        # Memory of pages that were allocated for the first time.
        self._runner.back(self._moves.kinds[0].name, self._moves.pool.blank.num_open)
        for end in self._moves.ends:
            if end.pool is not None:
                self._runner.back(end.name, end.pool.blank.num_open)
        if copies := self._moves.pop_copies():
            self._runner.copy_pages([c.source for c in copies], [c.target for c in copies])

    def _save(self, disk: DiskCache, save: Save) -> int:
        """Save units, and return how many full pages the disk accepts.

        Pages pass through memory a few at a time.
        """
        (pages, full), *ends = save.units
        for begin in range(0, len(full), LOAD_PAGES):
            part = full[begin : begin + LOAD_PAGES]
            num_taken = self._num_taken(disk, pages, part)
            if num_taken < len(part):
                return begin + num_taken
        for kind, units in ends:
            for unit in units:
                # One at a time: each may be large.
                if not self._write(disk, kind, [unit]):
                    break
        return len(full)

    def _finish_loads(self, disk: DiskCache) -> None:
        """Write pages that were read, and give up loads that take too long."""
        for answer in disk.poll():
            pending = self._pending.pop(answer.ticket, None)
            if pending is not None and pending.load.is_wanted:
                self._finish(disk, pending.load, answer.payloads, answer.from_store)
        now = self._clock()
        for ticket in [name for name, pending in self._pending.items() if pending.deadline < now]:
            load = self._pending.pop(ticket).load
            disk.give_up(ticket)
            if load.is_wanted:
                log.info(
                    "%d pages of request %s are computed, as the disk takes longer to return them",
                    load.num_saved,
                    load.request.id,
                )
                self._finish(disk, load, ())

    def _finish(
        self,
        disk: DiskCache,
        load: Load,
        payloads: Sequence[bytes],
        from_store: Sequence[bool] = (),
    ) -> None:
        """Write a load's payloads: those of its pages, and then perhaps of the other kinds."""
        pages, others = payloads[: len(load.pages)], payloads[len(load.pages) :]
        if pages:
            read = list(zip(load.run.hashes, load.pages, strict=False))[: len(pages)]
            self._fill(disk, self._moves.kinds[0].name, read, pages)
        has_ends = load.is_last and len(pages) == len(load.pages)
        has_ends = has_ends and len(others) == sum(map(len, load.ends))
        first = 0
        for end, units in zip(self._moves.ends, load.ends if has_ends else (), strict=False):
            payloads = others[first : first + len(units)]
            first += len(units)
            if units:
                self._fill(disk, end.name, units, payloads)
        num_from_store = sum(from_store[: len(pages)])
        self._moves.finish_load(load, len(pages), has_ends=has_ends, num_from_store=num_from_store)

    def _fill(
        self,
        disk: DiskCache,
        kind: str,
        units: Sequence[tuple[bytes, int]],
        payloads: Sequence[bytes],
    ) -> None:
        """Write payloads into units of memory."""
        numbers = [unit for _, unit in units]
        disk.writing(kind, _hashes(units), numbers)
        self._runner.write(kind, numbers, payloads)


def _hashes(units: Sequence[tuple[bytes, int]] | Units) -> list[bytes]:
    return [hash_ for hash_, _ in units]
