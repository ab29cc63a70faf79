"""Exactly the text that may become a marker is held back."""

from __future__ import annotations

from mlxserve.text.parsing.overlap import overlap


def test_overlap_is_the_longest_suffix_that_starts_a_marker() -> None:
    for text, markers, length in [
        ("", ["ab"], 0),
        ("x", [], 0),
        ("xa", ["ab"], 1),
        ("xab", ["ab"], 0),  # a complete marker is found, not held back
        ("x<too", ["<tool_call>", "<think>"], 4),
        ("aab", ["aabb", "bc"], 3),
        ("a <", ["<think>"], 1),
        ("aaa", ["a"], 0),
        ("abab", ["ababc"], 4),
    ]:
        assert overlap(text, tuple(markers)) == length, text
