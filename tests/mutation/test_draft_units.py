"""Planted bugs of the units of rows of drafts, each found by a test."""

from __future__ import annotations

import pytest

from metal_kernels import dispatches, draft_units
from tests.emulated import emulated_backend
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
        "joins = cut.begin[own] // keys == cut.begin[other] // keys",
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
    "rows of small groups join in sixteen keys": Bug(
        dispatches.Dispatches,
        "_units",
        "GROUPED_KEYS if is_large else KEYS",
        "GROUPED_KEYS",
        lambda: test_draft_units.Drafts(window=37).check(emulated_backend()),
    ),
    "a unit of a large group has more rows than registers": Bug(
        draft_units,
        "rows_of_large_groups",
        "_GROUPED_DIMS // head_dim",
        "MAX_ROWS",
        test_draft_units.test_rows_of_large_groups_have_the_registers_of_256_dimensions,
        {"head_dim": 128, "rows": 2},
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str, request: pytest.FixtureRequest) -> None:
    BUGS[name].check_found(request, (AssertionError, ValueError, IndexError))
