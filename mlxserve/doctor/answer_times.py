"""Arrival times of an engine's tokens: the first, after a pause, and while the cache grows.

Runs in a process of its own (`child.py`), so that its first load compiles every kernel and its
second one none.
"""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

from mlxserve.build import build_engine
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.doctor.model_speeds import Figures, prompt_ids
from mlxserve.engine.engine import Engine
from mlxserve.hub.files import find_model
from mlxserve.request import Request

PROMPT, ANSWER = 32, 48  # tokens
_IDLE_SECONDS = 3.0
_PAGE_SIZE = 32
_GROWTH = 16  # times the first pages


def times(model: str, idle: float = _IDLE_SECONDS) -> Figures:
    """Measure milliseconds and tokens a second; see `figures.py` for each figure.

    idle: seconds of the pause
    """
    files = find_model(model)
    num_pages = 4 + (PROMPT + ANSWER) // _PAGE_SIZE
    config = EngineConfig().with_options(
        model=model,
        num_pages=num_pages,
        page_size=_PAGE_SIZE,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    began = time.perf_counter()
    engine, _ = build_engine(config, files)
    load = time.perf_counter() - began
    try:
        figures = _measured(engine, num_pages, idle)
    finally:
        engine.close()
    began = time.perf_counter()
    engine, _ = build_engine(config, files)
    again = time.perf_counter() - began
    engine.close()
    return {**figures, "load": 1e3 * load, "compile": 1e3 * max(0.0, load - again)}


def _measured(engine: Engine, num_pages: int, idle: float) -> Figures:
    first = _answer(engine)
    before = _answer(engine)
    time.sleep(idle)
    woken = _answer(engine)
    growing = _answer(engine, grow_to=_GROWTH * num_pages)
    whole = _answer(engine)
    return {
        "first token": first[0],
        "fourth token": first[3],
        "usual token": statistics.median(before[1:]),
        "first token, warm": before[0],
        "first token after a pause": woken[0],
        "longest gap while the cache grows": max(growing[1:]),
        "decode, whole": 1e3 / statistics.median(whole[1:]),
    }


def _answer(engine: Engine, grow_to: int | None = None) -> list[float]:
    """Milliseconds to the first token, then between tokens.

    grow_to: pages that the cache grows to in the middle
    """
    params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    arrivals = [time.perf_counter()]
    engine.add(Request("times", prompt_ids(PROMPT), params))
    while engine.has_work:
        num_tokens = sum(len(output.token_ids) for output in engine.step())
        arrivals += [time.perf_counter()] * num_tokens
        if grow_to is not None and len(arrivals) > ANSWER // 2:
            engine.resize_cache(grow_to)
            grow_to = None
    return [1e3 * (later - earlier) for earlier, later in pairwise(arrivals)]
