"""Planted bugs of the units of rows of drafts, each found by a test."""

from __future__ import annotations

import pytest

from metal_kernels import draft_units
from tests.metal_kernels import test_draft_units
from tests.mutation.bug import Bug

pytestmark = pytest.mark.mutation

BUGS = {
    "rows on other pages are read by the last row's": Bug(
        draft_units,
        "_follows",
        "(pages[1:] == pages[:-1])",
        "(pages[1:] >= 0)",
        test_draft_units.test_rows_on_other_pages_are_not_joined,
    ),
    "pages past a row's end must be equal": Bug(
        draft_units,
        "_follows",
        " | is_free",
        "",
        test_draft_units.test_rows_on_other_pages_are_not_joined,
    ),
    "rows join whose turns differ": Bug(
        draft_units,
        "draft_units",
        "joins = cut.begin[own] // _KEYS == cut.begin[other] // _KEYS",
        "joins = cut.begin[own] >= 0",
        test_draft_units.test_windows_join_rows_that_begin_in_the_same_keys,
    ),
    "a unit has more rows than registers": Bug(
        draft_units,
        "_without_window",
        "if joins and len(runs[-1]) < most:",
        "if joins:",
        test_draft_units.test_sequences_are_not_joined_and_long_drafts_are_divided,
    ),
    "a unit of a window has more rows than registers": Bug(
        draft_units,
        "draft_units",
        "joins &= place[other] + 1 < most",
        "joins &= most > 1",
        test_draft_units.test_each_partition_is_in_one_unit_with_others_of_the_same_pages,
        {"seed": 0, "window": 70},
    ),
    "a row is joined with another partition": Bug(
        draft_units,
        "draft_units",
        "first = starts[row - 1] + int(number[begin] - number[starts[row - 1]])",
        "first = starts[row - 1]",
        test_draft_units.test_windows_join_rows_that_begin_in_the_same_keys,
    ),
    "a group with other turns is joined": Bug(
        draft_units,
        "rows_together",
        " or head_dim > 256",
        "",
        test_draft_units.test_rows_of_a_unit_fit_in_registers,
        {"group": 1, "head_dim": 512, "rows": 1},
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, request: pytest.FixtureRequest) -> None:
    BUGS[name].check_found(request, (AssertionError, ValueError, IndexError))
