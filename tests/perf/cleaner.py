"""The longest gap of a running answer while the cleaner writes, with a disk, a slow one and none.

    fill the cache ─▶ an answer alone: idle steps ─▶ short prompts evict what is cached: gaps
                                                     └▶ with a disk it is written first, beside the answer

Every run is a new engine with an empty folder. The three kinds follow each other in each round with the
same prompts, so what the prompts themselves cost is in all of them; what differs is the disk's.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from unittest import mock

from mlxserve import AsyncLLM, SamplingParams
from mlxserve.bench.report import Figure, Report, quantile
from mlxserve.disk.files import DiskFiles

KINDS = ("no disk", "disk", "slow disk")
_NUM_PAGES, _PAGE_SIZE = 128, 32
_IDLE_TOKENS = 64  # of the answer, before other prompts arrive
_SHORT = 3 * _PAGE_SIZE  # tokens of those
_VOCABULARY = 250  # token ids that every model has


@dataclass(frozen=True, slots=True)
class CleanerRun:
    """Seconds between the tokens of an answer, alone and while pages may be written."""

    idle: tuple[float, ...]
    gaps: tuple[float, ...]
    num_written: int  # pages, in the time of `gaps`


def bench_cleaner(
    model: str,
    *,
    pairs: int,
    num_prompts: int,
    slow_seconds: float,
    progress: Callable[[str], None] = lambda _: None,
) -> Report:
    """`num_prompts`: beside the answer; `slow_seconds`: that each page takes on the slow disk."""
    runs: dict[str, list[CleanerRun]] = {kind: [] for kind in KINDS}
    for number in range(pairs + 1):
        first = number % len(KINDS)
        for kind in (*KINDS[first:], *KINDS[:first]):  # each kind goes first in turn
            progress(f"round {number} of {pairs}: {kind}")
            draw = random.Random(number)
            with slowed(slow_seconds if kind == "slow disk" else 0.0):
                run = asyncio.run(_run(model, draw, num_prompts, has_disk=kind != "no disk"))
            if number:  # the first round warms up
                runs[kind].append(run)
    settings = {
        "model": model,
        "pairs": pairs,
        "prompts": num_prompts,
        "slow disk, s per page": slow_seconds,
    }
    return Report("cleaner", settings, tuple(figures(runs)))


def figures(runs: dict[str, list[CleanerRun]]) -> Iterator[Figure]:
    """In idle steps: the median of a round's three answers while they are alone."""
    rounds = zip(*runs.values(), strict=True)
    steps = [statistics.median(statistics.median(r.idle) for r in each) for each in rounds]
    measures: dict[str, Callable[[CleanerRun], float]] = {
        "longest gap": lambda run: max(run.gaps),
        "gap p99": lambda run: quantile(run.gaps, 0.99),
        "gap p50": lambda run: statistics.median(run.gaps),
    }
    for kind, found in runs.items():
        yield Figure(
            "idle step, ms", "", tuple(1e3 * statistics.median(r.idle) for r in found), kind
        )
    for name, measure in measures.items():
        values = {
            kind: tuple(measure(run) / step for run, step in zip(found, steps, strict=True))
            for kind, found in runs.items()
        }
        for kind, of_kind in values.items():
            yield Figure(f"{name}, idle steps", "", of_kind, kind)
        for kind in KINDS[1:]:
            more = tuple(a - b for a, b in zip(values[kind], values["no disk"], strict=True))
            yield Figure(f"{name}, more than without a disk", "", more, kind)
    for kind, found in runs.items():
        yield Figure(
            "pages written meanwhile", "", tuple(float(r.num_written) for r in found), kind
        )


@contextmanager
def slowed(seconds: float) -> Iterator[None]:
    """Each page takes so long to be written and to be read."""

    def after(method: Callable[..., object]) -> Callable[..., object]:
        def slow(*args: object) -> object:
            time.sleep(seconds)
            return method(*args)

        return slow

    with (
        mock.patch.object(DiskFiles, "write", after(DiskFiles.write)),
        mock.patch.object(DiskFiles, "read", after(DiskFiles.read)),
    ):
        yield


async def _run(model: str, draw: random.Random, num_prompts: int, *, has_disk: bool) -> CleanerRun:
    def prompt(length: int) -> list[int]:
        return [draw.randrange(1, _VOCABULARY) for _ in range(length)]

    once = SamplingParams(max_tokens=1, temperature=0)
    with tempfile.TemporaryDirectory() as folder:
        llm = AsyncLLM(
            model,
            num_pages=_NUM_PAGES,
            page_size=_PAGE_SIZE,
            disk_cache_size=1 if has_disk else 0,
            disk_cache_dir=folder,
            disable_log_stats=True,
        )
        try:
            for _ in range(8):
                await llm.generate(prompt(_NUM_PAGES // 8 * _PAGE_SIZE), once)
            times: list[float] = []
            is_alone = asyncio.Event()
            running = asyncio.create_task(_stream(llm, prompt(_PAGE_SIZE), times, is_alone))
            await is_alone.wait()
            num_alone, before = len(times), llm.stats().disk.num_written
            for _ in range(num_prompts):
                await llm.generate(prompt(_SHORT), once)
            ended, num_written = time.perf_counter(), llm.stats().disk.num_written - before
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        finally:
            llm.close()
    idle = tuple(b - a for a, b in pairwise(times[8:num_alone]))
    # An answer that got no token at the end stalled until then.
    gaps = tuple(b - a for a, b in pairwise([*times[num_alone - 1 :], ended]))
    return CleanerRun(idle, gaps, num_written)


async def _stream(
    llm: AsyncLLM, prompt: list[int], times: list[float], is_alone: asyncio.Event
) -> None:
    params = SamplingParams(max_tokens=1500, temperature=0, ignore_eos=True)
    async for _ in llm.stream(prompt, params):
        times.append(time.perf_counter())
        if len(times) == _IDLE_TOKENS:
            is_alone.set()
