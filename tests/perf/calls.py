"""The functions of ours that one decode step enters on the engine's thread, by file.

    CPU     the included model on the running engine, from one step's beginning to the next
    Metal   the runner's part of a step of 36 layers, recorded, over kernels that compute nothing
            (as in `tests.perf.host`)

Each step is one request's decode, warm, within a page. Calls are counted, not timed: the figures are
the same on every machine.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import and_
from pathlib import Path
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import mlxserve
from mlxserve.bench.report import Figure, Report
from mlxserve.build import build_engine
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine import async_engine
from mlxserve.engine.async_engine import AsyncEngine
from mlxserve.engine.engine import Engine
from mlxserve.hub.files import find_model
from mlxserve.model.step_graphs import TIMES_BEFORE
from mlxserve.request import Output, Request
from tests.perf import host
from tests.perf.recording_factory import single_ops

ROOT = Path(mlxserve.__file__).parent.parent
_OURS = tuple(f"{ROOT / package}/" for package in ("mlxserve", "metal_kernels"))
_PAGE_SIZE = 32
_PROMPT = 3 * _PAGE_SIZE + 4  # its answer stays within one page until long after the traced step
_FIRST_TRACED = 2 * TIMES_BEFORE + 8  # the first step that is traced: graphs are recorded by then
_NUM_TRACED = 8  # within a page
_PARTS = frozenset({"<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>"})  # of a function

Calls = Counter[CodeType]  # how often each function was entered


def bench_calls(*, by_function: bool = False) -> Report:
    """Distinct functions and calls of a decode step, in all and by file, or by function."""
    paths = {"CPU": engine_calls(), "Metal, recorded": recorded_calls()}
    figures = []
    for name, calls in paths.items():
        figures.append(Figure(f"{name}: distinct functions", "", (float(len(calls)),)))
        figures.append(Figure(f"{name}: calls", "", (float(calls.total()),)))
    for name, calls in paths.items():
        figures += [
            Figure(f"{name}: {place}", "calls", (float(count),))
            for place, count in (functions if by_function else by_file)(calls).most_common()
        ]
    return Report("calls", {"running": 1, "page_size": _PAGE_SIZE}, tuple(figures))


def by_file(calls: Calls) -> Counter[str]:
    """Calls by the path of the file within the repository."""
    files: Counter[str] = Counter()
    for code, count in calls.items():
        files[_path(code)] += count
    return files


def functions(calls: Calls) -> Counter[str]:
    """Calls by function, named with its file."""
    named: Counter[str] = Counter()
    for code, count in calls.items():
        named[f"{_path(code)} {code.co_qualname}"] += count
    return named


def is_counted(code: CodeType) -> bool:
    """Whether it is a function of ours; a comprehension is a part of its own."""
    return code.co_filename.startswith(_OURS) and code.co_name not in _PARTS


def _path(code: CodeType) -> str:
    return Path(code.co_filename).relative_to(ROOT).as_posix()


class Tracer:
    """Counts the functions of ours that this thread enters while it is on."""

    def __init__(self) -> None:
        self.calls: Calls = Counter()

    def start(self) -> None:
        sys.setprofile(self._count)

    def stop(self) -> None:
        sys.setprofile(None)

    @contextmanager
    def on(self) -> Iterator[None]:
        self.start()
        try:
            yield
        finally:
            self.stop()

    def _count(self, frame: FrameType, event: str, _arg: object) -> None:
        if event == "call" and is_counted(frame.f_code):
            self.calls[frame.f_code] += 1


def engine_calls(model: str = "mlxserve-mini") -> Calls:
    """Of the engine's thread, from the beginning of a decode step to that of the next one: what each of
    several steps enters. Now and then one does more, which one depends on the machine's speed."""
    steps: list[Calls] = []
    files = find_model(model)
    config = EngineConfig().with_options(
        model=model, num_pages=64, page_size=_PAGE_SIZE, disable_log_stats=True
    )

    def build() -> Engine:
        engine, _ = build_engine(config, files)
        _trace(engine, steps)
        return engine

    with patch.object(async_engine, "STATS_SECONDS", math.inf):  # copies the counters now and then
        engine = AsyncEngine(build)
        try:
            asyncio.run(_answer(engine))
        finally:
            engine.close()
    return reduce(and_, steps)


def _trace(engine: Engine, steps: list[Calls]) -> None:
    """Append what is entered from the beginning of each traced step to that of the next one."""
    step, tracer, num_steps = engine.step, Tracer(), 0

    def traced() -> list[Output]:
        nonlocal tracer, num_steps
        tracer.stop()
        if tracer.calls:
            steps.append(tracer.calls)
        num_steps += 1
        if _FIRST_TRACED <= num_steps < _FIRST_TRACED + _NUM_TRACED:
            tracer = Tracer()
            tracer.start()
        return step()

    vars(engine)["step"] = traced


async def _answer(engine: AsyncEngine) -> None:
    params = SamplingParams(
        max_tokens=_FIRST_TRACED + _NUM_TRACED + 2, temperature=0, ignore_eos=True
    )
    prompt = [5 + index % 7 for index in range(_PROMPT)]
    stream = await engine.submit([Request("traced", prompt, params)])
    async for _ in stream:
        pass


def recorded_calls(kind: str = "qwen3") -> Calls:
    """Of `ModelRunner.build` on the Metal path, once steps of this shape are recorded."""
    model = host.Model.of(kind)
    with single_ops():
        return calls_of(model.decoding(1).ours, warm_up=TIMES_BEFORE + 2)


def calls_of(build: Callable[[], Any], warm_up: int) -> Calls:
    """Of one call of `build`, after `warm_up` others."""
    tracer = Tracer()
    for _ in range(warm_up):
        build()
    with tracer.on():
        build()
    return tracer.calls
