"""How costs grow: a step with its requests and their contexts, an admission with the length of its
prompt and with the chats that are cached, memory with sessions that share a beginning.

Each curve ends in its exponent: e where the cost of its last points grows like n ** e, so that 1 is
linear, 0 is flat and 2 would be a defect. Times are the process's own where a CPU computes, so that
a busy machine counts little; Metal's are on the clock.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxserve import machine
from mlxserve.bench.report import Figure, Report
from mlxserve.build import choose_attention
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.hub.files import find_model
from mlxserve.model.load import load
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, Request, Sampled, as_page_table
from mlxserve.sampling_params import SamplingParams
from mlxserve.scheduler.config import SchedulerConfig
from mlxserve.scheduler.scheduler import Scheduler

PAGE_SIZE = 32
RUNNING = (1, 4, 16, 32, 64)  # requests of a step, each with SHORT tokens
CONTEXTS = (128, 512, 2048, 4096, 8192)  # tokens of a step's one request
PROMPTS = (512, 2048, 8192, 32_768)
CHATS = (1, 10, 100, 1000)
SESSIONS = (1, 4, 16, 64)
SHORT = 128
CHAT = 320  # tokens of a cached chat
PREFIX, OWN = 2048, 128  # tokens that sessions share, and those of each
_PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost at several sizes: `values[i]` are the runs at `sizes[i]`."""

    name: str
    unit: str
    sizes: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]

    def exponent(self) -> float:
        """Of the last step but one to the last: the first sizes are mostly a constant."""
        costs = [statistics.median(values) for values in self.values[-2:]]
        return math.log(costs[1] / costs[0]) / math.log(self.sizes[-1] / self.sizes[-2])

    def figures(self) -> list[Figure]:
        return [
            *(
                Figure(f"{self.name.format(f'{size:,}')}", self.unit, values)
                for size, values in zip(self.sizes, self.values, strict=True)
            ),
            Figure("  grows in the end like n to the", "", (self.exponent(),)),
        ]


def bench_growth(model: str, *, rounds: int) -> Report:
    """All curves. Raises what loading a model does."""
    curves = [
        *step_curves(model, rounds),
        Curve("admit a cached prompt of {} tokens", "us", PROMPTS, _each(PROMPTS, _prompt, rounds)),
        Curve("admit a chat, {} cached", "us", CHATS, _each(CHATS, _chat_among, rounds)),
        Curve(
            f"pages of {{}} sessions on {PREFIX:,} shared tokens",
            "",
            SESSIONS,
            tuple((float(pages_of_sessions(count)),) for count in SESSIONS),
        ),
    ]
    settings = {"model": Path(model).name, "rounds": rounds, "page_size": PAGE_SIZE}
    return Report("growth", settings, tuple(f for curve in curves for f in curve.figures()))


def step_curves(model: str, rounds: int) -> list[Curve]:
    """A step of decodes on the real model, whose contexts are zeros: what is read costs the same."""
    is_metal = machine.is_metal()
    files = find_model(model)
    loaded = load(files, is_metal=is_metal, memory_limit=machine.memory().working_set)
    backend, _ = choose_attention("auto", loaded)
    contexts = tuple(context for context in CONTEXTS if context <= loaded.max_length)
    num_pages = max(RUNNING[-1] * SHORT, contexts[-1]) // PAGE_SIZE
    kv = KVPool(loaded.layers, num_pages, PAGE_SIZE, backend)
    runner = ModelRunner(loaded.model, loaded.selector, kv)
    clock = time.perf_counter if is_metal else time.process_time

    def step(running: int, context: int) -> float:
        chunks = _decodes(running, context)
        began = clock()
        pending = runner.launch(chunks)
        runner.start(pending)
        runner.collect(pending)
        return clock() - began

    return [
        Curve(
            f"step of {{}} requests with {SHORT} tokens",
            "ms",
            RUNNING,
            _interleaved(RUNNING, lambda running: 1e3 * step(running, SHORT), rounds),
        ),
        Curve(
            "step of one request with {} tokens",
            "ms",
            contexts,
            _interleaved(contexts, lambda context: 1e3 * step(1, context), rounds),
        ),
    ]


def pages_of_sessions(count: int) -> int:
    """Pages that `count` running sessions hold, whose prompts begin alike."""
    scheduler = _scheduler(num_pages=PREFIX + count * 2 * OWN // PAGE_SIZE)
    long = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    _answer(scheduler, [1] * PREFIX)
    for number in range(count):
        scheduler.add(Request(str(number), [1] * PREFIX + [2 + number] * OWN, long))
    while scheduler.stats().num_waiting:
        _step(scheduler)
    return scheduler.pool.num_used


def _decodes(running: int, context: int) -> list[Chunk]:
    pages = context // PAGE_SIZE
    return [
        Chunk(
            Request(str(number), [1] * context, _PARAMS),
            context - 1,
            1,
            as_page_table(range(number * pages, (number + 1) * pages)),
            samples=True,
        )
        for number in range(running)
    ]


def _prompt(length: int) -> Callable[[], float]:
    """Admits a prompt again that was computed before."""
    scheduler = _scheduler(num_pages=3 * length // PAGE_SIZE)
    prompt = list(range(length))
    _answer(scheduler, prompt)
    return lambda: 1e6 * _admit(scheduler, prompt)


def _chat_among(count: int) -> Callable[[], float]:
    """Admits the next turn of one of many cached chats."""
    pages = CHAT // PAGE_SIZE
    scheduler = _scheduler(num_pages=(count + 2) * (pages + 1))
    for number in range(count):
        _answer(scheduler, [number] * CHAT)
    return lambda: 1e6 * _admit(scheduler, [count // 2] * CHAT + [count] * (PAGE_SIZE // 2))


def _admit(scheduler: Scheduler, prompt: Sequence[int]) -> float:
    """Seconds of this thread until the request has its first chunk; then it is answered."""
    request = Request("admitted", list(prompt), _PARAMS)
    began = time.thread_time()
    scheduler.add(request)
    chunks = scheduler.schedule()
    seconds = time.thread_time() - began
    assert request.num_cached > 0, "the prompt was cached"
    scheduler.update(chunks, [Sampled(0)])
    return seconds


def _answer(scheduler: Scheduler, prompt: Sequence[int]) -> None:
    scheduler.add(Request("cached", list(prompt), _PARAMS))
    while scheduler.has_work:
        _step(scheduler)


def _step(scheduler: Scheduler) -> None:
    chunks = scheduler.schedule()
    scheduler.update(chunks, [Sampled(0) if chunk.samples else None for chunk in chunks])


def _scheduler(num_pages: int) -> Scheduler:
    config = SchedulerConfig(
        page_size=PAGE_SIZE,
        max_num_batched_tokens=1 << 16,
        max_num_seqs=SESSIONS[-1],
        max_model_len=num_pages * PAGE_SIZE,
        long_prefill_token_threshold=0,
    )
    return Scheduler(config, PagePool(num_pages, PAGE_SIZE))


def _each(
    sizes: Sequence[int], make: Callable[[int], Callable[[], float]], rounds: int
) -> tuple[tuple[float, ...], ...]:
    """As `_interleaved`, of measurements that are made ready first."""
    ready = {size: make(size) for size in sizes}
    return _interleaved(sizes, lambda size: ready[size](), rounds)


def _interleaved(
    sizes: Sequence[int], measure: Callable[[int], float], rounds: int
) -> tuple[tuple[float, ...], ...]:
    """The runs at each size, taken in turns; the first of each warms up."""
    runs = [[measure(size) for size in sizes] for _ in range(rounds + 1)]
    return tuple(zip(*runs[1:], strict=True))
