"""A fact that the model memorises, and the questions for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topic:
    """One fact. Every right answer mentions all `keywords`."""

    answer: str
    keywords: Sequence[str]
    train: Sequence[str]  # questions
    held_out: Sequence[str]
