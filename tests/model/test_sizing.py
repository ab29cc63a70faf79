"""The pool gets the memory that weights and a step leave."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from metal_kernels import select_backend
from mlxserve.config import EngineConfig
from mlxserve.errors import OutOfMemory
from mlxserve.model.load import LoadedModel, prepare
from mlxserve.model.sizing import fit_pages, settle

MIB = 1 << 20
PAGE_BYTES = 16 * 3 * 2 * (16 + 16) * 4  # slots * layers * kv heads * (key + value) * float32


@pytest.fixture(scope="module")
def loaded(build_model: Callable[..., tuple[nn.Module, dict[str, Any]]]) -> LoadedModel:
    return prepare(*build_model("llama"), "tiny")


def pages(loaded: LoadedModel, memory_limit: int, **changes: int) -> int:
    options = {
        "page_size": 16,
        "memory_limit": memory_limit,
        "max_num_batched_tokens": 64,
        "max_tokens": 10**9,
        **changes,
    }
    return fit_pages(loaded, select_backend("cpu"), **options)


def test_additional_memory_becomes_additional_pages(loaded: LoadedModel) -> None:
    few = pages(loaded, loaded.weight_size + 64 * MIB)
    assert pages(loaded, loaded.weight_size + 64 * MIB + 100 * PAGE_BYTES) - few == pytest.approx(
        100, abs=few * 0.05
    )


def test_weights_a_step_and_the_pool_fit_in_the_limit(loaded: LoadedModel) -> None:
    limit = loaded.weight_size + 64 * MIB
    found = pages(loaded, limit)
    assert found * PAGE_BYTES + loaded.weight_size <= limit
    assert found * PAGE_BYTES > 32 * MIB, "a step of this model needs far less than half"


def test_a_larger_step_leaves_fewer_pages(loaded: LoadedModel) -> None:
    limit = loaded.weight_size + 256 * MIB
    assert pages(loaded, limit, max_num_batched_tokens=4096) < pages(loaded, limit)


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


def test_measuring_frees_its_memory(loaded: LoadedModel) -> None:
    pages(loaded, loaded.weight_size + 64 * MIB)
    before = mx.get_active_memory()
    pages(loaded, loaded.weight_size + 64 * MIB)
    assert mx.get_active_memory() <= before


def test_more_pages_than_the_device_holds_are_refused_before_they_are_allocated(
    loaded: LoadedModel,
) -> None:
    """2,147,483,647 pages filled the machine's memory until the system killed the process."""
    config, backend = EngineConfig(num_pages=2**24), select_backend("cpu")
    options = {"device_memory": loaded.weight_size + 10 * MIB}
    with pytest.raises(OutOfMemory, match=r"^num_pages=16777216 needs .* GiB") as caught:
        settle(config, loaded, backend, 1 << 40, **options)
    found = re.search(r"at most (\d+) pages", str(caught.value))
    assert found
    most = EngineConfig(num_pages=int(found[1]))
    assert settle(most, loaded, backend, 1 << 40, **options).num_pages == most.num_pages
