"""How much of a text's end has to be held back."""

from __future__ import annotations

from collections.abc import Sequence


def overlap(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a marker and is not all of it."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0
