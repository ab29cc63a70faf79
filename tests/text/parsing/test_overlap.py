"""What could become a marker is held back, and no more."""

from __future__ import annotations

import pytest

from mlxserve.text.parsing.overlap import overlap


@pytest.mark.parametrize(
    ("text", "markers", "length"),
    [
        ("", ["ab"], 0),
        ("x", [], 0),
        ("xa", ["ab"], 1),
        ("xab", ["ab"], 0),  # all of it: found, not held back
        ("x<too", ["<tool_call>", "<think>"], 4),
        ("aab", ["aabb", "bc"], 3),
        ("a <", ["<think>"], 1),
        ("aaa", ["a"], 0),
        ("abab", ["ababc"], 4),
    ],
)
def test_the_longest_end_that_begins_a_marker_counts(
    text: str, markers: list[str], length: int
) -> None:
    assert overlap(text, tuple(markers)) == length
