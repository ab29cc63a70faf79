"""Every definition in every condition: what a user of any served model may rely on."""

from __future__ import annotations

import pytest

from tests.model import conditions, coverage

ALL = [(library, name) for library in coverage.FILES for name in coverage.rows(library)]
# One of each kind of cache, in the suite of what is long: attention alone, windows, states, latents, one at a time.
OFTEN = {"llama", "gemma3_text", "qwen3_next", "deepseek_v3"}


@pytest.mark.parametrize(
    ("library", "name"),
    [
        pytest.param(
            *each,
            marks=pytest.mark.long if each[1] in OFTEN else pytest.mark.conditions,
            id="-".join(each),
        )
        for each in ALL
    ],
)
def test_a_definition_answers_right_in_every_condition(library: str, name: str) -> None:
    found = conditions.found()[library][name]
    assert conditions.outcome(library, name) == {k: v for k, v in found.items() if k != "with"}
    assert "wrong" not in found


def test_every_definition_was_tried_in_every_condition() -> None:
    found = conditions.found()
    assert [(library, name) for library, rows in found.items() for name in rows] == ALL
    for rows in found.values():
        assert {row.get("right", len(conditions.CONDITIONS)) for row in rows.values()} == {
            len(conditions.CONDITIONS)
        }
        assert [name for name, row in rows.items() if "wrong" in row] == []


def test_what_is_served_is_what_was_tried() -> None:
    """A definition is refused here exactly where docs/models.md says that it is refused."""
    for library, rows in conditions.found().items():
        served = {name for name, row in coverage.rows(library).items() if "served" in row}
        assert {
            name for name, row in rows.items() if {"right", "uncompared"} & row.keys()
        } == served
