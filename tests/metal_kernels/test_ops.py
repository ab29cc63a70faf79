"""Arguments that do not fit together are refused before anything is computed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from metal_kernels.choice import select_backend
from metal_kernels.ops import Attention
from metal_kernels.tables import SequenceTables

BACKEND = select_backend("auto")


def pools(**changes: Any) -> tuple[mx.array, mx.array]:
    """4 pages of 16 slots, 2 kv heads; keys have 8 dimensions, values 4."""
    keys = {"num_pages": 4, "kv_heads": 2, "page_size": 16, "head_dim": 8, "dtype": mx.float32}
    values = {**keys, "head_dim": 4, **changes}
    return BACKEND.new_pool(**keys), BACKEND.new_pool(**values)  # type: ignore[arg-type]


def tables(**changes: Any) -> SequenceTables:
    arguments: dict[str, Any] = {
        "page_tables": np.array([[0, 3]], np.int32),
        "context_lens": np.array([20], np.int32),
        "query_starts": np.array([0, 3], np.int32),
        "page_size": 16,
    }
    return SequenceTables(**{**arguments, **changes})


def write(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "keys": mx.zeros((3, 2, 8)),
        "values": mx.zeros((3, 2, 4)),
        "slots": np.array([0, 1, 63], np.int32),
    }
    arguments = {**arguments, **changes}
    BACKEND.write_kv(arguments["keys"], arguments["values"], *pools(), arguments["slots"])


def test_a_write_that_does_not_fit_is_refused() -> None:
    for changes, message in [
        ({"keys": mx.zeros((2, 2, 8))}, r"keys are \(2, 2, 8\); 3 slots"),
        ({"values": mx.zeros((4, 2, 4))}, r"values are \(4, 2, 4\); 3 slots"),
        ({"keys": mx.zeros((3, 1, 8))}, r"keys are \(3, 1, 8\)"),
        ({"values": mx.zeros((3, 1, 4))}, r"take \(3, 2, 4\)"),
        ({"keys": mx.zeros((3, 2, 4))}, r"take \(3, 2, 8\)"),
        ({"values": mx.zeros((3, 2, 1))}, r"take \(3, 2, 4\)"),
        ({"keys": mx.zeros((3, 16))}, r"keys are \(3, 16\)"),
        ({"keys": mx.zeros((3, 2, 8), mx.float16)}, "keys are mlx.core.float16, the pool is"),
        ({"values": mx.zeros((3, 2, 4), mx.bfloat16)}, "values are mlx.core.bfloat16"),
        ({"slots": np.array([0, 1, 64], np.int32)}, r"slots must be in 0\.\.63"),
        ({"slots": np.array([0, 1, -1], np.int32)}, r"slots must be in 0\.\.63"),
        ({"slots": np.array([0, 1, 2])}, "one row of int32"),
        ({"slots": np.array([[0, 1, 2]], np.int32)}, "one row of int32"),
    ]:
        write()
        with pytest.raises(ValueError, match=message):
            write(**changes)


def attend(**changes: Any) -> mx.array:
    arguments: dict[str, Any] = {
        "queries": mx.zeros((3, 4, 8)),
        "pools": pools(),
        "tables": tables(),
        "attention": Attention(1.0),
    }
    arguments = {**arguments, **changes}
    queries, (k_pool, v_pool) = arguments.pop("queries"), arguments.pop("pools")
    return BACKEND.paged_prefill(queries, k_pool, v_pool, **arguments)


def test_attention_that_does_not_fit_is_refused() -> None:
    for changes, message in [
        ({"queries": mx.zeros((2, 4, 8))}, "queries have 2 rows, the tables describe 3"),
        ({"queries": mx.zeros((3, 3, 8))}, "3 query heads do not divide into 2 kv heads"),
        ({"queries": mx.zeros((3, 4, 16))}, "head dimension 16, the pool's keys 8"),
        ({"queries": mx.zeros((3, 32))}, "queries must have 3 dimensions"),
        ({"queries": mx.zeros((3, 4, 8), mx.float16)}, "queries are mlx.core.float16"),
        ({"pools": pools(num_pages=5)}, "do not belong together"),
        ({"pools": pools(dtype=mx.float16)}, "do not belong together"),
        ({"tables": tables(page_tables=np.array([[0, 4]], np.int32))}, "page 4 of 16 slots"),
        ({"tables": tables(context_lens=np.array([33], np.int32), page_size=32)}, "has 64 slots"),
        ({"attention": Attention(1.0, window=0)}, "a window must be at least 1, got 0"),
        ({"attention": Attention(1.0, softcap=0.0)}, "a softcap must be above 0"),
        ({"attention": Attention(1.0, softcap=float("nan"))}, "a softcap must be above 0"),
        ({"sinks": mx.zeros(2)}, r"sinks must be \(4,\), got \(2,\)"),
    ]:
        assert attend().shape == (3, 4, 4), changes
        with pytest.raises(ValueError, match=message):
            attend(**changes)


def latent_pools(kv_heads: int = 1, rope_dim: int = 4) -> tuple[mx.array, mx.array]:
    return tuple(  # type: ignore[return-value]  # two of them
        BACKEND.new_pool(4, kv_heads, 16, dim, mx.float32) for dim in (8, rope_dim)
    )


def attend_latents(**changes: Any) -> mx.array:
    arguments: dict[str, Any] = {
        "q_latent": mx.zeros((3, 5, 8)),
        "q_rope": mx.zeros((3, 5, 4)),
        "pools": latent_pools(),
    }
    arguments = {**arguments, **changes}
    k_pool, v_pool = arguments["pools"]
    queries = arguments["q_latent"], arguments["q_rope"]
    return BACKEND.paged_latent(*queries, k_pool, v_pool, tables(), scale=1.0)


def test_attention_over_latents_that_do_not_fit_is_refused() -> None:
    for changes, message in [
        ({"q_latent": mx.zeros((2, 5, 8))}, "queries have 2 rows, the tables describe 3"),
        ({"q_latent": mx.zeros((3, 5, 16))}, "head dimension 16, the pool's keys 8"),
        ({"q_rope": mx.zeros((3, 5, 8))}, r"q_rope is \(3, 5, 8\) .* take \(3, 5, 4\)"),
        ({"q_rope": mx.zeros((3, 4, 4))}, r"q_rope is \(3, 4, 4\)"),
        ({"q_rope": mx.zeros((3, 5, 4), mx.float16)}, r"q_rope is .* of mlx.core.float16"),
        ({"pools": latent_pools(kv_heads=5)}, "1 kv head, the pool has 5"),
        ({"pools": latent_pools(rope_dim=2)}, r"take \(3, 5, 2\)"),
    ]:
        assert attend_latents().shape == (3, 5, 8), changes
        with pytest.raises(ValueError, match=message):
            attend_latents(**changes)


def test_copies_that_do_not_fit_are_refused() -> None:
    for sources, targets, message in [
        ([0, 1], [2], "2 sources and 1 targets"),
        ([0], [4], r"pages must be in 0\.\.3"),
        ([-1], [2], r"pages must be in 0\.\.3"),
        ([0, 1], [2, 2], "all different"),
        ([0, 1], [1, 2], "none of them a source"),
    ]:
        with pytest.raises(ValueError, match=message):
            BACKEND.copy_pages(
                *pools(), np.array(sources, np.int32), np.array(targets, np.int32), 16
            )


def test_copying_no_pages_changes_nothing() -> None:
    none = np.array([], np.int32)
    k_pool, v_pool = BACKEND.copy_pages(*pools(), none, none, 16)
    assert not k_pool.any()
    assert not v_pool.any()
