"""What a step takes by its rows, measured at load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from mlxserve.build import timed_rows
from mlxserve.core.config import EngineConfig
from mlxserve.engine_part import EnginePart
from mlxserve.hub.files import find_model
from mlxserve.model import row_speeds
from mlxserve.model.attention import load_probed
from mlxserve.model.row_speeds import ROWS, describe, measure_rows, seconds_of_draft
from mlxserve.model.runner import ModelRunner, Pending
from mlxserve.model.state_groups import Group
from mlxserve.model.states import StateStore
from mlxserve.request import Sampled
from mlxserve.scheduler.row_times import RowTimes
from mlxserve.system import machine


@pytest.fixture(scope="module")
def mini() -> tuple:
    machine.prepare()
    return load_probed(
        find_model(None),
        is_metal=False,
        memory_limit=1 << 30,
        kv_cache_dtype="auto",
        attention_backend="auto",
    )


def test_every_size_has_a_time_and_more_rows_take_no_less(mini: tuple) -> None:
    loaded, backends, _ = mini
    table, call = measure_rows(loaded, backends, 16, rows=(1, 2, 5))
    assert list(table) == [1, 2, 5]
    assert list(table.values()) == sorted(table.values())
    assert table[1] > 0
    assert call == 0


def test_larger_sizes_are_left_out_once_the_time_is_up(
    mini: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_speeds, "MAX_SECONDS", 0.0)
    loaded, backends, _ = mini
    table, _ = measure_rows(loaded, backends, 16)
    assert list(table) == [ROWS[0]]


def test_a_table_is_described_in_milliseconds() -> None:
    assert describe({1: 0.02, 2: 0.0215}) == "1, 2 rows take 20.0, 21.5 ms"


def test_nothing_is_measured_where_nothing_is_ever_drafted() -> None:
    nobody = cast(EnginePart, None)
    assert timed_rows(EngineConfig(), nobody) is None


class Timed:
    """A clock that a runner moves on: by a second a step, and by what its rows and recurrent layers take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.positions = 0.0, set[int]()
        collect = ModelRunner.collect

        def collecting(runner: ModelRunner, pending: Pending) -> list[Sampled | None]:
            starts = [chunk.start for chunk in pending.chunks]
            self.positions.update(starts)
            if starts == [1] * len(starts):
                self.now += 100  # states of single sequences are put together
            longest = max(len(chunk.draft) for chunk in pending.chunks)
            self.now += 1 + 0.01 * sum(chunk.length for chunk in pending.chunks) + 0.25 * longest
            return collect(runner, pending)

        monkeypatch.setattr(ModelRunner, "collect", collecting)
        monkeypatch.setattr(row_speeds, "time", SimpleNamespace(perf_counter=lambda: self.now))
        monkeypatch.setattr(row_speeds, "MAX_SECONDS", 1e9)


@pytest.fixture(scope="module")
def hybrid(model_folder: Callable[[str], Path]) -> tuple:
    return load_probed(
        find_model(str(model_folder("qwen3_next"))),
        is_metal=False,
        memory_limit=1 << 30,
        kv_cache_dtype="auto",
        attention_backend="auto",
    )


def test_rows_of_states_are_timed_after_their_first_positions(
    hybrid: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a draft's further rows, which recurrent layers compute one after the other, beside as many sequences."""
    clock = Timed(monkeypatch)
    loaded, backends, _ = hybrid
    table, call = measure_rows(loaded, backends, 16, rows=(1, 2, 5))
    assert table == pytest.approx({1: 1.01, 2: 1.02, 5: 1.05})
    assert call == pytest.approx(0.25)
    assert max(clock.positions) > 4, "each step continues the states of the one before"


def test_a_step_with_a_draft_is_timed_as_the_table_times_it(
    hybrid: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows, three of which are another call of recurrent layers."""
    Timed(monkeypatch)
    loaded, backends, _ = hybrid
    assert seconds_of_draft(loaded, backends, 16) == pytest.approx(1.04 + 3 * 0.25)


@pytest.mark.parametrize(("num_slots", "sizes"), [(6, [1, 2]), (1, [1]), (15, [1, 2, 3, 5])])
def test_no_more_states_are_timed_than_there_is_memory_for(
    num_slots: int, sizes: list[int], hybrid: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    Timed(monkeypatch)
    num_held = 0
    commit = StateStore.commit

    def committing(store: StateStore, groups: Sequence[Group]) -> None:
        nonlocal num_held
        commit(store, groups)
        num_held = max(num_held, sum(group.batch for group in groups))

    monkeypatch.setattr(StateStore, "commit", committing)
    loaded, backends, _ = hybrid
    table, call = measure_rows(loaded, backends, 16, num_slots=num_slots)
    assert list(table) == sizes
    assert call == pytest.approx(0.25)
    assert num_held <= max(2, num_slots // 3)


def test_drafts_of_states_cost_what_was_measured_for_each_token_of_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "mlxserve.build.measure_rows", lambda *_, **__: ({1: 1.0, 2: 1.1, 8: 1.4}, 0.25)
    )
    config = EngineConfig().with_options(speculative_tokens=4)

    def shapes(*, has_states: bool, drafter: object) -> list[float]:
        loaded = SimpleNamespace(has_states=has_states, group=None)
        part = SimpleNamespace(loaded=loaded, drafter=drafter, backends=())
        times = timed_rows(config, cast(EnginePart, part))
        assert times is not None
        return [times.shape(8), times.shape(8, 2)]

    assert shapes(has_states=False, drafter=None) == pytest.approx([1.4, 1.4])
    assert shapes(has_states=True, drafter=None) == pytest.approx([1.4, 1.9])
    assert shapes(has_states=True, drafter=object()) == pytest.approx([1.4, 1.9 + 2 * 0.08])


def test_nothing_is_measured_where_other_ranks_wait_for_what_they_are_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mlxserve.build.measure_rows", None)
    loaded = SimpleNamespace(has_states=True, group=object())
    part = cast(EnginePart, SimpleNamespace(loaded=loaded, drafter=None))
    times = timed_rows(EngineConfig().with_options(speculative_tokens=4), part)
    assert times is not None
    assert times.shape(3) == RowTimes().shape(3)
    assert times.shape(3, 2) == RowTimes(has_calls=True).shape(3, 2)
