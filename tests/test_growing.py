"""Answers do not change while the cache takes memory with need, and it takes no more than it needs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels.choice import select_backend
from metal_kernels.ops import Backend
from mlxserve.cache.kv import KVPool
from mlxserve.cache.pages import PagePool
from mlxserve.core.config import SchedulerConfig
from mlxserve.core.errors import OutOfMemory
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.engine.step_time_model import StepTimeModel
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.runner import ModelRunner
from mlxserve.request import Request
from mlxserve.scheduler.scheduler import Scheduler
from tests.emulated import emulated_backend

PAGE = 16
NUM_PAGES = 48
BACKENDS = pytest.mark.parametrize(
    "make_backend",
    [
        pytest.param(lambda: select_backend("cpu"), id="cpu"),
        pytest.param(emulated_backend, id="metal", marks=pytest.mark.slow),
    ],
)
BuildModel = Callable[..., tuple[nn.Module, dict[str, Any]]]
MakeBackend = Callable[[], Backend]


@pytest.fixture(scope="module")
def loaded(build_model: BuildModel) -> LoadedModel:
    return prepare(*build_model("qwen3", head_dim=64), "tiny")


def make_engine(
    loaded: LoadedModel, backend: Backend, first: int | None, num_pages: int = NUM_PAGES
) -> tuple[Engine, KVPool]:
    pool = PagePool(num_pages, PAGE, num_open=first)
    kv = KVPool(loaded.layers, num_pages, PAGE, backend, first)
    config = SchedulerConfig(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64)
    runner = ModelRunner(loaded, kv)
    return Engine(Scheduler(config, pool), runner, StepTimeModel(None)), kv


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(5, 200) for _ in range(length)]


def request(name: str, token_ids: list[int], max_tokens: int = 12, **options: Any) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return Request(name, token_ids, params, **options)


def finish(engine: Engine) -> dict[str, list[int]]:
    """Step until every request has ended; the tokens of each."""
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.check()
    return found


def load(engine: Engine) -> dict[str, list[int]]:
    """Prompts side by side, forks, hits and a prompt that overlaps with running answers."""
    for number in range(3):
        engine.add(request(f"a{number}", prompt(30 + 25 * number, number)))
    found = finish(engine)
    engine.add_all([request("b0", prompt(75, 9)), request("b1", prompt(75, 9), fork_of="b0")])
    engine.step()
    engine.add(request("c", prompt(30, 0) + prompt(100, 7)))
    found |= finish(engine)
    for number in range(6):
        engine.add(request(f"d{number}", prompt(60, 20 + number), max_tokens=20))
    return found | finish(engine)


@BACKENDS
def test_answers_are_those_of_a_whole_cache(make_backend: MakeBackend, loaded: LoadedModel) -> None:
    whole, _ = make_engine(loaded, make_backend(), None)
    wanted = load(whole)
    growing, kv = make_engine(loaded, make_backend(), 2)
    assert kv.num_backed == 2
    assert load(growing) == wanted
    assert kv.num_backed > 30
    stats, of_whole = growing.monitor.stats(), whole.monitor.stats()
    assert stats.scheduler == of_whole.scheduler, "what a page is found by and used for is the same"
    assert stats.pool.num_pages == NUM_PAGES


@BACKENDS
def test_a_growing_cache_grows_one_layer_between_two_steps(
    make_backend: MakeBackend, loaded: LoadedModel
) -> None:
    """Of all layers together answers would wait for a copy of the whole cache."""
    backend = make_backend()
    resized: list[int] = []
    real = backend.resize_pool

    def resize_pool(pool: mx.array, num_pages: int, page_size: int) -> mx.array:
        resized.append(num_pages)
        return real(pool, num_pages, page_size)

    backend.resize_pool = resize_pool
    engine, kv = make_engine(loaded, backend, 12, num_pages=18)
    engine.add(request("long", prompt(100, 2), max_tokens=120))
    per_step, sizes = [], set()
    while engine.has_work:
        engine.step()
        engine.check()
        per_step.append(len(resized))
        sizes.update(resized)
        resized.clear()
    assert sizes == {18}
    assert kv.num_backed == 18
    assert max(per_step) == 2, "keys and values of a layer"
    assert sum(per_step) == 2 * len(loaded.layers)


def test_memory_that_is_refused_ahead_is_asked_for_again_when_it_is_needed(
    loaded: LoadedModel,
) -> None:
    backend = select_backend("cpu")
    engine, kv = make_engine(loaded, backend, 12, num_pages=18)
    engine.add(request("long", prompt(100, 2), max_tokens=120))
    real, refused = backend.resize_pool, []

    def resize_pool(pool: mx.array, num_pages: int, page_size: int) -> mx.array:
        if len(refused) < 5:
            refused.append(num_pages)
            raise RuntimeError("[malloc] no memory")
        return real(pool, num_pages, page_size)

    backend.resize_pool = resize_pool
    assert len(finish(engine)["long"]) == 120
    assert refused
    assert kv.num_backed == 18


@BACKENDS
def test_a_fork_gets_memory_for_the_page_that_it_copies(
    make_backend: MakeBackend, loaded: LoadedModel
) -> None:
    def tokens(first: int | None) -> dict[str, list[int]]:
        engine, kv = make_engine(loaded, make_backend(), first)
        engine.add_all([request("b0", prompt(20, 9)), request("b1", prompt(20, 9), fork_of="b0")])
        found = finish(engine)
        assert engine.monitor.stats().scheduler.tail_copies == 1
        assert first is None or kv.num_backed > first
        return found

    assert tokens(2) == tokens(None)


def test_a_cache_has_memory_for_what_was_used_and_at_most_half_more(loaded: LoadedModel) -> None:
    engine, kv = make_engine(loaded, select_backend("cpu"), 4)
    engine.add(request("short", prompt(20, 1), max_tokens=4))
    finish(engine)
    assert (kv.num_backed, kv.nbytes) == (4, kv.nbytes_of(4))
    engine.add(request("long", prompt(100, 2), max_tokens=4))
    finish(engine)
    assert 8 <= kv.num_backed <= 13


def test_a_prompt_that_needs_the_whole_cache_is_promised_it(loaded: LoadedModel) -> None:
    engine, kv = make_engine(loaded, select_backend("cpu"), 2, num_pages=16)
    assert engine.max_model_len == 256
    engine.add(request("long", prompt(200, 3), max_tokens=56))
    assert len(finish(engine)["long"]) == 56
    assert kv.num_backed == 16


@BACKENDS
def test_a_resize_beside_running_answers_leaves_them_as_they_are(
    make_backend: MakeBackend, loaded: LoadedModel
) -> None:
    def tokens(first: int | None, sizes: tuple[int, ...]) -> dict[str, list[int]]:
        engine, kv = make_engine(loaded, make_backend(), first)
        for number in range(3):
            engine.add(request(f"a{number}", prompt(50, number), max_tokens=30))
        found: dict[str, list[int]] = {}
        for size in sizes:
            for _ in range(4):
                for output in engine.step():
                    found.setdefault(output.request_id, []).extend(output.token_ids)
            engine.resize_cache(size)
            engine.check()
            assert kv.num_pages == size
            assert kv.num_backed <= size
        for name, rest in finish(engine).items():
            found.setdefault(name, []).extend(rest)
        return found

    wanted = tokens(None, ())
    assert tokens(3, (60, 20, 16, 40, 18)) == wanted


def test_after_a_failure_the_cache_begins_small_again(loaded: LoadedModel) -> None:
    engine, kv = make_engine(loaded, select_backend("cpu"), 4)
    engine.add(request("a", prompt(200, 1)))
    wanted = finish(engine)["a"]
    assert kv.num_backed >= 13
    engine.restart()
    assert kv.num_backed == 4
    engine.add(request("a", prompt(200, 1)))
    assert finish(engine)["a"] == wanted


class Refusing:
    """A backend that gets no memory for more than `most` pages."""

    def __init__(self, most: int) -> None:
        self._backend = select_backend("cpu")
        self.most = most

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def resize_pool(self, pool: Any, num_pages: int, *rest: Any) -> Any:
        if num_pages > self.most:
            raise MemoryError("no more")
        return self._backend.resize_pool(pool, num_pages, *rest)


def test_memory_that_is_refused_while_growing_is_an_error_after_which_the_engine_recovers(
    loaded: LoadedModel,
) -> None:
    backend = Refusing(most=6)
    engine, kv = make_engine(loaded, backend, 4)
    engine.add(request("long", prompt(200, 1)))
    with pytest.raises(OutOfMemory, match="pages of the KV cache need"):
        finish(engine)
    engine.restart()
    engine.check()
    engine.add(request("short", prompt(40, 1), max_tokens=4))
    assert len(finish(engine)["short"]) == 4
    assert kv.num_backed <= 6
