"""Instructions of attention for a key and query head, counted by the emulator, stay as low as they are."""

from __future__ import annotations

import pytest

from tests.perf import instructions


@pytest.mark.slow
@pytest.mark.parametrize(
    ("group", "is_quantised", "most", "share"),
    [
        (8, False, 10.4, 0.35),
        pytest.param(16, False, 10.4, 0.35, marks=pytest.mark.slow),
        (4, True, 22.1, 0.60),
        pytest.param(8, True, 11.2, 0.35, marks=pytest.mark.slow),
    ],
)
def test_matrices_take_fewer_instructions_than_one_head_after_the_other(
    group: int, is_quantised: bool, most: float, share: float
) -> None:
    found = instructions.decode(group, is_quantised=is_quantised)
    without = instructions.decode(group, is_quantised=is_quantised, uses_matrices=False)
    assert found <= most
    assert found <= share * without


@pytest.mark.slow
@pytest.mark.parametrize(("is_quantised", "most"), [(False, 11.2), (True, 12.3)])
def test_tiles_take_no_more_instructions_than_without_a_shrink_each_time(
    is_quantised: bool, most: float
) -> None:
    """With a shrink for each tile they took 12.2, and 13.2 in 8 bits."""
    assert instructions.tiles(is_quantised=is_quantised) <= most


@pytest.mark.long
@pytest.mark.parametrize(("rows", "most"), [(1, 49.6), (16, 44.2)])
def test_latents_take_no_more_instructions_than_without_a_shrink_each_time(
    rows: int, most: float
) -> None:
    """With a shrink for each tile they took 57.5, and 51.9 in chunks."""
    assert instructions.latents(rows) <= most
