"""How much of a text's end has to be held back."""

from __future__ import annotations

from collections.abc import Sequence


def overlap(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a marker and is not all of it."""
    longest = max(map(len, markers), default=1) - 1
    tail = text[-longest:] if longest else ""
    firsts = {marker[0] for marker in markers}
    for at, char in enumerate(tail):
        if char in firsts and any(_begins(marker, tail[at:]) for marker in markers):
            return len(tail) - at
    return 0


def _begins(marker: str, text: str) -> bool:
    return len(text) < len(marker) and marker.startswith(text)
