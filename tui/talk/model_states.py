"""The models of a server and what is loaded of them. Data only, without an HTTP client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model of the server and its state.

    state: "unloaded", "loading", "loaded" or "unloading"
    memory, size: bytes that it takes now, and of its weights
    seconds_left: until it is unloaded if it stays unused; None for never
    """

    name: str
    state: str
    memory: int = 0
    size: int = 0
    num_requests: int = 0
    seconds_left: float | None = None
    is_pinned: bool = False

    @classmethod
    def from_card(cls, card: Mapping[str, Any]) -> ModelState:
        """Raises KeyError, TypeError and ValueError."""
        left = card.get("unloads_in_seconds")
        return cls(
            name=str(card["id"]),
            state=str(card["state"]),
            memory=int(card.get("memory") or 0),
            size=int(card.get("size") or 0),
            num_requests=int(card.get("num_requests") or 0),
            seconds_left=None if left is None else float(left),
            is_pinned=bool(card.get("pinned", False)),
        )


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """The models of a server; `limit` is what all may have together, in bytes, None for no limit."""

    models: Sequence[ModelState]
    limit: int | None = None

    @property
    def used(self) -> int:
        """Bytes of all models."""
        return sum(model.memory for model in self.models)
