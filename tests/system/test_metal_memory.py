"""MetalMemory: mlx's limits are the sums over the loaded models, within the working set."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable

import pytest

from mlxserve.core.errors import InvalidConfig
from mlxserve.system import machine, metal_memory
from mlxserve.system.metal_memory import MetalLimits, MetalMemory, ModelShare
from tests.recorded_limits import OWN_LIMIT, RecordedLimits

WORKING_SET = 1 << 40


class GrowingPool:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.on_resized: Callable[[int], None] = lambda _: None

    def resize(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.on_resized(nbytes)


@pytest.fixture
def memory(mlx_limits: RecordedLimits, monkeypatch: pytest.MonkeyPatch) -> MetalMemory:
    monkeypatch.setattr(machine, "working_set", lambda: WORKING_SET)
    monkeypatch.setattr(machine, "total_memory", lambda: 2 * WORKING_SET)
    return metal_memory.METAL_MEMORY


def load(
    memory: MetalMemory, fixed: int, step: int, pool: int, wired_limit: float | None = None
) -> GrowingPool:
    """A model, which lives as long as its pool."""
    loaded = GrowingPool(pool)
    memory.add(fixed, step, wired_limit).follow(loaded)
    return loaded


def test_weights_a_step_and_the_pool_are_wired_and_a_step_of_freed_memory_is_kept(
    memory: MetalMemory, mlx_limits: RecordedLimits
) -> None:
    pool = load(memory, fixed=1000, step=20, pool=300)
    assert (mlx_limits.wired[-1], mlx_limits.freed[-1]) == (1320, 20)
    assert memory.limits == MetalLimits(wired=1320, freed=20)
    assert pool.nbytes == 300


def test_the_limits_of_several_models_are_their_sums(
    memory: MetalMemory, mlx_limits: RecordedLimits
) -> None:
    pools = [load(memory, fixed=1000, step=20, pool=300), load(memory, fixed=50, step=3, pool=7)]
    assert (mlx_limits.wired[-1], mlx_limits.freed[-1]) == (1320 + 60, 23)
    pools[0].resize(400)
    assert mlx_limits.wired[-1] == 1420 + 60
    pools[1].resize(1)
    assert mlx_limits.wired[-1] == 1420 + 54


def test_every_pool_of_a_model_counts(memory: MetalMemory, mlx_limits: RecordedLimits) -> None:
    full, windows = GrowingPool(300), GrowingPool(40)
    memory.add(1000, 20).follow(full, windows)
    assert mlx_limits.wired[-1] == 1360
    windows.resize(50)
    full.resize(200)
    assert mlx_limits.wired[-1] == 1270


@pytest.mark.parametrize("first", [0, 1])
def test_a_model_that_is_unloaded_gives_its_part_back(
    first: int, memory: MetalMemory, mlx_limits: RecordedLimits
) -> None:
    pools = [load(memory, fixed=1000, step=20, pool=300), load(memory, fixed=50, step=3, pool=7)]
    del pools[first]
    assert mlx_limits.wired[-1] == 1380, "its arrays may not be free yet"
    memory.apply()
    assert (mlx_limits.wired[-1], mlx_limits.freed[-1]) == [(60, 3), (1320, 20)][first]
    del pools[0]
    memory.apply()
    assert (mlx_limits.wired[-1], mlx_limits.freed[-1]) == (0, OWN_LIMIT)
    assert memory.limits is None


def test_limits_of_a_model_that_is_loaded_after_the_last_one_was_unloaded_end_as_before(
    memory: MetalMemory, mlx_limits: RecordedLimits
) -> None:
    for size in (1000, 2000):
        pool = load(memory, fixed=size, step=20, pool=300)
        assert mlx_limits.wired[-1] == size + 320
        del pool
        memory.apply()
        assert (mlx_limits.wired[-1], mlx_limits.freed[-1]) == (0, OWN_LIMIT)


def test_no_more_than_the_working_set_is_wired(
    memory: MetalMemory, mlx_limits: RecordedLimits
) -> None:
    pool = load(memory, fixed=WORKING_SET // 2, step=20, pool=300)
    other = load(memory, fixed=WORKING_SET // 2, step=20, pool=300)
    assert mlx_limits.wired[-1] == WORKING_SET
    pool.resize(WORKING_SET)
    assert max(mlx_limits.wired) == WORKING_SET
    assert mlx_limits.freed[-1] == 40
    assert other.nbytes == 300


def test_memory_that_other_programs_have_wired_is_not_wired_again(
    memory: MetalMemory, mlx_limits: RecordedLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user has chosen a limit: macOS ends itself where all memory is wired."""
    monkeypatch.setattr(machine, "wired_at_start", lambda: WORKING_SET + WORKING_SET // 4)
    pool = load(memory, fixed=WORKING_SET // 2, step=20, pool=WORKING_SET // 2)
    assert mlx_limits.wired[-1] == WORKING_SET * 3 // 4
    chosen = load(memory, 1000, 20, 300, WORKING_SET / (1 << 30))
    assert mlx_limits.wired[-1] == WORKING_SET
    assert pool.nbytes > chosen.nbytes


@pytest.mark.parametrize(
    ("chosen", "wired"),
    [
        ((2.0, None), 2 << 30),
        ((None, 2.0), 2 << 30),
        ((2.0, 2.0), 2 << 30),
        ((0.5, 2.0), 2 << 30),
        ((0, None), 0),
        ((0, 0), 0),
    ],
    ids=str,
)
def test_a_chosen_limit_is_that_of_all_models_together(
    chosen: tuple[float | None, float | None],
    wired: int,
    memory: MetalMemory,
    mlx_limits: RecordedLimits,
) -> None:
    pools = [load(memory, 1000, 20, 300, limit) for limit in chosen]
    assert mlx_limits.wired[-1] == wired
    pools[0].resize(500)
    assert mlx_limits.wired[-1] == wired
    assert mlx_limits.freed[-1] == 40


def test_a_limit_beyond_what_macos_allows_is_refused_and_changes_nothing(
    memory: MetalMemory, mlx_limits: RecordedLimits
) -> None:
    most = WORKING_SET / (1 << 30)
    pool = load(memory, fixed=1000, step=20, pool=300)
    limits = memory.limits
    with pytest.raises(InvalidConfig, match=r"wired_limit=1024\.5 GiB, but macOS.*1024\.0 GiB"):
        load(memory, 1000, 20, 300, most + 0.5)
    memory.apply()
    assert memory.limits == limits
    assert pool.nbytes == 300
    assert load(memory, 1000, 20, 300, most).nbytes == 300


def test_mlx_is_not_given_the_limits_that_it_has(
    memory: MetalMemory, mlx_limits: RecordedLimits
) -> None:
    pool = load(memory, fixed=1000, step=20, pool=300)
    num_before = len(mlx_limits.wired)
    pool.resize(300)
    memory.apply()
    assert len(mlx_limits.wired) == num_before


def test_without_a_model_mlx_keeps_its_own_limits(
    memory: MetalMemory, mlx_limits: RecordedLimits
) -> None:
    memory.apply()
    assert mlx_limits.wired == mlx_limits.freed == []


def test_a_share_does_not_keep_its_pool(memory: MetalMemory) -> None:
    pool: GrowingPool | None = GrowingPool(300)
    share: ModelShare | None = memory.add(1000, 20)
    assert share is not None
    assert pool is not None
    share.follow(pool)
    ends = [weakref.ref(pool), weakref.ref(share)]
    gc.disable()
    try:
        pool = share = None
        assert [end() for end in ends] == [None, None]
    finally:
        gc.enable()


def test_pools_of_several_threads_are_added_up(
    memory: MetalMemory, mlx_limits: RecordedLimits
) -> None:
    pools = [load(memory, fixed=1000, step=20, pool=0) for _ in range(4)]

    def grow(pool: GrowingPool) -> None:
        for size in range(1, 501):
            pool.resize(size)

    threads = [threading.Thread(target=grow, args=(pool,)) for pool in pools]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert mlx_limits.wired[-1] == 4 * (1020 + 500)
