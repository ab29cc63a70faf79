"""How costs grow: a step with its requests and their contexts, an admission with its prompt's length
and with the number of cached chats, memory with the number of sessions that share a prefix.

Each curve ends with its exponent e: between its last two points the cost grows like n ** e, so 1 is
linear, 0 is flat and 2 would be a defect. On a CPU, times are CPU times of the process, so that
other load counts little; on Metal they are wall times.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxserve.bench.report import Figure, Report, growth_exponent
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.hub.files import find_model
from mlxserve.model.attention import choose_attention
from mlxserve.model.load import load
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Chunk, LiveRequest, Request, Sampled, as_page_table
from mlxserve.scheduler.scheduler import Scheduler
from mlxserve.system import machine

PAGE_SIZE = 32
RUNNING = (1, 4, 16, 32, 64)  # requests in a step, each with SHORT tokens
CONTEXTS = (128, 512, 2048, 4096, 8192)  # tokens of the only request in a step
PROMPTS = (512, 2048, 8192, 32_768)
CHATS = (1, 10, 100, 1000)
SESSIONS = (1, 4, 16, 64)
SHORT = 128
CHAT = 320  # tokens of a cached chat
PREFIX, OWN = 2048, 128  # tokens that sessions share, and those of each
_PARAMS = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Curve:
    """A cost by size: `values[i]` are the runs at `sizes[i]`."""

    name: str
    unit: str
    sizes: tuple[int, ...]
    values: tuple[tuple[float, ...], ...]

    def exponent(self) -> float:
        """From the last size but one to the last: at the first sizes a constant dominates."""
        costs = [statistics.median(values) for values in self.values[-2:]]
        return growth_exponent(self.sizes[-2:], costs)

    def figures(self) -> list[Figure]:
        return [
            *(
                Figure(f"{self.name.format(f'{size:,}')}", self.unit, values)
                for size, values in zip(self.sizes, self.values, strict=True)
            ),
            Figure("  exponent of growth at the end", "", (self.exponent(),)),
        ]


def bench_growth(model: str, *, rounds: int) -> Report:
    """All curves. Raises the errors of loading a model."""
    curves = [
        *step_curves(model, rounds),
        Curve(
            "admit a cached prompt of {} tokens",
            "us",
            PROMPTS,
            _each(PROMPTS, cached_prompt, rounds),
        ),
        Curve("admit a chat, {} cached", "us", CHATS, _each(CHATS, cached_chat, rounds)),
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
    """Decode steps of the real model. Contexts are zeros, which cost the same to read."""
    is_metal = machine.is_metal()
    files = find_model(model)
    loaded = load(files, is_metal=is_metal, memory_limit=machine.memory().working_set)
    loaded, backends, _ = choose_attention("auto", loaded)
    contexts = tuple(context for context in CONTEXTS if context <= loaded.max_length)
    num_pages = max(RUNNING[-1] * SHORT, contexts[-1]) // PAGE_SIZE
    kv = KVPool(loaded.layers, num_pages, PAGE_SIZE, backends)
    runner = ModelRunner(loaded, kv)
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
            interleaved(RUNNING, lambda running: 1e3 * step(running, SHORT), rounds),
        ),
        Curve(
            "step of one request with {} tokens",
            "ms",
            contexts,
            interleaved(contexts, lambda context: 1e3 * step(1, context), rounds),
        ),
    ]


def pages_of_sessions(count: int) -> int:
    """Pages held by `count` running sessions that share a prefix."""
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
            LiveRequest(Request(str(number), [1] * context, _PARAMS)),
            context - 1,
            1,
            as_page_table(range(number * pages, (number + 1) * pages)),
            samples=True,
        )
        for number in range(running)
    ]


def cached_prompt(length: int) -> Callable[[], float]:
    """A function that admits a cached prompt and returns microseconds."""
    scheduler = _scheduler(num_pages=3 * length // PAGE_SIZE)
    prompt = list(range(length))
    _answer(scheduler, prompt)
    return lambda: 1e6 * _admit(scheduler, prompt)


def cached_chat(count: int) -> Callable[[], float]:
    """A function that admits the next turn of one of `count` cached chats."""
    pages = CHAT // PAGE_SIZE
    scheduler = _scheduler(num_pages=(count + 2) * (pages + 1))
    for number in range(count):
        _answer(scheduler, [number] * CHAT)
    return lambda: 1e6 * _admit(scheduler, [count // 2] * CHAT + [count] * (PAGE_SIZE // 2))


def _admit(scheduler: Scheduler, prompt: Sequence[int]) -> float:
    """CPU seconds until the request has its first chunk; the request is then answered."""
    asked = Request("admitted", list(prompt), _PARAMS)
    began = time.thread_time()
    request = scheduler.add(asked)
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
        max_num_batched_tokens=1 << 16,
        max_num_seqs=SESSIONS[-1],
        max_model_len=num_pages * PAGE_SIZE,
        long_prefill_token_threshold=0,
    )
    return Scheduler(config, PagePool(num_pages, PAGE_SIZE))


def _each(
    sizes: Sequence[int], make: Callable[[int], Callable[[], float]], rounds: int
) -> tuple[tuple[float, ...], ...]:
    """As `interleaved`, with measurements that are prepared first."""
    ready = {size: make(size) for size in sizes}
    return interleaved(sizes, lambda size: ready[size](), rounds)


def interleaved(
    sizes: Sequence[int], measure: Callable[[int], float], rounds: int
) -> tuple[tuple[float, ...], ...]:
    """The runs at each size, taken in turn; the first of each warms up."""
    runs = [[measure(size) for size in sizes] for _ in range(rounds + 1)]
    return tuple(zip(*runs[1:], strict=True))
