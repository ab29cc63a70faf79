"""Drafts that never lose, on some of the recorded machines; `python -m tests.perf drafts` plays all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from mlxserve.model.row_speeds import ROWS
from mlxserve.scheduler.row_times import RowTimes
from tests.perf import draft_tables
from tests.perf.draft_tables import MACHINES, table_of
from tests.perf.drafts import IN_4_BITS, Cell, all_cells, in_4_bits, included_passes, losing


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return list(
        all_cells(
            range(2),
            machines=("M5 Max", "M1 Ultra", "CPU"),
            texts=("nothing right", "prose", "copies"),
            answers=(1, 4),
        )
    )


@pytest.mark.slow
def test_no_cell_is_slower_than_plain_decode(cells: list[Cell]) -> None:
    worst = min(cells, key=lambda cell: min(cell.speeds))
    assert min(worst.speeds) >= 0.97, worst


@pytest.mark.slow
def test_where_nothing_pays_nothing_is_lost(cells: list[Cell]) -> None:
    assert mean(losing(cells)) >= 0.99


def test_where_drafts_pay_most_of_it_is_gained(cells: list[Cell]) -> None:
    assert mean(cell.regret for cell in cells) <= 0.08
    by_name = {cell.name: mean(cell.speeds) for cell in cells}
    assert by_name["M5 Max, copies, 1 at once"] > 2.5
    assert by_name["M1 Ultra, copies, 4 at once"] > 1.8


@pytest.mark.slow
def test_drafts_save_passes_of_weights_where_five_rows_share_one() -> None:
    """With prompt lookup alone; a draft model or a head is right more often."""
    assert included_passes(MACHINES["M5 Max"], 5) <= 0.85
    assert included_passes(MACHINES["M1 Max"], 5) <= 1.0


@pytest.fixture(scope="module")
def own_in_4_bits() -> Iterator[Path]:
    with in_4_bits() as folder:
        yield folder


@pytest.mark.slow
def test_a_draft_model_that_is_mostly_right_saves_more_than_two_passes_of_five(
    own_in_4_bits: Path,
) -> None:
    """Its own weights are counted where it reads them."""
    free, counted = (
        included_passes(MACHINES["M5 Max"], 5, draft_model=own_in_4_bits, call=call)
        for call in (0.0, IN_4_BITS)
    )
    assert free < counted <= 0.6


@pytest.mark.slow
def test_a_draft_model_costs_no_pass_where_each_row_reads_the_weights(own_in_4_bits: Path) -> None:
    """The first trial would come after 150 steps."""
    m1 = MACHINES["M1 Max"]
    assert included_passes(m1, 4, draft_model=own_in_4_bits, call=IN_4_BITS) == 1.0


def test_the_page_of_drafts_has_these_tables() -> None:
    page = (Path(__file__).parents[2] / "docs/drafts.md").read_text()
    heading = " | ".join(["| rows of a step", *map(str, ROWS)])
    assert f"{heading} |" in page
    for machine, steps in MACHINES.items():
        assert f"| {machine} | {' | '.join(f'{steps(rows):.2f}' for rows in ROWS)} |" in page


def test_a_table_of_rows_is_that_of_the_machine_at_the_sizes_that_are_measured() -> None:
    for steps in MACHINES.values():
        times = RowTimes(table_of(steps))
        assert [times.shape(rows) for rows in ROWS] == pytest.approx([steps(rows) for rows in ROWS])
        assert steps(1) == 1


def test_weights_are_read_once_for_five_rows_since_the_m3_and_once_for_each_before() -> None:
    late, early = draft_tables.by_five(0.08, 3.4), draft_tables.by_row(0.85, 5.0, 6)
    assert [round(late(rows), 2) for rows in (2, 5, 6, 12, 13, 32, 33)] == [
        *(1.08, 1.32, 2.32, 3.72, 3.4, 3.4, 6.8)
    ]
    assert [round(early(rows), 2) for rows in (2, 5, 6, 32)] == [1.85, 4.4, 5.0, 5.0]
