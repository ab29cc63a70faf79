"""Markers in a text that is still to be continued: the first one, and the beginning of one."""

from __future__ import annotations

from functools import lru_cache


def find_marker(text: str, markers: tuple[str, ...], *, is_whole: bool = False) -> tuple[int, str]:
    """Return (place of the first marker, the longest marker there).

    Without one: (number of characters before what may be the beginning of a marker, "").
    is_whole: no more text will come
    """
    # The usual case; this runs once per token.
    if _outline(markers)[1].isdisjoint(text):
        return len(text), ""
    matches = [(at, -len(m), m) for m in markers if (at := text.find(m)) >= 0]
    at, _, marker = min(matches, default=(len(text), 0, ""))
    # A longer marker may begin before this one, and end in text that is still to come.
    safe = len(text) if is_whole else len(text) - overlap(text, markers)
    return (at, marker) if at <= safe else (safe, "")


def overlap(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a marker."""
    longest, firsts = _outline(markers)
    tail = text[-longest:] if longest else ""
    # The usual case; this runs once per token.
    if firsts.isdisjoint(tail):
        return 0
    for at, char in enumerate(tail):
        if char in firsts and any(_begins(marker, tail[at:]) for marker in markers):
            return len(tail) - at
    return 0


@lru_cache(maxsize=64)
def _outline(markers: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    """(longest possible overlap, first characters of the markers)."""
    return max(map(len, markers), default=1) - 1, frozenset(marker[0] for marker in markers)


def _begins(marker: str, text: str) -> bool:
    return len(text) < len(marker) and marker.startswith(text)
