"""The part of a text's end that may be the beginning of a marker."""

from __future__ import annotations

from functools import lru_cache


def overlap(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a marker."""
    if not markers:
        return 0
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
    return max(map(len, markers)) - 1, frozenset(marker[0] for marker in markers)


def _begins(marker: str, text: str) -> bool:
    return len(text) < len(marker) and marker.startswith(text)
