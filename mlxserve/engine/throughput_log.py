"""ThroughputLog: a periodic line about the engine's throughput."""

from __future__ import annotations

import logging
import time

from mlxserve.core.stats import Stats

log = logging.getLogger("mlxserve.engine")


class ThroughputLog:
    """Writes a line about throughput every `interval` seconds in which the engine took steps."""

    def __init__(self, interval: float | None) -> None:
        self._interval = interval
        self._last = Stats()
        self._time = time.monotonic()

    def write(self, stats: Stats, now: float) -> None:
        if self._interval is None or now - self._time < self._interval:
            return
        last, seconds = self._last, now - self._time
        self._last, self._time = stats, now
        if stats.engine.num_steps == last.engine.num_steps:
            return
        prompts = stats.scheduler.prompt_tokens - last.scheduler.prompt_tokens
        queries = stats.scheduler.prefix_queries - last.scheduler.prefix_queries
        hits = stats.scheduler.prefix_hits - last.scheduler.prefix_hits
        generated = stats.engine.generation_tokens - last.engine.generation_tokens
        log.info(
            "Prompt throughput: %.1f tokens/s, generation throughput: %.1f tokens/s, "
            "running: %d, waiting: %d, KV cache usage: %.1f%%, prefix cache hit rate: %.1f%%, "
            "preemptions since the start: %d",
            prompts / seconds,
            generated / seconds,
            stats.scheduler.num_running,
            stats.scheduler.num_waiting,
            100 * stats.pool.usage,
            100 * hits / queries if queries else 0.0,
            stats.scheduler.num_preemptions,
        )
