"""StepTrace: what each step of a real engine did and how long it took, as JSON lines.

The recorder stands between engine and runner and changes neither's work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TextIO, cast

from mlxserve.bench.costs import StepWork
from mlxserve.engine.engine import Engine
from mlxserve.model.runner import ModelRunner, Pending
from mlxserve.request import Chunk, Sampled


class StepTrace:
    """Writes one line per step."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.num_steps = 0

    def write(self, work: StepWork, seconds: float) -> None:
        self._file.write(json.dumps({"seconds": seconds, **asdict(work)}) + "\n")
        self.num_steps += 1


class RecordingRunner:
    """A runner that measures as `Engine` does: from the later of the step's start and the end of
    the step before, to the step's end.
    """

    def __init__(
        self,
        runner: ModelRunner,
        trace: StepTrace,
        clock: Callable[[], float] = time.perf_counter,
        *,
        skip: int = 0,
    ) -> None:
        """`skip`: steps at the beginning that are not recorded, because they warm up."""
        self._runner = runner
        self._trace = trace
        self._clock = clock
        self._skip = skip
        self._began = 0.0
        self._last_read = 0.0

    def launch(self, chunks: Sequence[Chunk], previous: Pending | None = None) -> Pending:
        return self._runner.launch(chunks, previous)

    def start(self, pending: Pending) -> None:
        self._runner.start(pending)
        self._began = self._clock()

    def collect(self, pending: Pending) -> list[Sampled | None]:
        sampled = self._runner.collect(pending)
        now = self._clock()
        if self._skip:
            self._skip -= 1
        else:
            seconds = now - max(self._began, self._last_read)
            self._trace.write(StepWork.of(pending.chunks), seconds)
        self._last_read = now
        return sampled


def record_steps(engine: Engine, trace: StepTrace, *, skip: int = 0) -> None:
    """Record every step of `engine` from now on. Only while it has no step in flight."""
    assert not engine.has_work, "a step may be in flight"
    recorder = RecordingRunner(engine._runner, trace, skip=skip)
    engine._runner = cast(ModelRunner, recorder)
