"""Timeline: times of arrivals, starts and tokens of requests, for the engine's counters and rates."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from mlxserve.core.stats import Rate, StepStats
from mlxserve.request import Chunk, LiveRequest, Output


class Timeline:
    """Counts into `stats`. It is told of every arrival, launch and output."""

    def __init__(self, clock: Callable[[], float], stats: StepStats) -> None:
        self.prefilled = Rate()  # prompt tokens computed
        self.generated = Rate()
        self._stats = stats
        self._clock = clock
        self._arrived: dict[str, float] = {}  # arrival time of every live request
        self._queued: set[str] = set()  # requests that wait for their first step
        self._started: dict[str, float] = {}  # requests that wait for their first token

    def arrived(self, request_id: str) -> None:
        self._arrived[request_id] = self._clock()
        self._queued.add(request_id)

    def age(self, request: LiveRequest, now: float) -> float:
        """Seconds since the request arrived."""
        return now - self._arrived[request.id]

    def launched(self, chunks: Sequence[Chunk]) -> None:
        now = self._clock()
        num_prefilled = sum(c.length for c in chunks if c.start < c.request.prefill_end)
        self.prefilled.add(now, num_prefilled)
        self._stats.num_steps += 1
        self._stats.prefill_tokens += num_prefilled
        self._stats.iteration_tokens.observe(sum(chunk.length for chunk in chunks))
        for chunk in chunks:
            if chunk.request.id in self._queued:
                self._queued.remove(chunk.request.id)
                self._stats.queue_seconds.observe(now - self._arrived[chunk.request.id])
                self._started[chunk.request.id] = now

    def got(self, outputs: Sequence[Output]) -> None:
        now = self._clock()
        num_tokens = sum(len(output.token_ids) for output in outputs)
        self.generated.add(now, num_tokens)
        self._stats.generation_tokens += num_tokens
        for output in outputs:
            started = self._started.pop(output.request_id, None)
            if started is not None and output.token_ids:
                self._stats.prefill_seconds.observe(now - started)
            if output.finish_reason is not None:
                self._stats.request_success[output.finish_reason] += 1
                self._stats.request_prompt_tokens.observe(output.num_prompt)
                self._stats.request_generation_tokens.observe(output.num_outputs)
                self.forget(output.request_id)

    def forget(self, request_id: str) -> None:
        self._arrived.pop(request_id, None)
        self._queued.discard(request_id)

    def restart(self, live: Collection[str]) -> None:
        """Keep only these requests, after a failure or a resize emptied the cache.

        Named prefixes among them count as new arrivals.
        """
        now, known = self._clock(), set(live)
        self._arrived = {name: self._arrived.get(name, now) for name in live}
        self._queued &= known
        self._started = {name: at for name, at in self._started.items() if name in known}
