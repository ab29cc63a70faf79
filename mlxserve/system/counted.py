"""Numbers with their units, for sentences that people read."""

from __future__ import annotations


def counted(number: int, unit: str) -> str:
    """Write a number with its unit: `1 page`, `1,200 pages`."""
    return f"{number:,} {unit}{'' if number == 1 else 's'}"
