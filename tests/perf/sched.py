"""The scheduler's own cost: microseconds of schedule() and update() for a step of decodes."""

from __future__ import annotations

import time
from collections.abc import Sequence

from mlxserve.bench.report import Figure, Report
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.request import Chunk, Request, Sampled
from mlxserve.scheduler.scheduler import Scheduler

PAGE_SIZE = 32
_SAMPLED = Sampled(0)


def bench_sched(*, running: Sequence[int], contexts: Sequence[int], rounds: int) -> Report:
    """Times by running requests at the longest context, and by context at the most requests.

    Times are CPU times of the thread, so that other load does not count.
    """
    most, longest = max(running), max(contexts)
    sizes = [(n, longest) for n in sorted(running)]
    sizes += [(most, c) for c in sorted(contexts) if c != longest]
    figures = [
        Figure(
            f"{n} running, {c:,} tokens each", "us", tuple(1e6 * s for s in measure(n, c, rounds))
        )
        for n, c in sizes
    ]
    settings = {"page_size": PAGE_SIZE, "rounds": rounds, "steps a round": PAGE_SIZE}
    return Report("sched", settings, tuple(figures))


def measure(num_running: int, context: int, rounds: int) -> list[float]:
    """Seconds per step, one value per round.

    A round has as many steps as a page has tokens, so that every request allocates and publishes
    exactly one page in it. The first round warms up.
    """
    scheduler = prefilled_scheduler(num_running, context, PAGE_SIZE * (rounds + 2) + num_running)
    chunks = scheduler.schedule()
    seconds = []
    for _ in range(rounds + 1):
        began = time.thread_time()
        for _ in range(PAGE_SIZE):
            chunks = step(scheduler, chunks)
        seconds.append((time.thread_time() - began) / PAGE_SIZE)
    return seconds[1:]


def step(scheduler: Scheduler, unread: list[Chunk]) -> list[Chunk]:
    """As in the engine: plan a step, then read the one before."""
    chunks = scheduler.schedule()
    scheduler.update(unread, [_SAMPLED] * len(unread))
    return chunks


def prefilled_scheduler(num_running: int, context: int, max_tokens: int) -> Scheduler:
    """A scheduler whose requests are all prefilled, each with a text of its own."""
    pages = num_running * -(-(context + max_tokens + PAGE_SIZE) // PAGE_SIZE)
    longest = context + max_tokens
    config = SchedulerConfig(
        max_num_batched_tokens=num_running * longest,  # all prompts in one step
        max_num_seqs=num_running,
        max_model_len=longest,
        long_prefill_token_threshold=0,
    )
    scheduler = Scheduler(config, PagePool(pages, PAGE_SIZE))
    for index in range(num_running):
        # Different lengths, so that their pages do not fill in the same step.
        length = max(1, context - index % PAGE_SIZE)
        params = SamplingParams(max_tokens=max_tokens, temperature=0)
        scheduler.add(Request(str(index), [index] * length, params))
    for _ in range(num_running):  # a step admits at least one
        chunks = scheduler.schedule()
        scheduler.update(chunks, [_SAMPLED] * len(chunks))
        if len(chunks) == num_running:
            break
    return scheduler
