from __future__ import annotations

import math
import re
from typing import Any

import pytest

from mlxserve.core.config import EngineConfig, PageTail, SchedulerConfig
from mlxserve.core.errors import InvalidConfig, MlxServeError
from mlxserve.core.kv_events import KvEventsConfig
from mlxserve.core.option import options_of


def test_the_defaults_are_valid_and_leave_open_what_the_model_decides() -> None:
    config = EngineConfig()
    assert (config.model, config.num_pages, config.scheduler.max_model_len) == (None, None, None)


def test_values_at_the_edge_of_their_range_are_accepted() -> None:
    for options in [
        {"page_size": 16},
        {"page_size": 64},
        {"num_pages": 2},
        {"gpu_memory_utilization": 1},
        {"gpu_memory_utilization": 0.01},
        {"log_stats_interval": 0.5},
        {"itl_target_ms": 0, "tool_keep_seconds": 0, "hot_after_hits": 1},
        {"disk_cache_size": 0.001, "disk_cache_dir": "~/pages"},
        {"disk_cache_size": 0, "disk_cache_daily_writes": 0.5},
        {"seed": 2**64 - 1},
        {"revision": "main", "model": "some-org/some-model"},
        {"attention_backend": "reference"},
        {"kv_cache_dtype": "q8"},
    ]:
        config = EngineConfig(**options)
        assert {name: getattr(config, name) for name in options} == options, options


def test_so_are_those_of_the_scheduler() -> None:
    for options in [
        {"max_num_seqs": 1, "max_num_batched_tokens": 1},
        {"max_num_seqs": 9, "max_num_batched_tokens": 9},
        {"max_model_len": 2},
        {"long_prefill_token_threshold": 0},
        {"max_pinned_fraction": 0},
        {"max_pinned_fraction": 1.0},
        {"max_overtakes": 0, "ageing_steps": 1, "max_num_waiting": 1},
        {"prefix_follow_pages": 1, "growth_pages": 0, "immune_after_preemptions": 1},
    ]:
        config = EngineConfig().with_options(**options)
        assert config.scheduler == SchedulerConfig(**options), options


def test_values_outside_it_are_refused() -> None:
    for name, values in [
        ("num_pages", [1, 0, -1]),
        ("page_size", [0, 8, 33, 128]),
        ("max_num_batched_tokens", [0, -5]),
        ("max_num_seqs", [0, -1]),
        ("max_model_len", [1, 0]),
        ("long_prefill_token_threshold", [-1]),
        ("max_num_waiting", [0]),
        ("seed", [-1]),
        ("gpu_memory_utilization", [1.01, 0, -0.1]),
        ("log_stats_interval", [0, -0.1, math.inf]),
        ("max_pinned_fraction", [1.01, -0.1]),
        ("itl_target_ms", [-0.1, math.nan]),
        ("ageing_steps", [0]),
        ("max_overtakes", [-1]),
        ("tool_keep_seconds", [-1]),
        ("prefix_follow_pages", [0]),
        ("growth_pages", [-1]),
        ("immune_after_preemptions", [0]),
        ("hot_after_hits", [0]),
        ("disk_cache_size", [-1]),
        ("disk_cache_daily_writes", [0, -1]),
        ("preemption_mode", ["SWAP", ""]),
        ("page_tail", ["Copy", ""]),
        ("budget_mode", ["pages", ""]),
        ("attention_backend", ["cuda", ""]),
        ("kv_cache_dtype", ["fp8", "Q8", ""]),
        ("disk_cache_dir", [""]),
        ("trace", [""]),
        ("model", [""]),
        ("revision", [""]),
    ]:
        for value in values:
            with pytest.raises(InvalidConfig, match=f"^{name} must be "):
                EngineConfig().with_options(**{name: value})


def test_a_huge_number_is_refused_with_the_range_that_is_allowed() -> None:
    for option in [each for each in options_of(EngineConfig) if each.kind in (int, float)]:
        for value in (99_999_999_999_999_999_999, 1e300 if option.kind is float else 10**40):
            with pytest.raises(InvalidConfig, match=rf"^{option.name} must be ") as caught:
                EngineConfig().with_options(**{option.name: value})
            highest = "one of" if option.choices else r"(to|at most) [0-9.]+, got "
            assert re.search(highest, str(caught.value)), option
            assert len(str(caught.value)) < 200, option


def test_a_mode_is_given_by_its_word() -> None:
    assert EngineConfig().with_options(page_tail="recompute").scheduler.page_tail is (
        PageTail.RECOMPUTE
    )


def test_more_requests_than_tokens_in_a_step_are_refused_with_both_numbers() -> None:
    with pytest.raises(InvalidConfig, match=r"max_num_batched_tokens \(8\).*max_num_seqs \(9\)"):
        EngineConfig().with_options(max_num_batched_tokens=8, max_num_seqs=9)


def test_without_chunked_prefill_a_budget_below_the_context_is_refused() -> None:
    with pytest.raises(
        InvalidConfig, match=r"max_num_batched_tokens \(2048\).*max_model_len \(4096\)"
    ):
        SchedulerConfig(max_model_len=4096, enable_chunked_prefill=False)


def test_options_that_only_hold_together_can_be_changed_together() -> None:
    config = EngineConfig().with_options(max_num_seqs=8, max_num_batched_tokens=8)
    changed = config.with_options(max_num_seqs=4000, max_num_batched_tokens=4000)
    assert changed.scheduler.max_num_seqs == 4000


def test_an_invalid_config_is_an_mlxserve_error_and_a_value_error() -> None:
    assert issubclass(InvalidConfig, MlxServeError)
    assert issubclass(InvalidConfig, ValueError)


def test_variables_of_the_chat_template_are_an_object() -> None:
    config = EngineConfig(chat_template_kwargs='{"preserve_thinking": true}')
    assert config.template_kwargs == {"preserve_thinking": True}
    assert EngineConfig().template_kwargs == {}
    for wrong in ("[1]", "preserve_thinking", '{"a":'):
        with pytest.raises(InvalidConfig, match="chat_template_kwargs must be a JSON object"):
            EngineConfig(chat_template_kwargs=wrong)


VLLM = '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:6000", "topic": "kv"}'


def test_kv_events_are_off_or_on_by_our_options_or_by_vllms() -> None:
    assert EngineConfig().kv_publisher is None
    ours = EngineConfig(kv_events="tcp://127.0.0.1:5557", kv_events_replay="ipc:///tmp/replay")
    assert ours.kv_publisher == KvEventsConfig("tcp://127.0.0.1:5557", "ipc:///tmp/replay")
    assert EngineConfig(kv_events_config=VLLM).kv_publisher == KvEventsConfig(
        "tcp://*:6000", topic="kv"
    )
    for off in ('{"enable_kv_cache_events": false}', VLLM.replace('"zmq"', '"null"')):
        assert EngineConfig(kv_events_config=off).kv_publisher is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_events": "127.0.0.1:5557"}, "an address is tcp://HOST:PORT"),
        ({"kv_events": "tcp://127.0.0.1"}, "an address is tcp://HOST:PORT"),
        ({"kv_events": "tcp://127.0.0.1:70000"}, "an address is tcp://HOST:PORT"),
        ({"kv_events": "ipc://"}, "an address is tcp://HOST:PORT"),
        ({"kv_events": "udp://127.0.0.1:5557"}, "an address is tcp://HOST:PORT"),
        ({"kv_events_replay": "tcp://*:5558"}, "Set kv_events as well"),
        (
            {"kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5557"},
            "need two addresses",
        ),
        ({"kv_events": "tcp://*:5557", "kv_events_config": VLLM}, "Give one of them"),
        ({"kv_events_replay": "tcp://*:5558", "kv_events_config": VLLM}, "its replay_endpoint"),
        ({"kv_events_config": "tcp://*:5557"}, "must be a JSON object"),
        ({"kv_events_config": "[]"}, "must be a JSON object"),
        ({"kv_events_config": "{}"}, "must be a JSON object"),
        ({"kv_events_config": '{"publisher": "kafka"}'}, '"zmq" or "null"'),
        ({"kv_events_config": '{"publisher": ["zmq"]}'}, '"zmq" or "null"'),
        ({"kv_events_config": '{"enable_kv_cache_events": 1}'}, "must be true or false"),
        ({"kv_events_config": '{"port": 1}'}, "has no field 'port'"),
        ({"kv_events_config": '{"hwm": 0}'}, "hwm must be an integer of at least 1"),
        ({"kv_events_config": '{"hwm": true}'}, "hwm must be an integer of at least 1"),
        ({"kv_events_config": '{"topic": 1}'}, "topic must be a text"),
        ({"kv_events_config": '{"endpoint": null}'}, "an address is tcp://HOST:PORT"),
        ({"kv_events": "tcp://*:5557", "enable_prefix_caching": False}, "Leave one of them out"),
    ],
)
def test_wrong_options_of_kv_events_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=re.escape(message)):
        EngineConfig().with_options(**options)
