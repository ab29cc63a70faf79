"""Piecewise: runs a helper's job over pieces, any of which may never end.

    results = await Piecewise(helper, "trees").results(texts, run_fairly, seconds=0.1)

The worker's method is a generator, which yields one result for each piece. A piece that takes longer
than `piece_seconds` has the process killed, and its result is None; the pieces after it get another
process. The job runs among other short work if the process is idle, and among longer jobs if it has
to be started or is busy: short work never waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from mlxserve.helpers.errors import HelperKilled, JobFailed
from mlxserve.helpers.fair_executor import MEDIUM_SECONDS, SHORT_SECONDS, Lane, lane_of
from mlxserve.helpers.helper import Helper
from mlxserve.helpers.job import Job
from mlxserve.helpers.work import RunFairly, RunsIn, Work

log = logging.getLogger(__name__)

_MAX_TRIES = 2  # for pieces after one that had the process ended


class Piecewise:
    """The jobs of one method of a helper's worker, which takes a list of pieces."""

    def __init__(self, helper: Helper, method: str, piece_seconds: float) -> None:
        """piece_seconds: for one piece; more end the process."""
        self._helper = helper
        self._method = method
        self._piece_seconds = piece_seconds

    async def results(
        self, pieces: Sequence[Any], run_fairly: RunFairly, *, seconds: float
    ) -> list[Any]:
        """Return the result of each piece; None for one that was not done in time.

        seconds: that all are expected to need

        Raises the errors of `run_fairly`.
        """
        done: list[Any] = []
        if pieces and lane_of(seconds) is Lane.SHORT:
            await run_fairly(Work(seconds, partial(self._try_now, pieces, done), RunsIn.PROCESS))
        for _ in range(_MAX_TRIES):
            if len(done) < len(pieces):
                expected = min(max(seconds, 1.01 * SHORT_SECONDS), MEDIUM_SECONDS)
                await run_fairly(Work(expected, partial(self._wait, pieces, done), RunsIn.PROCESS))
        return [*done, *[None] * (len(pieces) - len(done))]

    def _try_now(self, pieces: Sequence[Any], done: list[Any]) -> None:
        """Do the pieces if the process is running and idle."""
        if self._helper.is_running:
            self._do(self._helper.begin_if_idle, pieces, done)

    def _wait(self, pieces: Sequence[Any], done: list[Any]) -> None:
        self._do(self._helper.begin_in_turn, pieces, done)

    def _do(self, begin: Callable[..., Job | None], pieces: Sequence[Any], done: list[Any]) -> None:
        """Append the results of the remaining pieces, up to one that fails."""
        try:
            job = begin(self._method, pieces[len(done) :], seconds=self._piece_seconds)
            while job is not None and not job.is_done:
                done += job.receive(self._piece_seconds)
        except (HelperKilled, JobFailed) as error:
            log.info("Piece %d of the %s is left out: that %s", len(done), self._helper.name, error)
            done.append(None)
