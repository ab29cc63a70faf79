"""Simulation: the real engine, scheduler and page pool under a simulated clock.

Only the runner is replaced: a step takes the time of the cost model, and samples placeholders.
Between steps the engine does what it does in production, including planning one step ahead.

Runs of pure decode steps are jumped in one step of many tokens (`jump`).
A jump is taken only if the plans in between could not have differed, so requests, pages and
counters end up the same; clock readings differ only by rounding. This holds for requests of one
priority class and one client, as in all workloads here: ageing counts plans, of which a jump makes
one, and fairness charges by plan.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

from mlxserve.cache.pages import PagePool
from mlxserve.core.config import EngineConfig
from mlxserve.engine.engine import Engine
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Output, Sampled
from mlxserve.scheduler.scheduler import Scheduler
from tests.perf.simulation.costs import CostModel, StepWork
from tests.perf.simulation.jump import append_tokens, jump, steps_left
from tests.perf.simulation.workloads import SimulatedRequest, SimulatedWorkload

_SAMPLED = Sampled(0)
_PACE_MEMORY = 40  # steps after which a running average has forgotten: 0.7 ** 40 < 1e-6


@dataclass(eq=False, slots=True)
class SimulatedStep:
    """A launched step; for a jump, several steps that differ only in their contexts' lengths.

    Steps 0 .. length - 1 take first, first + slope, first + 2 * slope, ... seconds.
    """

    chunks: tuple[Chunk, ...]
    is_decode: bool  # only decodes
    first: float
    slope: float = 0.0
    length: int = 1
    began: float = 0.0

    @property
    def last(self) -> float:
        return self.first + self.slope * (self.length - 1)

    def seconds(self, length: int) -> float:
        """Total time of its first `length` steps."""
        return length * (self.first + self.slope * (length - 1) / 2)

    @property
    def end(self) -> float:
        return self.began + self.seconds(self.length)


class SimulatedRunner:
    """Stands in for the device: time passes by the cost model. Its clock is the simulation's."""

    def __init__(self, cost: CostModel, scheduler: Scheduler, *, jumps: bool) -> None:
        self.now = 0.0
        self.num_launched = 0  # as the engine sees it
        self.num_steps = 0  # as the device would have run
        self.next_arrival: float | None = None
        self.collected: SimulatedStep | None = None  # the last one
        self._cost = cost
        self._scheduler = scheduler
        self._jumps = jumps
        self._unfinished: SimulatedStep | None = None
        self._num_preemptions = 0

    def clock(self) -> float:
        return self.now

    def launch(self, chunks: Sequence[Chunk], previous: SimulatedStep | None) -> SimulatedStep:
        work = StepWork.of(chunks)
        step = SimulatedStep(tuple(chunks), work.prefill == 0, self._cost.seconds(work))
        if self._jumps and step.is_decode and (previous is None or previous.is_decode):
            self._jump(step, self.now if previous is None else previous.end)
        self.num_launched += 1
        self.num_steps += step.length
        return step

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Takes no time: a page is a thousandth of the memory that a step reads."""

    def back(self, kind: str, num_pages: int) -> None:
        """Takes no time, as the simulated pool is whole."""

    def start(self, step: SimulatedStep) -> None:
        step.began = self.now

    def collect(self, step: SimulatedStep) -> list[Sampled | None]:
        self.now = step.end
        self.collected = step
        return [_SAMPLED if chunk.samples else None for chunk in step.chunks]

    def finish_jump(self) -> None:
        """Append the tokens of the jump in flight, once the step before it has been read."""
        if self._unfinished is not None:
            append_tokens(self._unfinished.chunks, _SAMPLED.token_id)
            self._unfinished = None

    def _jump(self, step: SimulatedStep, began: float) -> None:
        """Turn a decode step into as many steps as would all have had the same plan."""
        stats = self._scheduler.stats()
        has_preempted = stats.num_preemptions > self._num_preemptions
        self._num_preemptions = stats.num_preemptions
        # After a preemption, or when a request ends, the next plan may admit others.
        if has_preempted or len(step.chunks) < stats.num_running:
            return
        step.slope = self._cost.decode_context * len(step.chunks)
        tables = self._scheduler.page_tables
        length = self._before_arrival(step, began, steps_left(tables, step.chunks))
        if length < 2:
            return
        step.chunks = jump(tables, step.chunks, length)
        step.length = step.chunks[0].length
        if step.length > 1:
            self._unfinished = step

    def _before_arrival(self, step: SimulatedStep, began: float, length: int) -> int:
        """The most steps of which the last one begins before the next request arrives."""
        if self.next_arrival is None or began + step.seconds(length - 1) < self.next_arrival:
            return length
        low, high = 0, length - 1  # seconds(low) is before the arrival or low is 0; high is not
        while high - low > 1:
            middle = (low + high) // 2
            if began + step.seconds(middle) < self.next_arrival:
                low = middle
            else:
                high = middle
        return low + 1


class JumpingTimeModel(StepTimeModel):
    """Learns the same from a jump as from its single steps."""

    def __init__(self, target: float | None, runner: SimulatedRunner) -> None:
        super().__init__(target)
        self._runner = runner

    def observe(self, chunks: Sequence[Chunk], seconds: float, waited: float = 0.0) -> None:
        step = self._runner.collected
        if step is None or step.length == 1:
            super().observe(chunks, seconds, waited)
            return
        for index in range(max(0, step.length - _PACE_MEMORY), step.length):
            super().observe(chunks, step.first + index * step.slope)


@dataclass(slots=True)
class _Progress:
    turn: SimulatedRequest
    request: LiveRequest
    first: float | None = None  # times of its first and its last token
    last: float = 0.0
    longest_gap: float = 0.0


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One answered request. Times in seconds."""

    priority: int
    num_prompt: int
    num_cached: int
    num_outputs: int
    sent: float  # on the clock
    first_token: float  # since it was sent
    longest_gap: float  # between two of its tokens; 0 if it has only one
    end: float  # on the clock


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """The outcome of a run."""

    makespan: float
    num_launched: int  # scheduled steps
    num_steps: int  # steps that a device would have run
    preemptions: int
    recomputed_tokens: int
    hit_rate: float  # of the prompts' tokens
    records: tuple[RequestRecord, ...]


class Simulation:
    """One workload on one configuration."""

    def __init__(
        self,
        config: EngineConfig,
        num_pages: int,
        cost: CostModel,
        workload: SimulatedWorkload,
        *,
        jumps: bool = True,
    ) -> None:
        """`jumps=False`: simulate every single step, for comparison."""
        self.pool = PagePool(num_pages, config.page_size, config.hot_after_hits)
        # Symbolic tokens repeat in another way than text does.
        self.scheduler = Scheduler(replace(config.scheduler, speculative_tokens=0), self.pool)
        self.runner = SimulatedRunner(cost, self.scheduler, jumps=jumps)
        pace = JumpingTimeModel(config.itl_target, self.runner)
        runner = cast(ModelRunner, self.runner)  # launch, start and collect are all that is used
        self.engine = Engine(self.scheduler, runner, pace, self.runner.clock)
        self._workload = workload
        self._arrivals: list[tuple[float, int, SimulatedRequest]] = []
        self._order = count()
        self._running: dict[str, _Progress] = {}
        self._records: list[RequestRecord] = []

    def run(self) -> SimulationResult:
        """Play the workload to its end."""
        logger = logging.getLogger("mlxserve.scheduler")
        is_disabled, logger.disabled = logger.disabled, True  # preemptions are counted, not logged
        try:
            self._send(self._workload.begin())
            while self.engine.has_work or self._arrivals:
                self._step()
        finally:
            logger.disabled = is_disabled
        return self._result()

    def _step(self) -> None:
        if not self.engine.has_work:
            self.runner.now = max(self.runner.now, self._arrivals[0][0])
        self._receive()
        self.runner.next_arrival = self._arrivals[0][0] if self._arrivals else None
        outputs = self.engine.step()
        self.runner.finish_jump()
        for output in outputs:
            self._advance(output)

    def _send(self, turns: Sequence[SimulatedRequest]) -> None:
        for turn in turns:
            heapq.heappush(self._arrivals, (turn.time, next(self._order), turn))

    def _receive(self) -> None:
        """Give the engine the requests sent by now."""
        while self._arrivals and self._arrivals[0][0] <= self.runner.now:
            _, _, turn = heapq.heappop(self._arrivals)
            self._running[turn.request.id] = _Progress(turn, self.engine.add(turn.request))
            self._send(self._workload.arrived(turn))

    def _advance(self, output: Output) -> None:
        progress, step = self._running[output.request_id], self.runner.collected
        assert step is not None
        if progress.first is None:
            progress.first = step.end
        else:
            gap = step.began + step.first - progress.last
            progress.longest_gap = max(progress.longest_gap, gap, step.last)
        progress.last = step.end
        if output.finish_reason is not None:
            self._end(self._running.pop(output.request_id))

    def _end(self, progress: _Progress) -> None:
        turn, request = progress.turn, progress.request
        assert progress.first is not None
        self._records.append(
            RequestRecord(
                priority=request.asked.priority,
                num_prompt=request.num_prompt,
                num_cached=request.num_cached,
                num_outputs=request.num_outputs,
                sent=turn.time,
                first_token=progress.first - turn.time,
                longest_gap=progress.longest_gap,
                end=progress.last,
            )
        )
        self._send(self._workload.finished(turn, request, self.runner.now))

    def _result(self) -> SimulationResult:
        stats = self.scheduler.stats()
        return SimulationResult(
            makespan=self.runner.now,
            num_launched=self.runner.num_launched,
            num_steps=self.runner.num_steps,
            preemptions=stats.num_preemptions,
            recomputed_tokens=stats.recomputed_tokens,
            hit_rate=stats.prefix_hits / max(1, stats.prefix_queries),
            records=tuple(self._records),
        )
