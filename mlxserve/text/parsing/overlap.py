"""How much of a text's end has to be held back."""

from __future__ import annotations

from functools import lru_cache


def overlap(text: str, markers: tuple[str, ...]) -> int:
    """Length of the longest end of `text` that begins a marker and is not all of it."""
    if not markers:
        return 0
    longest, firsts = _outline(markers)
    tail = text[-longest:] if longest else ""
    if firsts.isdisjoint(tail):  # most texts, most of the time, and for every token
        return 0
    for at, char in enumerate(tail):
        if char in firsts and any(_begins(marker, tail[at:]) for marker in markers):
            return len(tail) - at
    return 0


@lru_cache(maxsize=64)
def _outline(markers: tuple[str, ...]) -> tuple[int, frozenset[str]]:
    """(how long an end can be, the characters it can begin with)."""
    return max(map(len, markers)) - 1, frozenset(marker[0] for marker in markers)


def _begins(marker: str, text: str) -> bool:
    return len(text) < len(marker) and marker.startswith(text)
