"""Piecewise: runs a helper's job over pieces, any of which may never end.

    pieces = Piecewise(helper, "trees", piece_seconds=1.0, max_seconds=2.0)
    results = await pieces.results(texts, run_fairly, seconds=0.1)

The worker's method is a generator over `take_turn`: it yields one result for each piece, and stops
when its turn is over, so that the pieces of other clients come before the rest. A piece that takes
longer than `piece_seconds` has the process killed, and its result is None; the pieces after it get
another process. The job runs among other short work if the process is idle, and among longer jobs if
it has to be started or is busy: short work never waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlxserve.helpers.errors import HelperKilled, JobFailed
from mlxserve.helpers.fair_executor import MEDIUM_SECONDS, SHORT_SECONDS, Lane, lane_of
from mlxserve.helpers.helper import Helper
from mlxserve.helpers.job import Job
from mlxserve.helpers.work import RunFairly, RunsIn, Work

log = logging.getLogger(__name__)

_MAX_ENDED = 2  # processes of one request


class Piecewise:
    """The jobs of one method of a helper's worker, which takes a list of pieces."""

    def __init__(
        self, helper: Helper, method: str, piece_seconds: float, max_seconds: float
    ) -> None:
        """piece_seconds: of a processor, for one piece; more end the process.

        max_seconds: of a processor, for all pieces; what is left then is not done
        """
        self._helper = helper
        self._method = method
        self._piece_seconds = piece_seconds
        self._max_seconds = max_seconds

    async def results(
        self, pieces: Sequence[Any], run_fairly: RunFairly, *, seconds: float
    ) -> list[Any]:
        """Return the result of each piece; None for one that was not done in time.

        seconds: that all are expected to need

        Raises the errors of `run_fairly`.
        """
        progress = _Progress(pieces, self._max_seconds)
        if pieces and lane_of(seconds) is Lane.SHORT:
            await run_fairly(Work(seconds, partial(self._try_now, progress), RunsIn.PROCESS))
        expected = min(max(seconds, 1.01 * SHORT_SECONDS), MEDIUM_SECONDS)
        while progress.may_go_on:
            await run_fairly(Work(expected, partial(self._wait, progress), RunsIn.PROCESS))
        return [*progress.done, *[None] * len(progress.rest)]

    def _try_now(self, progress: _Progress) -> None:
        """Take a turn if the process is running and idle."""
        if self._helper.is_running:
            self._do(self._helper.begin_if_idle, progress)

    def _wait(self, progress: _Progress) -> None:
        self._do(self._helper.begin_in_turn, progress)

    def _do(self, begin: Callable[..., Job | None], progress: _Progress) -> None:
        """Append the results of a turn, or of the pieces up to one that fails."""
        left, piece_seconds = progress.seconds_left, self._piece_seconds
        try:
            job = begin(self._method, progress.rest, left, seconds=piece_seconds)
            if job is None:
                return
            while not job.is_done:
                progress.done += job.receive(piece_seconds)
            progress.seconds_left -= job.result
        except (HelperKilled, JobFailed) as error:
            number, name = len(progress.done), self._helper.name
            log.info("Piece %d of the %s is left out: that %s", number, name, error)
            progress.done.append(None)
            progress.seconds_left -= piece_seconds
            progress.num_ended += 1


@dataclass(slots=True)
class _Progress:
    """Counts which pieces of one request are done, and the seconds that it has left."""

    pieces: Sequence[Any]
    seconds_left: float
    done: list[Any] = field(default_factory=list)
    num_ended: int = 0  # turns that failed

    @property
    def rest(self) -> Sequence[Any]:
        return self.pieces[len(self.done) :]

    @property
    def may_go_on(self) -> bool:
        return bool(self.rest) and self.seconds_left > 0 and self.num_ended < _MAX_ENDED
