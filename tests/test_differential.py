"""D1 to D3: cache, chunks and preemptions change no greedy token, on real arrays.

One pool and one runner per model; each configuration gets a new scheduler over them. The reference
is each prompt alone, without a cache, in one chunk. (D4, the scheduler against a slow one, is in
`scheduler/test_differential.py`; D5, the simulator's jumps, in `perf/simulation/test_simulator.py`; mlx-lm's
dense path in `test_equality.py`.)
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from metal_kernels.choice import select_backend
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import PageTail, SchedulerConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.engine.snapshot import Phase
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.hub.embedded import MODEL_NAME
from mlxserve.hub.files import find_model
from mlxserve.model.load import LoadedModel, load, prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Request
from mlxserve.scheduler.scheduler import Scheduler

PAGE = 16
NUM_PAGES = 64
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
_DRAW = random.Random(11)
SHARED = [_DRAW.randrange(500) for _ in range(70)]
# Of various lengths around a page; the last two are entirely cached once the others are computed.
PROMPTS = [SHARED[:length] + [7] * own for length, own in ((70, 3), (70, 30), (40, 9), (0, 50))]
PROMPTS += [SHARED[:64], SHARED[:32]]

Tokens = list[list[int]]


class PagedModel:
    """One pool of pages and its runner. The engines over it take turns: each starts with pages
    that contain other engines' tokens."""

    def __init__(self, loaded: LoadedModel) -> None:
        kv = KVPool(loaded.layers, NUM_PAGES, PAGE, select_backend("cpu"))
        self.runner = ModelRunner(loaded, kv)
        engine = self.engine(enable_prefix_caching=False)
        self.alone = [serve(engine, [prompt])[0] for prompt in PROMPTS]

    def engine(self, **options: Any) -> Engine:
        config = SchedulerConfig(
            max_model_len=512,
            **{"max_num_batched_tokens": 2048, "max_num_seqs": 8, **options},
        )
        return Engine(
            Scheduler(config, PagePool(NUM_PAGES, PAGE)), self.runner, StepTimeModel(None)
        )


def serve(
    engine: Engine, prompts: Sequence[list[int]], disturb: Callable[[], bool] = lambda: False
) -> Tokens:
    """The answers. When `disturb` returns True, every request loses its pages before the step."""
    requests = engine.add_all([Request(str(n), list(ids), GREEDY) for n, ids in enumerate(prompts)])
    while engine.has_work:
        if disturb():
            assert engine.reset_prefix_cache(force=True)
        engine.step()
        engine.check()
    return [list(request.token_ids[request.num_prompt :]) for request in requests]


@pytest.fixture(scope="module", params=[MODEL_NAME, "llama", "gpt_oss"])
def model(request: pytest.FixtureRequest, build_model: Callable[..., Any]) -> PagedModel:
    if request.param != MODEL_NAME:
        model, config = build_model(request.param)
        return PagedModel(prepare(model, config, request.param))
    return PagedModel(load(find_model(None, None), is_metal=False, memory_limit=1 << 34))


@pytest.mark.parametrize("tail", PageTail)
def test_d1_with_and_without_the_cache(model: PagedModel, tail: PageTail) -> None:
    engine = model.engine(page_tail=tail)
    assert serve(engine, PROMPTS) == model.alone  # some share pages that others compute
    before = engine.monitor.stats().scheduler.prefix_hits
    assert serve(engine, PROMPTS) == model.alone
    # All full pages except for each last token; without copies, except for that token's page.
    found = sum((len(ids) - 1) // PAGE * PAGE for ids in PROMPTS)
    found += 2 * (PAGE - 1) if tail is PageTail.COPY else 0
    assert engine.monitor.stats().scheduler.prefix_hits - before == found


@pytest.mark.parametrize(("size", "is_aligned"), [(PAGE, True), (PAGE + 8, True), (37, False)])
def test_d2_in_chunks_of_any_size(model: PagedModel, size: int, is_aligned: bool) -> None:
    engine = model.engine(
        max_num_batched_tokens=size,
        max_num_seqs=min(size, 8),
        page_aligned_scheduling=is_aligned,
        long_prefill_token_threshold=0,
    )
    assert serve(engine, PROMPTS) == model.alone
    assert engine.monitor.stats().engine.num_steps > sum(map(len, PROMPTS[:4])) // size // 2


@pytest.mark.parametrize("seed", [1, 2])
def test_d3_preempted_at_random_steps(model: PagedModel, seed: int) -> None:
    draw = random.Random(seed)
    # One chunk per step, so that there are enough steps to interrupt.
    engine = model.engine(max_num_batched_tokens=64, long_prefill_token_threshold=32)
    losers: list[int] = []

    def disturb() -> bool:
        requests = engine.monitor.snapshot().requests
        if is_now := len(losers) < 6 and draw.random() < 0.4:
            losers.append(sum(request.phase is not Phase.QUEUED for request in requests))
        return is_now

    assert serve(engine, PROMPTS, disturb) == model.alone
    assert sum(losers) >= 4
