"""What building an engine measures and limits, on a CPU and where mlx says that it is Metal."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxserve.build import build_engine
from mlxserve.core.config import EngineConfig
from mlxserve.core.sampling_params import SamplingParams
from mlxserve.engine.engine import Engine
from mlxserve.hub.files import find_model
from mlxserve.model import step_peak
from mlxserve.request import Request
from mlxserve.system import machine
from mlxserve.system.device_memory import DeviceMemory
from tests.recorded_limits import RecordedLimits

GIB = 1 << 30


@pytest.fixture
def as_on_metal(on_metal: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is built as for Metal, and computes on the CPU."""
    monkeypatch.setattr(machine, "memory", lambda: DeviceMemory(4 << 30, 2 << 30, is_metal=True))


@pytest.fixture(scope="module")
def build(
    tmp_path_factory: pytest.TempPathFactory, write_model: Callable[..., Path]
) -> Callable[..., Engine]:
    """A function (options) -> an engine with a small random model."""
    folder = write_model(tmp_path_factory.mktemp("model"), "llama", max_position_embeddings=1 << 17)

    def build_with(**options: Any) -> Engine:
        config = EngineConfig(attention_backend="cpu", itl_target_ms=0).with_options(
            **{"max_model_len": 1024, "max_num_seqs": 4, **options}
        )
        engine, _ = build_engine(config, find_model(str(folder), None))
        return engine

    return build_with


def num_steps(engine: Engine) -> int:
    """To compute a prompt of 512 tokens."""
    engine.add(Request("r", [5] * 512, SamplingParams(max_tokens=1)))
    for number in itertools.count(1):
        if engine.step():
            return number
    raise AssertionError


@pytest.fixture
def slow_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step that is measured seems to take hours."""
    clock = itertools.count(0, 10_000)
    monkeypatch.setattr(step_peak, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))


@pytest.mark.usefixtures("as_on_metal", "slow_clock")
def test_on_metal_a_step_is_limited_by_the_measured_speed_while_nothing_decodes(
    build: Callable[..., Engine],
) -> None:
    assert num_steps(build()) >= 512 // 32


@pytest.mark.usefixtures("on_a_cpu", "slow_clock")
def test_a_cpu_has_no_such_limit(build: Callable[..., Engine]) -> None:
    assert num_steps(build()) <= 3


@pytest.mark.usefixtures("as_on_metal")
@pytest.mark.parametrize("num_pages", [None, 64])
def test_on_metal_all_512_rows_are_measured_even_if_pages_are_asked_for(
    num_pages: int | None, build: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlxserve.sizing")
    build(num_pages=num_pages)
    assert "Step of 512 tokens" in caplog.text
    assert "measured with 512 tokens" in caplog.text


@pytest.mark.usefixtures("on_a_cpu")
def test_a_cpu_measures_nothing_where_pages_are_asked_for(
    build: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlxserve.sizing")
    build(num_pages=64)
    assert "measured" not in caplog.text
    build()
    assert "Step of 2048 tokens" in caplog.text
    assert "measured with 256 tokens" in caplog.text


@pytest.mark.usefixtures("as_on_metal")
def test_on_metal_a_model_stays_resident_and_mlx_keeps_freed_memory_for_one_step(
    build: Callable[..., Engine], mlx_limits: RecordedLimits
) -> None:
    engine = build(max_num_seqs=16)
    planned = engine.monitor.stats().planned
    assert planned.weights > 0
    assert planned.step > 0
    pool = engine.monitor.snapshot().memory.kv_cache
    assert mlx_limits.wired[-1] == planned.weights + planned.step + pool
    assert mlx_limits.freed[-1] == planned.step


@pytest.mark.slow
@pytest.mark.usefixtures("on_metal")
@pytest.mark.parametrize(
    ("mac", "usable"),
    [
        (DeviceMemory(8 * GIB, 5 * GIB), 4.5),
        (DeviceMemory(16 * GIB, 12 * GIB), 11),
        (DeviceMemory(16 * GIB, 14 * GIB), 13),
        (DeviceMemory(16 * GIB, 14 * GIB, taken=10 * GIB), 5.4),
    ],
    ids=["a tenth", "a GiB", "a raised limit", "a raised limit, wired by others"],
)
def test_on_a_mac_weights_a_step_and_the_cache_are_all_but_the_reserve(
    mac: DeviceMemory,
    usable: float,
    build: Callable[..., Engine],
    mlx_limits: RecordedLimits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "memory", lambda: replace(mac, is_metal=True))
    monkeypatch.setattr(machine, "working_set", lambda: mac.working_set)
    engine = build(max_num_seqs=64, max_model_len=None)
    planned, num_pages = engine.monitor.stats().planned, engine.monitor.stats().pool.num_pages
    left = int(usable * GIB) - planned.weights - planned.step - num_pages * planned.page
    assert 0 <= left < 2 * planned.page
    pool = engine.monitor.snapshot().memory.kv_cache
    assert mlx_limits.wired[-1] == planned.weights + planned.step + pool


@pytest.mark.usefixtures("as_on_metal")
def test_what_stays_resident_grows_with_the_cache(
    build: Callable[..., Engine], mlx_limits: RecordedLimits
) -> None:
    engine = build(max_num_seqs=16)
    before, pool = mlx_limits.wired[-1], engine.monitor.snapshot().memory.kv_cache
    requests = [
        Request(str(n), [n + 5] * 500, SamplingParams(max_tokens=400, ignore_eos=True))
        for n in range(8)
    ]
    engine.add_all(requests)
    while engine.monitor.snapshot().memory.kv_cache == pool:
        assert engine.has_work
        engine.step()
    grown = engine.monitor.snapshot().memory.kv_cache
    assert mlx_limits.wired[-1] - before == grown - pool > 0
    assert sorted(mlx_limits.wired) == mlx_limits.wired


@pytest.mark.usefixtures("as_on_metal")
def test_what_stays_resident_follows_a_resize(
    build: Callable[..., Engine], mlx_limits: RecordedLimits
) -> None:
    engine = build(num_pages=64)
    planned = engine.monitor.stats().planned
    for num_pages in (96, 40):
        engine.resize_cache(num_pages)
        pool = num_pages * planned.page
        assert mlx_limits.wired[-1] == planned.weights + planned.step + pool


@pytest.mark.usefixtures("as_on_metal")
def test_pages_of_windows_stay_resident_as_well(
    mlx_limits: RecordedLimits, model_folder: Callable[[str], Path]
) -> None:
    config = EngineConfig(attention_backend="cpu").with_options(num_pages=64, num_window_pages=32)
    engine, _ = build_engine(config, find_model(str(model_folder("gemma3_text")), None))
    planned, memory = engine.monitor.stats().planned, engine.monitor.snapshot().memory
    assert engine.monitor.stats().windows.num_pages > 0
    assert mlx_limits.wired[-1] == planned.weights + planned.step + memory.kv_cache


@pytest.mark.usefixtures("as_on_metal")
def test_a_model_that_could_not_be_loaded_to_the_end_counts_no_more(
    build: Callable[..., Engine], mlx_limits: RecordedLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("mlxserve.build.Scheduler", SimpleNamespace())
        with pytest.raises(TypeError, match="not callable"):
            build()
    assert len(mlx_limits.wired) > 1
    engine = build(num_pages=64)
    planned = engine.monitor.stats().planned
    assert mlx_limits.wired[-1] == planned.weights + planned.step + 64 * planned.page


@pytest.mark.usefixtures("as_on_metal")
@pytest.mark.parametrize("chosen", [0, 1.5])
def test_a_limit_that_was_chosen_is_the_one_that_mlx_gets(
    chosen: float, build: Callable[..., Engine], mlx_limits: RecordedLimits
) -> None:
    build(wired_limit=chosen)
    assert set(mlx_limits.wired) == {int(chosen * (1 << 30))}


@pytest.mark.usefixtures("on_a_cpu")
def test_a_cpu_has_no_limits_and_says_so_if_one_is_asked_for(
    build: Callable[..., Engine], mlx_limits: RecordedLimits, caplog: pytest.LogCaptureFixture
) -> None:
    build()
    assert "wired_limit" not in caplog.text
    build(wired_limit=1)
    assert "wired_limit has no effect" in caplog.text
    assert mlx_limits.wired == mlx_limits.freed == []


def cache_sizes(text: str) -> tuple[int, float, float]:
    """(pages, GiB of all of them, GiB at the start) of the line that an engine logs."""
    found = re.search(r"in (\d+) pages of \d+ \(([\d.]+) MiB, now ([\d.]+)\)", text)
    assert found
    return int(found[1]), float(found[2]), float(found[3])


@pytest.mark.parametrize(
    ("options", "starts_small"),
    [({"max_num_seqs": 16}, True), ({"max_num_seqs": 16, "num_pages": 400}, False)],
    ids=["as many as fit", "as many as were asked for"],
)
def test_on_metal_the_cache_starts_small_unless_its_pages_are_asked_for(
    options: dict[str, int],
    *,
    starts_small: bool,
    build: Callable[..., Engine],
    as_on_metal: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mlxserve.build")
    build(**options)
    num_pages, whole, now = cache_sizes(caplog.text)
    assert num_pages == (512 if starts_small else 400)
    assert now == pytest.approx(whole / 8 if starts_small else whole, abs=0.06)


@pytest.mark.usefixtures("on_a_cpu")
def test_on_a_cpu_the_cache_starts_with_two_full_steps_unless_its_pages_are_asked_for(
    build: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlxserve.build")
    build(max_num_seqs=16, max_num_batched_tokens=32, page_size=32)
    num_pages, whole, now = cache_sizes(caplog.text)
    assert now == pytest.approx(whole * 2 * (1 + 16) / num_pages, abs=0.06)
    caplog.clear()
    build(num_pages=400)
    _, whole, now = cache_sizes(caplog.text)
    assert now == whole
