"""Exactly the text that may become a marker is held back."""

from __future__ import annotations

import pytest

from mlxserve.text.parsing.overlap import overlap


@pytest.mark.parametrize(
    ("text", "markers", "length"),
    [
        ("", ["ab"], 0),
        ("x", [], 0),
        ("xa", ["ab"], 1),
        ("xab", ["ab"], 0),  # a complete marker is found, not held back
        ("x<too", ["<tool_call>", "<think>"], 4),
        ("aab", ["aabb", "bc"], 3),
        ("a <", ["<think>"], 1),
        ("aaa", ["a"], 0),
        ("abab", ["ababc"], 4),
    ],
)
def test_overlap_is_the_longest_suffix_that_starts_a_marker(
    text: str, markers: list[str], length: int
) -> None:
    assert overlap(text, tuple(markers)) == length
