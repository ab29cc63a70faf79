"""What a step takes by its rows, measured at load."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from mlxserve.build import timed_rows
from mlxserve.core.config import EngineConfig
from mlxserve.engine_part import EnginePart
from mlxserve.hub.files import find_model
from mlxserve.model import row_speeds
from mlxserve.model.attention import load_probed
from mlxserve.model.row_speeds import ROWS, describe, measure_rows
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
    table = measure_rows(loaded, backends, 16, rows=(1, 2, 5))
    assert list(table) == [1, 2, 5]
    assert list(table.values()) == sorted(table.values())
    assert table[1] > 0


def test_larger_sizes_are_left_out_once_the_time_is_up(
    mini: tuple, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_speeds, "MAX_SECONDS", 0.0)
    loaded, backends, _ = mini
    assert list(measure_rows(loaded, backends, 16)) == [ROWS[0]]


def test_a_table_is_described_in_milliseconds() -> None:
    assert describe({1: 0.02, 2: 0.0215}) == "1, 2 rows take 20.0, 21.5 ms"


def test_nothing_is_measured_where_nothing_is_ever_drafted() -> None:
    nobody = cast(EnginePart, None)
    assert timed_rows(EngineConfig(), nobody) is None


def test_what_steps_of_states_take_is_assumed_until_there_are_some() -> None:
    loaded = SimpleNamespace(has_states=True)
    part = cast(EnginePart, SimpleNamespace(loaded=loaded, drafter=None))
    times = timed_rows(EngineConfig().with_options(speculative_tokens=4), part)
    assert times is not None
    assert [times.shape(rows) for rows in ROWS] == [RowTimes().shape(rows) for rows in ROWS]
