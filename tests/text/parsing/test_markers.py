"""The first marker of a text is found, and exactly what may become one is held back."""

from __future__ import annotations

from mlxserve.text.parsing.markers import find_marker, overlap


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


def test_the_first_marker_is_found_once_no_longer_one_may_begin_before_it() -> None:
    markers = ("<a>", "<a>b", "x<a", "see <a> now")
    for text, is_whole, found in [
        ("", False, (0, "")),
        ("plain", False, (5, "")),
        ("one <b> two", False, (11, "")),
        ("one <a> two", False, (4, "<a>")),
        ("one <a>b two", False, (4, "<a>b")),
        ("one x<a>", False, (4, "x<a")),
        ("one <", False, (4, "")),
        ("one <a", True, (6, "")),
        ("one <a>", True, (4, "<a>")),
        ("I see <a>", False, (2, "")),
        ("I see <a>", True, (6, "<a>")),
        ("I see <a> now", False, (2, "see <a> now")),
        ("I see <a> then", False, (6, "<a>")),
    ]:
        assert find_marker(text, markers, is_whole=is_whole) == found, text
    assert find_marker("any", ()) == (3, "")
