from __future__ import annotations

import math
from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest

from mlxserve.config import ATTENTION_BACKENDS, PAGE_SIZES, EngineConfig, EngineOptions
from mlxserve.errors import InvalidConfig, MlxServeError


def test_the_defaults_are_valid_and_leave_the_models_part_open() -> None:
    config = EngineConfig()
    assert (config.model, config.num_pages, config.max_model_len) == (None, None, None)


@pytest.mark.parametrize(
    "options",
    [
        *({"page_size": size} for size in PAGE_SIZES),
        *({"attention_backend": name} for name in ATTENTION_BACKENDS),
        {"num_pages": 2},
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 9, "max_num_batched_tokens": 9},
        {"max_model_len": 2},
        {"gpu_memory_utilization": 1},
        {"gpu_memory_utilization": 0.01},
        {"long_prefill_token_threshold": 0},
        {"log_stats_interval": 0.5},
        {"max_pinned_fraction": 0},
        {"max_pinned_fraction": 1.0},
        {"itl_target_ms": 0},
        {"page_tail": "recompute", "budget_mode": "unaligned"},
        {"max_overtakes": 0, "ageing_steps": 1, "tool_keep_seconds": 0},
        {"prefix_follow_pages": 1, "growth_pages": 0},
        {"immune_after_preemptions": 1, "hot_after_hits": 1},
        {"preemption_mode": "swap", "swap_space": 0.001, "swap_dir": "~/swap"},
        {"seed": 2**64},
        {"revision": "main", "model": "some-org/some-model"},
    ],
    ids=str,
)
def test_values_at_the_edge_of_their_range_are_taken(options: dict[str, Any]) -> None:
    config = EngineConfig(**options)
    assert {name: getattr(config, name) for name in options} == options


def bad_values() -> list[tuple[str, object]]:
    wholes: dict[str, list[Any]] = {
        "num_pages": [1, 0, -1],
        "page_size": [0, 8, 33, 128, None],
        "max_num_batched_tokens": [0, -5, None],
        "max_num_seqs": [0, -1, None],
        "max_model_len": [1, 0],
        "long_prefill_token_threshold": [-1],
        "max_num_waiting": [0],
        "seed": [-1],
    }
    numbers: dict[str, list[Any]] = {"gpu_memory_utilization": [1.01], "log_stats_interval": []}
    found: list[tuple[str, object]] = []
    for name, values in wholes.items():
        for value in [*values, 16.0, "32", True, [32], math.nan]:
            found.append((name, value))  # noqa: PERF401
    for name, values in numbers.items():
        for value in [*values, 0, -0.1, "0.9", None, True, math.nan, math.inf]:
            found.append((name, value))  # noqa: PERF401
    for name in ("max_pinned_fraction", "itl_target_ms"):
        for value in (-0.1, "0.9", None, True, math.nan, math.inf):
            found.append((name, value))  # noqa: PERF401
    found.append(("max_pinned_fraction", 1.01))
    for name in (
        "enable_prefix_caching",
        "enable_chunked_prefill",
        "page_aligned_scheduling",
        "disable_log_stats",
    ):
        found += [(name, value) for value in (None, 0, 1, "yes")]
    found += [("preemption_mode", value) for value in ("SWAP", "", None, 3)]
    found += [("ageing_steps", 0), ("max_overtakes", -1), ("tool_keep_seconds", -1)]
    found += [("prefix_follow_pages", 0), ("growth_pages", -1)]
    found += [("immune_after_preemptions", 0), ("hot_after_hits", 0), ("hot_after_hits", 1.5)]
    found += [("page_tail", value) for value in ("Copy", "", None, True)]
    found += [("budget_mode", value) for value in ("pages", "", None, False)]
    found += [("swap_space", value) for value in (0, -1, "4", None, True, math.nan, math.inf)]
    found += [(name, value) for name in ("swap_dir", "trace") for value in ("", 3)]
    found += [("attention_backend", value) for value in ("cuda", "", None, 3)]
    found += [(name, value) for name in ("model", "revision") for value in ("", 3, ["a"])]
    return found


@pytest.mark.parametrize(("name", "value"), bad_values(), ids=lambda part: repr(part)[:24])
def test_a_bad_value_is_refused_with_its_name_and_itself(name: str, value: object) -> None:
    with pytest.raises(InvalidConfig) as caught:
        EngineConfig(**{name: value})  # type: ignore[arg-type]
    assert str(caught.value).startswith(name)
    assert repr(value) in str(caught.value)


def test_more_sequences_than_tokens_in_a_step_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidConfig, match=r"max_num_batched_tokens \(8\).*max_num_seqs \(9\)"):
        EngineConfig(max_num_batched_tokens=8, max_num_seqs=9)


def test_an_invalid_config_is_one_of_our_errors_and_a_value_error() -> None:
    assert issubclass(InvalidConfig, MlxServeError)
    assert issubclass(InvalidConfig, ValueError)


def test_a_config_is_frozen() -> None:
    config = EngineConfig()
    with pytest.raises(FrozenInstanceError):
        config.page_size = 64  # type: ignore[misc]


def test_the_librarys_options_are_the_configs_fields() -> None:
    names = {field.name for field in fields(EngineConfig)} - {"model"}
    assert set(EngineOptions.__annotations__) == names
    types = {field.name: field.type for field in fields(EngineConfig)}
    for name, annotation in EngineOptions.__annotations__.items():
        assert annotation.__forward_arg__ == types[name]
