"""Models may take the working set, less an absolute reserve and what other programs have wired."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import psutil
import pytest

from mlxserve.core.config import EngineConfig
from mlxserve.system import machine
from mlxserve.system.device_memory import DeviceMemory, MemoryLimit, beside_cache

GIB = 1 << 30
# (GiB of memory, GiB that macOS recommends for the GPU)
MACS = ((8, 5.33), (16, 10.67), (24, 16), (32, 21.33), (48, 36), (64, 48), (128, 107.5), (512, 384))


def mac(total: float, working_set: float, taken: float = 0) -> DeviceMemory:
    sizes = (int(size * GIB) for size in (total, working_set, taken))
    return DeviceMemory(*sizes, is_metal=True)


@pytest.mark.parametrize(("total", "working_set"), MACS, ids=str)
def test_the_reserve_is_a_tenth_and_at_most_a_gibibyte(total: float, working_set: float) -> None:
    memory = mac(total, working_set)
    assert memory.limit().nbytes == memory.working_set - min(memory.working_set // 10, GIB)


def test_a_share_that_the_user_chose_leaves_no_other_reserve() -> None:
    memory = mac(24, 16, taken=20)
    assert memory.limit(0.5) == MemoryLimit(8 * GIB, total=24 * GIB)
    assert memory.limit(1.0) == MemoryLimit(16 * GIB, total=24 * GIB)


def test_by_default_no_share_is_chosen() -> None:
    assert EngineConfig().gpu_memory_utilization is None


def test_what_other_programs_have_wired_is_theirs() -> None:
    """macOS has left them a part already, which is not subtracted again."""
    free = mac(24, 16).limit()
    assert mac(24, 16, taken=8).limit() == free
    assert mac(24, 16, taken=14).limit().nbytes == 9 * GIB
    assert mac(24, 16, taken=24).limit().nbytes == 0
    assert mac(24, 16, taken=30).limit().nbytes == 0


def test_a_raised_limit_of_the_gpu_is_followed_up_to_what_others_left() -> None:
    assert mac(64, 48, taken=4).limit().nbytes == 47 * GIB
    assert mac(64, 58, taken=4).limit().nbytes == 57 * GIB
    assert mac(64, 63, taken=4).limit().nbytes == 59 * GIB


def test_where_mlx_keeps_no_freed_arrays_only_half_a_step_is_planned() -> None:
    """This begins at 95 % of the working set, above which a GiB of reserve ends on large Macs."""
    assert [mac(*sizes).limit().unkept for sizes in MACS[:3]] == [0, 0, 0]
    large = mac(512, 384)
    limit, step = large.limit(), 4 * GIB
    stays = limit.nbytes - beside_cache(step, limit.unkept)
    assert stays == pytest.approx(0.95 * large.working_set - step / 2, abs=2)
    middle = mac(32, 21.33).limit()
    assert beside_cache(step, middle.unkept) == step, "below the mark a whole step is"


def test_a_cpu_keeps_freed_arrays_up_to_its_limit() -> None:
    assert DeviceMemory(1024 * GIB, 256 * GIB).limit() == MemoryLimit(255 * GIB, total=1024 * GIB)


@pytest.mark.parametrize(("total", "working_set"), MACS, ids=str)
def test_all_that_is_planned_is_nine_tenths_in_use_on_every_mac(
    total: float, working_set: float
) -> None:
    """So the watcher's marks mean half of the reserve and a fifth, as of a reserve of a tenth."""
    memory = mac(total, working_set)
    planned = memory.limit().nbytes
    assert memory.share(planned) == pytest.approx(0.9)
    assert memory.share(memory.working_set) == pytest.approx(1)
    assert memory.share(planned + memory.reserve // 2) == pytest.approx(0.95)
    assert memory.share(planned // 2) == pytest.approx(0.45)
    assert memory.share(0) == 0


def test_a_tenth_of_reserve_shows_the_share_as_it_is() -> None:
    memory = mac(8, 5.33)
    for used in (0, 1, 3, 4.9, 5.33, 6):
        share = memory.share(int(used * GIB))
        assert share == pytest.approx(used * GIB / memory.working_set, abs=1e-6)


def test_a_macs_wired_memory_is_read_once_before_models_are_loaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wired = iter([3 * GIB, 20 * GIB])
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(wired=next(wired)))
    machine.wired_at_start.cache_clear()
    try:
        assert [machine.wired_at_start() for _ in range(2)] == [3 * GIB] * 2
    finally:
        machine.wired_at_start.cache_clear()


@pytest.mark.usefixtures("on_metal")
def test_a_mac_plans_with_what_macos_recommends_and_others_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "total_memory", lambda: 24 * GIB)
    monkeypatch.setattr(machine, "working_set", lambda: 22 * GIB)
    monkeypatch.setattr(machine, "wired_at_start", lambda: 5 * GIB)
    assert machine.memory().limit().nbytes == 18 * GIB
    assert "22.0 GiB, 5.0 GiB wired by other programs: 18.0 GiB" in machine.facts()["memory"]
