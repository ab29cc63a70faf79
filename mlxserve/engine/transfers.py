"""Transfers: moves what pages hold: within the pool, to disk and back.

    before_plan     pages that were read from disk, copies made by the last update
    before_launch   copies, saves and loads that the plan asks for
    write_pages     cached pages that are not on disk yet, before they are evicted
    write_idle      the others, while nothing runs and at the end

Called by the engine between two steps, on its thread. The scheduler says what to move, the runner
has the arrays, the disk tier the files.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxserve.engine.disk_cache import DiskCache, state_name
from mlxserve.model.runner import ModelRunner
from mlxserve.scheduler.disk_pages import LOAD_PAGES, Load, Save
from mlxserve.scheduler.scheduler import Scheduler

log = logging.getLogger("mlxserve.disk")

CLOSING_SECONDS = 4.0  # to write what is cached at the end
# Written between two steps. Reading 8 MiB out of the pool took 6 ms of the included model, whose steps take 4;
# this takes 1.2. A page of a large model is more, and is written alone.
WRITE_BYTES = 2 << 20
_MOST_PAGES = 256  # written at once, however small
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
        scheduler: Scheduler,
        runner: ModelRunner,
        disk: DiskCache | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._disk = disk
        self._clock = clock
        self._asked: dict[int, _Asked] = {}  # by the disk's ticket
        self._write_after = 0.0  # the disk has refused pages, and is left alone until then
        self._last_write = -1  # the scheduler's step since which nothing is left to write

    @property
    def is_reading(self) -> bool:
        """Whether a request waits for pages that are being read."""
        return any(self._scheduler.accepts(asked.load) for asked in self._asked.values())

    def before_plan(self) -> None:
        """While pages are being read from disk, every step must have been collected."""
        if self._disk is not None:
            self._finish_loads(self._disk)
        self._copy()

    def before_launch(self) -> None:
        """After this, the planned step may write to the pages that were copied or saved."""
        self._copy()
        self.hand_over()

    def after_read(self, *, is_idle: bool) -> None:
        """`is_idle`: nothing was launched and nothing read, so wait a moment for the disk."""
        self.hand_over()
        if is_idle and self.is_reading:
            assert self._disk is not None
            self._disk.tier.wait(_WAIT_SECONDS)

    def hand_over(self) -> None:
        """Give the disk what the scheduler planned since the last call."""
        plan = self._scheduler.pop_disk_plan()
        if self._disk is None:
            assert not plan, "there is no disk"
            return
        for save in plan.saves:
            self._scheduler.finish_save(save, self._save(self._disk, save))
        for load in plan.loads:
            names = list(load.run.hashes)
            if load.with_state:
                names.append(state_name(names[-1]))
            ticket = self._disk.tier.load(names)
            deadline = self._clock() + self._disk.patience(len(load.pages))
            self._asked[ticket] = _Asked(load, deadline)

    def endangered(self) -> list[tuple[bytes, int]]:
        """(hash, page) of a few cached pages that are evicted next and are not on disk."""
        if self._disk is None or self._is_left_alone():
            return []
        return self._unwritten(self._disk, is_idle=False)

    def write_pages(self, unwritten: Sequence[tuple[bytes, int]]) -> bool:
        """Write cached pages; every step must have been collected. False if the disk refuses."""
        assert self._disk is not None, "there is no disk"
        hashes, pages = zip(*unwritten, strict=True)
        payloads = self._runner.read_pages(pages)
        return self._offer(self._disk, list(zip(hashes, payloads, strict=True)))

    def write_idle(self) -> bool:
        """Without other work, write a few cached pages, or else states; whether there may be more."""
        if self._disk is None or self._is_left_alone():
            return False
        step = self._scheduler.num_steps
        if step != self._last_write:
            if unwritten := self._unwritten(self._disk, is_idle=True):
                return self.write_pages(unwritten)
            self._last_write = step
        return self._write_states(self._disk)

    def _is_left_alone(self) -> bool:
        return self._clock() < self._write_after

    def _unwritten(self, disk: DiskCache, *, is_idle: bool) -> list[tuple[bytes, int]]:
        # Pages of a model without attention are empty: their hashes alone lead to its states.
        most = min(_MOST_PAGES, max(1, WRITE_BYTES // max(1, disk.page_bytes)))
        return self._scheduler.unwritten(most, is_idle=is_idle)

    def _write_states(self, disk: DiskCache) -> bool:
        records = [
            (state_name(hash_), self._runner.read_state(id_))
            for hash_, id_ in self._scheduler.unwritten_states(_STATES)
        ]
        return self._offer(disk, records) and bool(records)

    def _offer(self, disk: DiskCache, records: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether the disk takes all of them; if not, it is left alone for a while."""
        is_taken = disk.tier.save(records) == len(records)
        if not is_taken:
            self._write_after = self._clock() + _PAUSE_SECONDS
        return is_taken

    def restart(self) -> None:
        """After a failure: the requests that wait for pages are gone, or begin again."""
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
        if copies := self._scheduler.pop_copies():
            self._runner.copy_pages([c.source for c in copies], [c.target for c in copies])

    def _save(self, disk: DiskCache, save: Save) -> int:
        """How many of the pages the disk takes: a few at a time, as they pass through memory."""
        for begin in range(0, len(save.pages), LOAD_PAGES):
            part = slice(begin, begin + LOAD_PAGES)
            payloads = self._runner.read_pages(save.pages[part])
            num_taken = disk.tier.save(list(zip(save.hashes[part], payloads, strict=True)))
            if num_taken < len(payloads):
                return begin + num_taken
        return len(save.pages)

    def _finish_loads(self, disk: DiskCache) -> None:
        """Write what has been read to the pages that wait for it, and give up what takes too long."""
        for answer in disk.poll():
            asked = self._asked.pop(answer.ticket, None)
            if asked is not None and self._scheduler.accepts(asked.load):
                self._finish(asked.load, answer.payloads)
        now = self._clock()
        for ticket in [name for name, asked in self._asked.items() if asked.deadline < now]:
            load = self._asked.pop(ticket).load
            disk.give_up(ticket)
            if self._scheduler.accepts(load):
                log.info(
                    "%d pages of request %s are computed, as the disk takes longer to return them",
                    len(load.pages),
                    load.request_id,
                )
                self._finish(load, ())

    def _finish(self, load: Load, payloads: Sequence[bytes]) -> None:
        """`payloads`: of the pages, and then perhaps of the state behind them."""
        pages, states = payloads[: len(load.pages)], payloads[len(load.pages) :]
        if pages:
            self._runner.write_pages(load.pages[: len(pages)], pages)
        state_id = self._scheduler.finish_load(load, len(pages), has_state=bool(states))
        if state_id is not None:
            self._runner.write_state(state_id, states[0])
