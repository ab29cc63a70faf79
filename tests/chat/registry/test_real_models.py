"""Real engines in the registry: what comes back from disk, and what is free when one has gone."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlxserve.api.config import ModelOptions, ServerConfig
from mlxserve.chat.registry.registry import ModelRegistry
from mlxserve.chat.text_model import TextModel
from mlxserve.cli.building import build_registry
from mlxserve.cli.settings import ModelSettings
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from tests.chat.registry.fakes import in_loop
from tests.recorded_limits import OWN_LIMIT, RecordedLimits

PROMPT = list(range(5, 205))
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def registry(
    write_model: Callable[..., Path], tmp_path: Path, unhurried_disk: None
) -> Iterator[ModelRegistry]:
    """Of two models, a and b, of which b is loaded on demand."""
    found = []
    for seed, name in enumerate("ab", 1):
        (tmp_path / name).mkdir()
        config = EngineConfig().with_options(
            model=str(write_model(tmp_path / name, "qwen3", seed=seed)),
            num_pages=64,
            page_size=16,
            disk_cache_size=0.1,
            disk_cache_dir=str(tmp_path / "pages"),
            disable_log_stats=True,
        )
        found.append(ModelSettings(config, ModelOptions(), is_named=name == "a"))
    registry, _ = build_registry(found, ServerConfig())
    yield registry
    registry.close()


async def answer(chat: TextModel) -> tuple[tuple[int, ...], int]:
    """(tokens, how many of the prompt's were cached)"""
    [output] = await (await chat.writer.submit(PROMPT, GREEDY)).whole()
    assert output.usage is not None
    return tuple(output.token_ids), output.usage.cached_tokens


def test_a_model_that_was_unloaded_comes_back_with_its_pages(registry: ModelRegistry) -> None:
    @in_loop
    async def go() -> None:
        async with registry.use("b") as chat:
            cold = await answer(chat)
        async with registry.use("a") as chat:
            other = await answer(chat)
        assert await registry.unload("b")
        assert registry.loaded("b") is None
        async with registry.use("b") as chat:
            warm = await answer(chat)
        assert (cold[1], other[1]) == (0, 0)
        assert warm[1] >= 176  # all whole pages but perhaps the last
        assert warm[0] == cold[0] != other[0]

    go()


def test_the_memory_of_a_model_is_known_as_soon_as_it_is_loaded(registry: ModelRegistry) -> None:
    chat = registry.loaded("a")
    assert chat is not None
    planned = chat.engine.stats().planned
    assert planned.weights > 0
    assert planned.pool == 64 * planned.page > 0
    assert registry.state("a").memory == planned.total
    assert registry.state("b").memory == 0


@pytest.mark.slow
def test_an_unloaded_model_leaves_no_arrays_also_where_its_objects_were_frozen(
    registry: ModelRegistry,
) -> None:
    import mlx.core as mx

    @in_loop
    async def go() -> None:
        gc.collect()  # what earlier tests left
        before = mx.get_active_memory()
        async with registry.use("b") as chat:
            await answer(chat)
        gc.freeze()
        try:
            assert mx.get_active_memory() > before + (1 << 20)
            del chat
            assert await registry.unload("b")
            assert mx.get_active_memory() <= before + (1 << 16)
        finally:
            gc.unfreeze()
            gc.collect()
            gc.freeze()  # as all tests have it

    go()


@pytest.mark.usefixtures("on_metal")
def test_what_stays_resident_on_a_mac_is_what_is_loaded(
    mlx_limits: RecordedLimits, registry: ModelRegistry
) -> None:
    @in_loop
    async def go() -> None:
        chat = registry.loaded("a")
        assert chat is not None
        first = chat.engine.stats().planned
        assert (mlx_limits.wired[-1], mlx_limits.freed[-1]) == (first.total, first.step)
        async with registry.use("b") as chat:
            await answer(chat)
            second = chat.engine.stats().planned
        assert second.weights > 0
        assert mlx_limits.wired[-1] == first.total + second.total
        assert mlx_limits.freed[-1] == first.step + second.step
        del chat
        assert await registry.unload("b")
        assert (mlx_limits.wired[-1], mlx_limits.freed[-1]) == (first.total, first.step)
        assert await registry.unload("a")
        assert (mlx_limits.wired[-1], mlx_limits.freed[-1]) == (0, OWN_LIMIT)

    go()
