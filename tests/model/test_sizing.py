"""The pool gets the memory that weights and a step leave."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlxserve.cache.groups import Window
from mlxserve.core.config import EngineConfig
from mlxserve.core.errors import InvalidConfig, OutOfMemory
from mlxserve.hub.context import Context
from mlxserve.model.caches import StateLeaf
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.packed_states import StateSpec
from mlxserve.model.sizing import (
    default_step_budget,
    first_pages,
    fit_pages,
    pool_memory,
    shares_states,
    with_sizes,
)
from mlxserve.model.step_peak import StepPeak
from mlxserve.model.window_group import WindowGroup
from tests.model.test_step_peak import measured

MIB = 1 << 20
PAGE_BYTES = 16 * 3 * 2 * (64 + 64) * 4  # slots * layers * kv heads * (key + value) * float32


@pytest.fixture(scope="module")
def loaded(build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]) -> LoadedModel:
    return prepare(*build_model("llama"), "tiny")


def pages(
    loaded: LoadedModel, memory_limit: int, *, rows: int = 64, max_tokens: int = 10**9
) -> int:
    step = measured(loaded, rows)
    return fit_pages(loaded, step, page_size=16, memory_limit=memory_limit, max_tokens=max_tokens)


def test_additional_memory_becomes_additional_pages(loaded: LoadedModel) -> None:
    few = pages(loaded, loaded.weight_size + 64 * MIB)
    many = pages(loaded, loaded.weight_size + 64 * MIB + 100 * PAGE_BYTES)
    assert many - few == pytest.approx(100, abs=few * 0.05)


def test_in_8_bits_the_same_memory_has_more_pages(loaded: LoadedModel) -> None:
    """Here 3.8 times as many: 68 bytes instead of 256 for each row of 64 numbers in float32."""
    limit = loaded.weight_size + 64 * MIB
    step = StepPeak(planned=0, measured=0, num_rows=64, num_measured=64, seconds=1)
    few, many = (
        fit_pages(model, step, page_size=16, memory_limit=limit, max_tokens=10**9)
        for model in (loaded, loaded.in_8_bits())
    )
    assert many / few == pytest.approx(256 / 68, rel=2e-3)


def test_weights_a_step_and_the_pool_fit_in_the_limit(loaded: LoadedModel) -> None:
    limit = loaded.weight_size + 64 * MIB
    found = pages(loaded, limit)
    assert found * PAGE_BYTES + loaded.weight_size <= limit
    assert found * PAGE_BYTES > 32 * MIB, "a step of this model needs far less than half"


def test_kinds_share_what_weights_and_a_step_leave(loaded: LoadedModel) -> None:
    """A step leaves less if MLX keeps no freed arrays in part of the limit."""
    step = replace(measured(loaded, 64), unkept=64 * MIB)
    assert step.beside_cache > step.planned
    limit = loaded.weight_size + step.beside_cache + 8 * MIB
    group = WindowGroup(Window(64, 16), PAGE_BYTES, PAGE_BYTES, is_shared=True)
    config = EngineConfig().with_options(page_size=16, num_pages=10_000, num_window_pages=100)
    memory = pool_memory(config, loaded, step, limit, group)
    assert memory is not None
    assert memory.nbytes == 8 * MIB


def test_states_and_pages_share_what_weights_and_a_step_leave(loaded: LoadedModel) -> None:
    """At most all but the states of one request are pages, and all but two pages are states."""
    caches = loaded.caches
    spec = StateSpec((((MIB // 4,), mx.float32),))
    nodes = (*caches.nodes, StateLeaf(0))
    hybrid = replace(loaded, caches=replace(caches, nodes=nodes, states=(spec,)))
    config, step = EngineConfig(page_size=16), measured(loaded, 64)
    limit = loaded.weight_size + step.beside_cache + 16 * MIB
    sizes = with_sizes(config, hybrid, step, limit)
    assert sizes.num_pages == 14 * MIB // PAGE_BYTES
    assert sizes.num_state_slots == 15
    assert sizes.scheduler.max_num_seqs == 7, "each takes two"
    assert shares_states(config, hybrid)
    memory = pool_memory(sizes, hybrid, step, limit, None, has_shared_states=True)
    assert memory is not None
    assert memory.nbytes == 16 * MIB
    assert dict(memory.page_bytes) == {"pages": PAGE_BYTES, "states": MIB}
    for chosen in ({"num_pages": 16}, {"num_state_slots": 8}):
        assert not shares_states(config.with_options(**chosen), hybrid)
    divided = with_sizes(config.with_options(num_state_slots=8), hybrid, step, limit)
    assert divided.num_pages == 8 * MIB // PAGE_BYTES


def test_a_tower_and_its_step_take_memory_from_the_pages(loaded: LoadedModel) -> None:
    vision: Any = SimpleNamespace(
        nbytes=8 * MIB,
        planned_nbytes=lambda num_rows: num_rows * MIB // 16,
        is_told_positions=False,
        bidirectional=None,
    )
    seeing, limit = loaded.that_sees(vision), loaded.weight_size + 64 * MIB
    step = measured(seeing, 64)
    without = replace(step, planned=step.measured * step.num_rows // step.num_measured)
    assert step.planned == without.planned + 4 * MIB
    few, many = (
        fit_pages(model, peak, page_size=16, memory_limit=limit, max_tokens=10**9)
        for model, peak in ((seeing, step), (loaded, without))
    )
    assert (many - few) * PAGE_BYTES == pytest.approx(12 * MIB, abs=2 * PAGE_BYTES)


def test_a_larger_step_leaves_fewer_pages(loaded: LoadedModel) -> None:
    limit = loaded.weight_size + 256 * MIB
    assert pages(loaded, limit, rows=4096) < pages(loaded, limit)


def test_the_pool_is_capped_at_what_all_contexts_need(loaded: LoadedModel) -> None:
    limit = loaded.weight_size + 64 * MIB
    assert pages(loaded, limit, max_tokens=160) == 10
    assert pages(loaded, limit, max_tokens=161) == 11


def test_the_shortest_context_gets_two_pages(loaded: LoadedModel) -> None:
    assert pages(loaded, loaded.weight_size + 64 * MIB, max_tokens=3) == 2


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_too_little_memory_for_a_cache_is_refused_with_advice(
    share: float, loaded: LoadedModel
) -> None:
    with pytest.raises(OutOfMemory) as caught:
        pages(loaded, int(loaded.weight_size * share))
    assert str(caught.value).startswith("tiny: the weights and a step of 64 tokens leave no")
    assert "Raise gpu_memory_utilization" in str(caught.value)


def test_a_context_may_be_as_long_as_the_rotary_scaling_covers(loaded: LoadedModel) -> None:
    scaled = replace(loaded, context=Context(512, 2048))
    for asked, settled in ((None, 512), (600, 600), (2048, 2048)):
        config = EngineConfig().with_options(num_pages=100, page_size=32, max_model_len=asked)
        assert with_sizes(config, scaled, None, 1 << 30).scheduler.max_model_len == settled
    config = EngineConfig().with_options(num_pages=100, page_size=32, max_model_len=2049)
    with pytest.raises(InvalidConfig, match="tiny was made for 2048 tokens; lower it"):
        with_sizes(config, scaled, None, 1 << 30)


def test_a_context_for_which_there_is_no_memory_is_known_from_one_for_which_no_pages_were_asked(
    loaded: LoadedModel,
) -> None:
    words = "max_model_len=512 needs 16 pages of 32 tokens, and the cache has {}. .* raise {}"
    config = EngineConfig().with_options(page_size=32, max_model_len=512, max_num_batched_tokens=64)
    config = config.with_options(max_num_seqs=2)
    step = measured(loaded, 64)
    page = 32 * sum(spec.bytes_per_token() for spec in loaded.layers)
    limit = loaded.weight_size + step.planned + 15 * page
    with pytest.raises(OutOfMemory, match=words.format(15, "gpu_memory_utilization")):
        with_sizes(config, loaded, step, limit)
    assert with_sizes(config, loaded, step, limit + page).num_pages == 16
    with pytest.raises(InvalidConfig, match=words.format(15, "num_pages")):
        with_sizes(config.with_options(num_pages=15), loaded, step, limit + page)


def test_measuring_frees_its_memory(loaded: LoadedModel) -> None:
    pages(loaded, loaded.weight_size + 64 * MIB)
    before = mx.get_active_memory()
    pages(loaded, loaded.weight_size + 64 * MIB)
    assert mx.get_active_memory() <= before


def test_more_pages_than_the_device_holds_are_refused_before_they_are_allocated(
    loaded: LoadedModel,
) -> None:
    """2,147,483,647 pages filled the machine's memory until the system killed the process."""
    config = EngineConfig(num_pages=2**24)
    options = {"device_memory": loaded.weight_size + 10 * MIB}
    with pytest.raises(OutOfMemory, match=r"^num_pages=16777216 needs .* GiB") as caught:
        with_sizes(config, loaded, None, 1 << 40, **options)
    found = re.search(r"at most (\d+) pages", str(caught.value))
    assert found
    most = EngineConfig(num_pages=int(found[1]))
    assert with_sizes(most, loaded, None, 1 << 40, **options).num_pages == most.num_pages


# ---- on Metal


def test_a_step_on_metal_is_shorter_by_default_and_as_long_as_it_must_be() -> None:
    def budget(*, is_metal: bool, **options: Any) -> int | None:
        config = EngineConfig().with_options(**options)
        return default_step_budget(config, is_metal=is_metal).scheduler.max_num_batched_tokens

    assert budget(is_metal=True) == 512
    assert budget(is_metal=False) == 2048
    assert budget(is_metal=True, max_num_seqs=700) == 700
    assert budget(is_metal=True, enable_chunked_prefill=False, max_model_len=2048) == 2048


@pytest.mark.parametrize("is_metal", [False, True])
def test_a_chosen_number_of_tokens_per_step_is_kept(*, is_metal: bool) -> None:
    config = EngineConfig().with_options(max_num_batched_tokens=1024)
    assert default_step_budget(config, is_metal=is_metal) == config


def test_a_growing_cache_starts_with_an_eighth_or_two_full_steps() -> None:
    def first(num_pages: int, *, is_metal: bool = True, **options: int) -> int:
        config = EngineConfig(num_pages=num_pages).with_options(**options)
        return first_pages(
            default_step_budget(config, is_metal=is_metal), num_pages, is_metal=is_metal
        )

    assert first(16_000) == 2000
    assert first(800) == 2 * (512 // 32 + 64)
    assert first(100) == 100
    assert first(16_000, is_metal=False) == 2 * (2048 // 32 + 64)
    assert first(1600, page_size=64, max_num_batched_tokens=2048) == 200
